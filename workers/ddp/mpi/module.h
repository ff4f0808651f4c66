#pragma once

#include <cstddef>
#include <cstdint>

#include "ddp/types.h"
#include "env/segment.h"

/// The interface between the group and a site's MPI. Linking binds a program to one MPI, so libddp is linked
/// to none: a module of its own (module.cpp) is compiled with the site's MPI and loaded for backend "mpi"
/// (load.h).
namespace ddp::mpi {

inline constexpr int kModuleVersion = 4;

inline constexpr const char* kTooMany =
    "more than 2147483647 elements, which MPI cannot count: take several calls";

struct Communicator;
struct Request;

/// The division of a buffer into one slice per rank: lengths and offsets in elements, by rank.
struct Cut {
    const int* counts = nullptr;
    const int* offsets = nullptr;
};

/// One operation in MPI's terms. Its pointers must stay valid until it is done. `in` is null for
/// MPI_IN_PLACE.
struct Operation {
    ddprun::SegmentOp operation = ddprun::SegmentOp::Barrier;
    const void* in = nullptr;
    void* out = nullptr;
    std::size_t count = 0;        ///< elements of one rank, as MPI counts them
    DType dtype = DType::U8;      ///< not a 16-bit type in reductions
    ReduceOp op = ReduceOp::Sum;  ///< not Avg
    int peer = 0;                 ///< peer or root
    Cut out_cut = {};             ///< of an uneven operation; in a ReduceScatter of `in`
    Cut in_cut = {};              ///< of an uneven AllToAll
};

struct About {
    const char* library = "";    ///< "Open MPI v4.1.4"
    bool takes_threads = false;  ///< any thread may call it at any time
};

/// The entry points. One thread at a time may use a communicator, or any of them unless MPI takes threads.
/// They return the error text, valid until the thread's next call, or null.
struct Module {
    int version = kModuleVersion;
    /// Starts MPI unless the program has started it, and finalizes it when the process ends.
    const char* (*open)(Communicator** world, About* about) = nullptr;
    const char* (*place)(Communicator* communicator, int* rank, int* size) = nullptr;
    /// Does not block.
    const char* (*begin)(Communicator* communicator, const Operation* operation, Request** request) = nullptr;
    /// Makes progress; frees the request once it is done.
    const char* (*test)(Request* request, bool* done) = nullptr;
    /// Collective, blocks; null for a negative color.
    const char* (*split)(Communicator* communicator, int color, int key, Communicator** made) = nullptr;
    void (*close)(Communicator* communicator) = nullptr;
    /// Pending operations cannot be ended: MPI must not be finalized at the end of the process.
    void (*abandon)() = nullptr;
};

inline constexpr const char* kModuleEntry = "ddp_mpi_module";  ///< const Module* ddp_mpi_module()

}  // namespace ddp::mpi
