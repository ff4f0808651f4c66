// The entry points of libnccl that libddp calls, over host memory and tests/support/fake_nccl/fake_cuda.
// What goes wrong, and where, is said by FAKE_NCCL (fault.h).
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <thread>

#include "ddp/nccl_api.h"
#include "tests/support/fake_nccl/fake_cuda.h"
#include "tests/support/fake_nccl/fault.h"
#include "tests/support/fake_nccl/meeting.h"

namespace fake {

using ddp::nccl::Code;
using ddp::nccl::Handle;
using ddp::nccl::Op;
using ddp::nccl::Type;
using ddp::nccl::UniqueId;

namespace {

struct Comm {
    int rank = 0, ranks = 1;
    std::vector<Fault> faults = faults_from_environment();
    std::atomic<Code> state{Code::InProgress};
    std::atomic<bool> aborted{false};
    std::atomic<int> running{0};  ///< collectives on a device now
    std::unique_ptr<Meeting> meeting;
    int collectives = 0;
    bool finalizing = false;

    std::optional<Fault> fault(const std::string& where) const { return find(faults, rank, where); }
};
using Shared = std::shared_ptr<Comm>;

Shared& comm_of(Handle handle) { return *reinterpret_cast<Shared*>(handle); }

void wait_for_abort(const Comm& comm) {
    while (!comm.aborted) nap();
}

std::size_t bytes_of(Type type) {
    switch (type) {
        case Type::Int8:
        case Type::UInt8:
            return 1;
        case Type::Float16:
        case Type::BFloat16:
            return 2;
        case Type::Int32:
        case Type::UInt32:
        case Type::Float32:
            return 4;
        case Type::Int64:
        case Type::UInt64:
        case Type::Float64:
            return 8;
    }
    return 0;
}

template <class T>
T combined(T a, T b, Op op) {
    switch (op) {
        case Op::Sum:
        case Op::Avg:
            return static_cast<T>(a + b);
        case Op::Prod:
            return static_cast<T>(a * b);
        case Op::Max:
            return std::max(a, b);
        case Op::Min:
            return std::min(a, b);
    }
    return a;
}

/// out[i] = the reduction over all ranks of element first + i.
template <class T>
void reduce_as(const Comm& comm, std::size_t first, std::size_t count, Op op, void* out) {
    for (std::size_t i = 0; i < count; ++i) {
        T value{};
        for (int rank = 0; rank < comm.ranks; ++rank) {
            T theirs;
            std::memcpy(&theirs, comm.meeting->area(rank) + (first + i) * sizeof(T), sizeof(T));
            value = rank == 0 ? theirs : combined(value, theirs, op);
        }
        if (op == Op::Avg) value = static_cast<T>(value / static_cast<T>(comm.ranks));
        std::memcpy(static_cast<std::byte*>(out) + i * sizeof(T), &value, sizeof(T));
    }
}

bool reduce(const Comm& comm, Type type, std::size_t first, std::size_t count, Op op, void* out) {
    switch (type) {
        case Type::Float32:
            return reduce_as<float>(comm, first, count, op, out), true;
        case Type::Float64:
            return reduce_as<double>(comm, first, count, op, out), true;
        case Type::Int32:
            return reduce_as<std::int32_t>(comm, first, count, op, out), true;
        case Type::Int64:
            return reduce_as<std::int64_t>(comm, first, count, op, out), true;
        case Type::UInt8:
            return reduce_as<std::uint8_t>(comm, first, count, op, out), true;
        default:
            return false;
    }
}

void sleep_unless_aborted(const Comm& comm, int milliseconds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (!comm.aborted && std::chrono::steady_clock::now() < until) nap();
}

using Combine = std::function<void(const Comm&)>;

/// The collective as the device runs it.
void run(Comm& comm, const std::optional<Fault>& fault, std::span<const std::byte> sent,
         const Combine& combine, Stream& stream) {
    if (comm.aborted) return;
    if (fault && fault->what == "async") comm.state = static_cast<Code>(fault->number);
    if (fault && (fault->what == "async" || fault->what == "hang")) return wait_for_abort(comm);
    if (fault && fault->what == "delay") sleep_unless_aborted(comm, fault->number);
    if (fault && fault->what == "cuda") {
        stream.error = fault->number;
        return;
    }
    std::memcpy(comm.meeting->area(comm.rank), sent.data(), sent.size());
    if (!comm.meeting->arrive(comm.aborted)) return;
    combine(comm);
    comm.meeting->arrive(comm.aborted);
}

Code collective(Handle handle, void* stream, const void* in, std::size_t bytes, Combine combine) {
    const Shared comm = comm_of(handle);
    // As NCCL does it: what has failed says so again, and what is not ready takes no calls.
    if (const Code state = comm->state; state != Code::Success) {
        return state == Code::InProgress ? Code::InvalidUsage : state;
    }
    if (bytes > kAreaBytes) return Code::InvalidArgument;
    const std::optional<Fault> fault = comm->fault(std::to_string(++comm->collectives));
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    if (fault && fault->what == "stuck") {
        comm->state = Code::InProgress;
        return Code::InProgress;
    }
    const std::span sent(static_cast<const std::byte*>(in), bytes);
    const std::shared_ptr<Stream> on = stream_of(stream);
    on->post([comm, fault, sent, combine = std::move(combine), device = on.get()] {
        ++comm->running;
        run(*comm, fault, sent, combine, *device);
        --comm->running;
    });
    return Code::Success;
}

Code join(Handle* handle, int ranks, int rank, const UniqueId& id) {
    auto comm = std::make_shared<Comm>();
    comm->rank = rank;
    comm->ranks = ranks;
    const std::optional<Fault> fault = comm->fault("init");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    *handle = reinterpret_cast<Handle>(new Shared(comm));
    if (fault && fault->what == "async") comm->state = static_cast<Code>(fault->number);
    if (fault && fault->what != "delay") return Code::InProgress;
    std::thread([comm, fault, name = std::string(id.internal)] {
        if (fault) sleep_unless_aborted(*comm, fault->number);
        if (comm->aborted) return;
        comm->meeting = std::make_unique<Meeting>(name, comm->rank, comm->ranks);
        while (!comm->aborted && !comm->meeting->complete()) nap();
        if (!comm->aborted) comm->state = Code::Success;
    }).detach();
    return Code::InProgress;
}

}  // namespace
}  // namespace fake

using namespace fake;
using ddp::nccl::Config;
using ddp::nccl::Residence;
using ddp::nccl::Window;

extern "C" {

Code ncclGetVersion(int* version) { return *version = 22809, Code::Success; }
const char* ncclGetErrorString(Code code) {
    switch (code) {
        case Code::Success:
            return "no error";
        case Code::UnhandledCudaError:
            return "unhandled cuda error";
        case Code::SystemError:
            return "unhandled system error";
        case Code::InternalError:
            return "internal error";
        case Code::InvalidArgument:
            return "invalid argument";
        case Code::InvalidUsage:
            return "invalid usage";
        case Code::RemoteError:
            return "remote process exited or there was a network error";
        case Code::InProgress:
            return "NCCL operation in progress";
    }
    return "unknown result code";
}
const char* ncclGetLastError(Handle comm) { return comm == nullptr ? "" : "the fake's last words"; }

Code ncclGetUniqueId(UniqueId* id) {
    if (const auto fault = find(faults_from_environment(), 0, "id")) return static_cast<Code>(fault->number);
    const std::string name = Meeting::create();
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->internal, name.data(), name.size());
    return Code::Success;
}
Code ncclCommInitRankConfig(Handle* comm, int ranks, UniqueId id, int rank, Config* config) {
    if (config->magic != 0xcafebeef || config->blocking != 0) return Code::InvalidArgument;
    return join(comm, ranks, rank, id);
}
Code ncclCommInitRankScalable(Handle* comm, int ranks, int rank, int, UniqueId* ids, Config*) {
    return join(comm, ranks, rank, ids[0]);
}
Code ncclCommGetAsyncError(Handle handle, Code* state) {
    const Shared& comm = comm_of(handle);
    *state = comm->finalizing && !comm->meeting->all_finalized() ? Code::InProgress : comm->state.load();
    return Code::Success;
}
Code ncclCommRevoke(Handle handle, int) {
    comm_of(handle)->aborted = true;
    return Code::Success;
}
Code ncclCommAbort(Handle handle) {
    const Shared comm = comm_of(handle);
    if (comm->fault("abort")) {
        for (;;) nap();
    }
    comm->aborted = true;
    while (comm->running != 0) nap();
    delete &comm_of(handle);
    return Code::Success;
}
Code ncclCommFinalize(Handle handle) {
    const Shared& comm = comm_of(handle);
    const auto fault = comm->fault("finalize");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    comm->finalizing = true;
    if (!fault) comm->meeting->finalize();
    return Code::InProgress;
}
Code ncclCommDestroy(Handle handle) {
    delete &comm_of(handle);
    return Code::Success;
}

Code ncclAllReduce(const void* in, void* out, std::size_t count, Type type, Op op, Handle comm,
                   void* stream) {
    return collective(comm, stream, in, count * bytes_of(type),
                      [=](const Comm& c) { fake::reduce(c, type, 0, count, op, out); });
}
Code ncclReduce(const void* in, void* out, std::size_t count, Type type, Op op, int root, Handle comm,
                void* stream) {
    return collective(comm, stream, in, count * bytes_of(type), [=](const Comm& c) {
        if (c.rank == root) fake::reduce(c, type, 0, count, op, out);
    });
}
Code ncclBroadcast(const void* in, void* out, std::size_t count, Type type, int root, Handle comm,
                   void* stream) {
    const std::size_t bytes = count * bytes_of(type);
    return collective(comm, stream, in, bytes,
                      [=](const Comm& c) { std::memcpy(out, c.meeting->area(root), bytes); });
}
Code ncclAllGather(const void* in, void* out, std::size_t count, Type type, Handle comm, void* stream) {
    const std::size_t bytes = count * bytes_of(type);
    return collective(comm, stream, in, bytes, [=](const Comm& c) {
        for (int rank = 0; rank < c.ranks; ++rank) {
            std::memcpy(static_cast<std::byte*>(out) + static_cast<std::size_t>(rank) * bytes,
                        c.meeting->area(rank), bytes);
        }
    });
}
Code ncclReduceScatter(const void* in, void* out, std::size_t count, Type type, Op op, Handle comm,
                       void* stream) {
    const auto ranks = static_cast<std::size_t>(comm_of(comm)->ranks);
    return collective(comm, stream, in, ranks * count * bytes_of(type), [=](const Comm& c) {
        fake::reduce(c, type, static_cast<std::size_t>(c.rank) * count, count, op, out);
    });
}

// What libddp finds but does not call yet: as a communicator answers that was made without it.
Code ncclSend(const void*, std::size_t, Type, int, Handle, void*) { return Code::InvalidUsage; }
Code ncclRecv(void*, std::size_t, Type, int, Handle, void*) { return Code::InvalidUsage; }
Code ncclGroupStart() { return Code::Success; }
Code ncclGroupEnd() { return Code::Success; }
Code ncclRedOpCreatePreMulSum(Op*, void*, Type, Residence, Handle) { return Code::InvalidUsage; }
Code ncclRedOpDestroy(Op, Handle) { return Code::InvalidUsage; }

Code ncclMemAlloc(void** address, std::size_t bytes) {
    *address = allocate(bytes, Memory::Device);
    return *address != nullptr ? Code::Success : Code::UnhandledCudaError;
}
Code ncclMemFree(void* address) { return release(address), Code::Success; }

}  // extern "C"
