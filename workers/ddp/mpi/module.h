#pragma once

#include <cstddef>
#include <cstdint>

#include "ddp/types.h"

/// What the group asks of a site's MPI. A program is bound to one MPI when it is linked, so libddp is to
/// none: what knows it is a module of its own (module.cpp), compiled with the site's and loaded where backend
/// "mpi" is asked for (load.h).
namespace ddp::mpi {

inline constexpr int kModuleVersion = 2;

inline constexpr const char* kTooMany =
    "more than 2147483647 elements, which MPI cannot count: take several calls";

struct Communicator;
struct Request;

enum class Kind : std::int32_t {
    AllReduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    AllGatherV,
    ReduceScatterV,
    AllToAllV,
    Barrier,
    Send,
    Recv
};

/// How a buffer is cut into one slice for each rank: elements by rank, and where they begin.
struct Cut {
    const int* counts = nullptr;
    const int* offsets = nullptr;
};

/// One operation, as MPI has it. What it points to stays until it is done. `in` is null where MPI_IN_PLACE is
/// meant.
struct Operation {
    Kind kind = Kind::Barrier;
    const void* in = nullptr;
    void* out = nullptr;
    std::size_t count = 0;        ///< elements, as MPI counts them: of one rank
    DType dtype = DType::U8;      ///< not 16 bits where it reduces
    ReduceOp op = ReduceOp::Sum;  ///< not Avg
    int peer = 0;                 ///< or root
    Cut out_cut = {};             ///< AllGatherV, AllToAllV; ReduceScatterV: of `in`
    Cut in_cut = {};              ///< AllToAllV
};

/// Which MPI it is.
struct About {
    const char* library = "";    ///< "Open MPI v4.1.4"
    bool takes_threads = false;  ///< any thread may call it at any time
};

/// The entry points; one thread at a time in each communicator, and in all of them unless it takes threads.
/// They return what went wrong, which stays until the thread's next call, or null.
struct Module {
    int version = kModuleVersion;
    /// Starts MPI unless the program has, and ends it with the process.
    const char* (*open)(Communicator** world, About* about) = nullptr;
    const char* (*place)(Communicator* communicator, int* rank, int* size) = nullptr;
    /// Does not block.
    const char* (*begin)(Communicator* communicator, const Operation* operation, Request** request) = nullptr;
    /// Makes progress; frees the request once it is done.
    const char* (*test)(Request* request, bool* done) = nullptr;
    /// Collective, blocks; null for a negative color.
    const char* (*split)(Communicator* communicator, int color, int key, Communicator** made) = nullptr;
    void (*close)(Communicator* communicator) = nullptr;
    /// What is under way cannot be ended: MPI is not to wait for it at the end of the process.
    void (*abandon)() = nullptr;
};

inline constexpr const char* kModuleEntry = "ddp_mpi_module";  ///< const Module* ddp_mpi_module()

}  // namespace ddp::mpi
