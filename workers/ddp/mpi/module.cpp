// The only source that includes MPI; compiled into libddp-mpi-openmpi.so, libddp-mpi-mpich.so or both, with
// the site's own MPI.
#include "ddp/mpi/module.h"

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <string>

namespace ddp::mpi {

using ddprun::SegmentOp;

struct Communicator {
    MPI_Comm handle;
};
struct Request {
    MPI_Request handle;
};

namespace {

std::atomic<bool> is_abandoned = false;

const char* error_text(const char* call, int code) {
    if (code == MPI_SUCCESS) return nullptr;
    thread_local std::string text;
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(code, reason, &length) != MPI_SUCCESS) length = 0;
    text = std::string(call) + ": " + std::string(reason, static_cast<std::size_t>(length));
    return text.c_str();
}

MPI_Datatype type_of(DType type) {
    switch (type) {
        case DType::F32: return MPI_FLOAT;
        case DType::F64: return MPI_DOUBLE;
        case DType::I32: return MPI_INT32_T;
        case DType::I64: return MPI_INT64_T;
        case DType::BF16:
        case DType::F16: return MPI_UINT16_T;  // copied, never reduced
        case DType::I8: return MPI_INT8_T;
        case DType::U8:
        case DType::Bool: return MPI_UINT8_T;
    }
    return MPI_BYTE;
}

MPI_Op op_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::Max: return MPI_MAX;
        case ReduceOp::Min: return MPI_MIN;
        case ReduceOp::Product: return MPI_PROD;
        case ReduceOp::Sum:
        case ReduceOp::Avg: return MPI_SUM;
    }
    return MPI_SUM;
}

pid_t begun_by = 0;  ///< the process that called MPI_Init

/// Called at the end of a forked child too, which would wait for the other ranks or break their connections.
void finalize() {
    int ended = 0;
    if (::getpid() != begun_by) return;
    if (!is_abandoned && MPI_Finalized(&ended) == MPI_SUCCESS && ended == 0) MPI_Finalize();
}

/// Makes MPI return errors instead of ending the job.
const char* returns_errors(MPI_Comm comm) {
    return error_text("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
}

/// "Open MPI v4.1.4" from "Open MPI v4.1.4, package: ...", "MPICH Version: 4.0.2" from its first line.
const char* library_name() {
    static std::string name;
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    name = std::string(text).substr(0, std::string(text).find_first_of(",\n"));
    for (char& letter : name) letter = letter == '\t' ? ' ' : letter;
    return name.c_str();
}

const char* open(Communicator** world, About* about) {
    int begun = 0, level = 0;
    MPI_Initialized(&begun);
    if (begun == 0) {
        if (const char* why =
                error_text("MPI_Init_thread", MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level)))
            return why;
        begun_by = ::getpid();
        std::atexit(finalize);
    }
    if (const char* why = error_text("MPI_Query_thread", MPI_Query_thread(&level))) return why;
    auto made = new Communicator{};
    const char* why = error_text("MPI_Comm_dup", MPI_Comm_dup(MPI_COMM_WORLD, &made->handle));
    if (why == nullptr) why = returns_errors(made->handle);
    *about = {library_name(), level == MPI_THREAD_MULTIPLE};
    *world = made;
    return why;
}

const char* place(Communicator* communicator, int* rank, int* size) {
    if (const char* why = error_text("MPI_Comm_rank", MPI_Comm_rank(communicator->handle, rank))) return why;
    return error_text("MPI_Comm_size", MPI_Comm_size(communicator->handle, size));
}

const char* begin(Communicator* communicator, const Operation* operation, Request** request) {
    const Operation& one = *operation;
    if (one.count > static_cast<std::size_t>(std::numeric_limits<int>::max())) return kTooMany;
    const MPI_Comm comm = communicator->handle;
    const MPI_Datatype type = type_of(one.dtype);
    const MPI_Op op = op_of(one.op);
    const auto count = static_cast<int>(one.count);
    const bool is_uneven = one.out_cut.counts != nullptr;
    const void* const in = one.in == nullptr && one.count > 0 ? MPI_IN_PLACE : one.in;
    constexpr int kTag = 77;
    auto* const made = new Request{MPI_REQUEST_NULL};
    *request = made;
    MPI_Request* const to = &made->handle;
    const auto called = [&](const char* call, int code) {
        const char* why = error_text(call, code);
        if (why != nullptr) delete made;
        return why;
    };
    switch (one.operation) {
        case SegmentOp::AllReduce:
            return called("MPI_Iallreduce", MPI_Iallreduce(in, one.out, count, type, op, comm, to));
        case SegmentOp::Broadcast:
            return called("MPI_Ibcast", MPI_Ibcast(one.out, count, type, one.peer, comm, to));
        case SegmentOp::AllGather:
            if (is_uneven)
                return called("MPI_Iallgatherv", MPI_Iallgatherv(in, count, type, one.out, one.out_cut.counts,
                                                                 one.out_cut.offsets, type, comm, to));
            return called("MPI_Iallgather", MPI_Iallgather(in, count, type, one.out, count, type, comm, to));
        case SegmentOp::ReduceScatter:
            if (is_uneven)
                return called("MPI_Ireduce_scatter",
                              MPI_Ireduce_scatter(in, one.out, one.out_cut.counts, type, op, comm, to));
            return called("MPI_Ireduce_scatter_block",
                          MPI_Ireduce_scatter_block(in, one.out, count, type, op, comm, to));
        case SegmentOp::Reduce:
            return called("MPI_Ireduce", MPI_Ireduce(in, one.out, count, type, op, one.peer, comm, to));
        case SegmentOp::Gather:
            return called("MPI_Igather",
                          MPI_Igather(in, count, type, one.out, count, type, one.peer, comm, to));
        case SegmentOp::Scatter: {
            // In a scatter the receive buffer may be in place.
            void* const out = one.out == nullptr && one.count > 0 ? MPI_IN_PLACE : one.out;
            return called("MPI_Iscatter",
                          MPI_Iscatter(one.in, count, type, out, count, type, one.peer, comm, to));
        }
        case SegmentOp::AllToAll:
            if (is_uneven)
                return called("MPI_Ialltoallv",
                              MPI_Ialltoallv(in, one.in_cut.counts, one.in_cut.offsets, type, one.out,
                                             one.out_cut.counts, one.out_cut.offsets, type, comm, to));
            return called("MPI_Ialltoall", MPI_Ialltoall(in, count, type, one.out, count, type, comm, to));
        case SegmentOp::Barrier: return called("MPI_Ibarrier", MPI_Ibarrier(comm, to));
        case SegmentOp::Send:
            return called("MPI_Isend", MPI_Isend(one.in, count, type, one.peer, kTag, comm, to));
        case SegmentOp::Recv:
            return called("MPI_Irecv", MPI_Irecv(one.out, count, type, one.peer, kTag, comm, to));
        default: break;
    }
    delete made;
    return "no such operation";
}

const char* test(Request* request, bool* done) {
    int ended = 0;
    const char* why = error_text("MPI_Test", MPI_Test(&request->handle, &ended, MPI_STATUS_IGNORE));
    *done = ended != 0;
    if (why != nullptr || *done) delete request;
    return why;
}

const char* split(Communicator* communicator, int color, int key, Communicator** made) {
    MPI_Comm part = MPI_COMM_NULL;
    *made = nullptr;
    const int chosen = color < 0 ? MPI_UNDEFINED : color;
    if (const char* why =
            error_text("MPI_Comm_split", MPI_Comm_split(communicator->handle, chosen, key, &part)))
        return why;
    if (part == MPI_COMM_NULL) return nullptr;
    *made = new Communicator{part};
    return returns_errors(part);
}

void close(Communicator* communicator) {
    int ended = 0;
    if (!is_abandoned && MPI_Finalized(&ended) == MPI_SUCCESS && ended == 0)
        MPI_Comm_free(&communicator->handle);
    delete communicator;
}

void abandon() { is_abandoned = true; }

constexpr Module kModule{kModuleVersion, open, place, begin, test, split, close, abandon};

}  // namespace
}  // namespace ddp::mpi

extern "C" __attribute__((visibility("default"))) const ddp::mpi::Module* ddp_mpi_module();
extern "C" const ddp::mpi::Module* ddp_mpi_module() { return &ddp::mpi::kModule; }
