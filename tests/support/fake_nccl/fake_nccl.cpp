// The entry points of libnccl that libddp calls, over host memory and tests/support/fake_nccl/fake_cuda.
// What goes wrong, and where, is said by FAKE_NCCL (fault.h).
//
// FAKE_NCCL_VERSION  what ncclGetVersion answers; 22809 without it
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/nccl_api.h"
#include "tests/support/fake_nccl/fake_cuda.h"
#include "tests/support/fake_nccl/fake_trace.h"
#include "tests/support/fake_nccl/fault.h"
#include "tests/support/fake_nccl/meeting.h"
#include "tests/support/half_float.h"

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
    std::atomic<int> registered{0};  ///< pieces of memory
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
            // Integer sums wrap.
            if constexpr (std::is_integral_v<T>) {
                using Unsigned = std::make_unsigned_t<T>;
                return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
            }
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

/// out[i] = the reduction over all ranks of element first + i. Stored as one type, computed in another.
template <class Stored, class Wide, class Widen, class Narrow>
void reduce_by(const Comm& comm, std::size_t first, std::size_t count, Op op, void* out, Widen widen,
               Narrow narrow) {
    for (std::size_t i = 0; i < count; ++i) {
        Wide value{};
        for (int rank = 0; rank < comm.ranks; ++rank) {
            Stored theirs;
            std::memcpy(&theirs, comm.meeting->area(rank) + (first + i) * sizeof(Stored), sizeof(Stored));
            value = rank == 0 ? widen(theirs) : combined(value, widen(theirs), op);
        }
        if (op == Op::Avg) value = static_cast<Wide>(value / static_cast<Wide>(comm.ranks));
        const Stored stored = narrow(value);
        std::memcpy(static_cast<std::byte*>(out) + i * sizeof(Stored), &stored, sizeof(Stored));
    }
}
template <class T>
void reduce_as(const Comm& comm, std::size_t first, std::size_t count, Op op, void* out) {
    const auto same = [](T value) { return value; };
    reduce_by<T, T>(comm, first, count, op, out, same, same);
}

void reduce(const Comm& comm, Type type, std::size_t first, std::size_t count, Op op, void* out) {
    switch (type) {
        case Type::Int8:
            return reduce_as<std::int8_t>(comm, first, count, op, out);
        case Type::UInt8:
            return reduce_as<std::uint8_t>(comm, first, count, op, out);
        case Type::Int32:
            return reduce_as<std::int32_t>(comm, first, count, op, out);
        case Type::UInt32:
            return reduce_as<std::uint32_t>(comm, first, count, op, out);
        case Type::Int64:
            return reduce_as<std::int64_t>(comm, first, count, op, out);
        case Type::UInt64:
            return reduce_as<std::uint64_t>(comm, first, count, op, out);
        case Type::Float16:
            return reduce_by<std::uint16_t, float>(comm, first, count, op, out, half_float::from_f16,
                                                   half_float::to_f16);
        case Type::Float32:
            return reduce_as<float>(comm, first, count, op, out);
        case Type::Float64:
            return reduce_as<double>(comm, first, count, op, out);
        case Type::BFloat16:
            return reduce_by<std::uint16_t, float>(comm, first, count, op, out, half_float::from_bf16,
                                                   half_float::to_bf16);
    }
}

void sleep_unless_aborted(const Comm& comm, int milliseconds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (!comm.aborted && std::chrono::steady_clock::now() < until) nap();
}

/// What a rank does on the device, until it ends or the communicator is aborted.
using Task = std::function<void(Comm&)>;
using Combine = std::function<void(const Comm&)>;

/// All ranks show what they send, and each makes its result of it.
Task meet(const void* in, std::size_t bytes, Combine combine) {
    return [=, sent = std::span(static_cast<const std::byte*>(in), bytes)](Comm& comm) {
        std::copy(sent.begin(), sent.end(), comm.meeting->area(comm.rank));
        if (!comm.meeting->arrive(comm.aborted)) return;
        combine(comm);
        comm.meeting->arrive(comm.aborted);
    };
}

void run(Comm& comm, const std::optional<Fault>& fault, const Task& task, Stream& stream) {
    if (comm.aborted) return;
    if (fault && fault->what == "async") comm.state = static_cast<Code>(fault->number);
    if (fault && (fault->what == "async" || fault->what == "hang")) return wait_for_abort(comm);
    if (fault && fault->what == "delay") sleep_unless_aborted(comm, fault->number);
    if (fault && fault->what == "cuda") {
        stream.error = fault->number;
        return;
    }
    task(comm);
}

Code put_on_stream(Handle handle, void* stream, Task task) {
    const Shared comm = comm_of(handle);
    // As NCCL does it: what has failed says so again, and what is not ready takes no calls.
    if (const Code state = comm->state; state != Code::Success) {
        return state == Code::InProgress ? Code::InvalidUsage : state;
    }
    const std::optional<Fault> fault = comm->fault(std::to_string(++comm->collectives));
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    if (fault && fault->what == "stuck") {
        comm->state = Code::InProgress;
        return Code::InProgress;
    }
    const std::shared_ptr<Stream> on = stream_of(stream);
    on->post([comm, fault, task = std::move(task), device = on.get()] {
        ++comm->running;
        run(*comm, fault, task, *device);
        --comm->running;
    });
    return Code::Success;
}

Code collective(Handle handle, void* stream, const void* in, std::size_t bytes, Combine combine) {
    if (bytes > kAreaBytes) return Code::InvalidArgument;
    return put_on_stream(handle, stream, meet(in, bytes, std::move(combine)));
}

/// The messages between ncclGroupStart and ncclGroupEnd of a thread.
struct Group {
    int depth = 0;
    Handle comm = nullptr;
    void* stream = nullptr;
    std::vector<Task> sends, receives;
};

// Not thread_local: see fake_cuda.cpp.
Group& current_group() {
    static const pthread_key_t key = [] {
        pthread_key_t made;
        ::pthread_key_create(&made, [](void* group) { delete static_cast<Group*>(group); });
        return made;
    }();
    auto* group = static_cast<Group*>(::pthread_getspecific(key));
    if (group == nullptr) ::pthread_setspecific(key, group = new Group);
    return *group;
}

Code message(Handle comm, void* stream, std::size_t bytes, int peer, bool sends, Task task) {
    if (bytes > kMailboxBytes || peer < 0 || peer >= comm_of(comm)->ranks) return Code::InvalidArgument;
    Group& group = current_group();
    if (group.depth == 0) return put_on_stream(comm, stream, std::move(task));
    group.comm = comm;
    group.stream = stream;
    (sends ? group.sends : group.receives).push_back(std::move(task));
    return Code::Success;
}

/// A group is one task; what it sends goes first, so that no rank waits for another's turn.
Code end_group(Group& group) {
    if (group.comm == nullptr) return Code::Success;
    std::vector<Task> all = std::exchange(group.sends, {}), receives = std::exchange(group.receives, {});
    std::move(receives.begin(), receives.end(), std::back_inserter(all));
    return put_on_stream(std::exchange(group.comm, nullptr), group.stream,
                         [all = std::move(all)](Comm& comm) {
                             for (const Task& one : all) one(comm);
                         });
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

/// What the ranks show each other in a split.
struct Wish {
    int color = 0, key = 0;
    char name[64] = {};
};

/// The ranks of one color in their new order, and where they meet.
struct Part {
    std::vector<int> members;
    std::string name;
};

Part part_of(const Comm& comm, const Wish& mine) {
    Part part;
    std::vector<Wish> all(static_cast<std::size_t>(comm.ranks));
    for (int rank = 0; rank < comm.ranks; ++rank) {
        Wish& wish = all[static_cast<std::size_t>(rank)];
        std::memcpy(&wish, comm.meeting->area(rank), sizeof wish);
        if (wish.color == mine.color) part.members.push_back(rank);
    }
    std::stable_sort(part.members.begin(), part.members.end(), [&](int a, int b) {
        return all[static_cast<std::size_t>(a)].key < all[static_cast<std::size_t>(b)].key;
    });
    part.name = all[static_cast<std::size_t>(part.members.front())].name;
    return part;
}

std::vector<Fault> faults_of_part(const std::vector<Fault>& all) {
    std::vector<Fault> faults;
    for (const Fault& fault : all) {
        if (fault.where.starts_with("s") && fault.where != "split")
            faults.push_back({fault.rank, fault.where.substr(1), fault.what, fault.number});
    }
    return faults;
}

/// Every rank makes a meeting; that of the new rank 0 is used. The others remove theirs at exit.
void run_split(const Shared& comm, const Shared& made, Handle* handle, Wish wish) {
    if (wish.color >= 0) Meeting::create().copy(wish.name, sizeof wish.name - 1);
    std::memcpy(comm->meeting->area(comm->rank), &wish, sizeof wish);
    if (!comm->meeting->arrive(comm->aborted)) return;
    const Part part = wish.color >= 0 ? part_of(*comm, wish) : Part{};
    if (!comm->meeting->arrive(comm->aborted)) return;
    if (wish.color >= 0) {
        const auto place = std::find(part.members.begin(), part.members.end(), comm->rank);
        made->rank = static_cast<int>(place - part.members.begin());
        made->ranks = static_cast<int>(part.members.size());
        made->faults = faults_of_part(made->faults);
        made->meeting = std::make_unique<Meeting>(part.name, made->rank, made->ranks);
        *handle = reinterpret_cast<Handle>(new Shared(made));
    }
    comm->state = Code::Success;
    while (made->meeting && !made->aborted && !made->meeting->complete()) nap();
    if (!made->aborted) made->state = Code::Success;
}

Code split(Handle handle, int color, int key, Handle* made) {
    const Shared comm = comm_of(handle);
    const std::optional<Fault> fault = comm->fault("split");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    comm->state = fault && fault->what == "async" ? static_cast<Code>(fault->number) : Code::InProgress;
    if (fault && fault->what != "delay") return Code::InProgress;
    ++comm->running;
    std::thread([comm, fault, made, wish = Wish{color, key, {}}, child = std::make_shared<Comm>()] {
        if (fault) sleep_unless_aborted(*comm, fault->number);
        run_split(comm, child, made, wish);
        --comm->running;
    }).detach();
    return Code::InProgress;
}

/// Memory that communicators of this process know of.
class Registrations {
  public:
    void* add(void* address, const Shared& comm) {
        const std::lock_guard lock(mutex_);
        ++comm->registered;
        return new Entry(*all_.insert(all_.end(), {address, comm}));
    }
    Code remove(void* handle) {
        const std::unique_ptr<Entry> entry(static_cast<Entry*>(handle));
        const std::lock_guard lock(mutex_);
        --entry->comm->registered;
        const auto found = std::find_if(all_.begin(), all_.end(), [&](const Entry& one) {
            return one.address == entry->address && one.comm == entry->comm;
        });
        if (found == all_.end()) return Code::InvalidArgument;
        all_.erase(found);
        return Code::Success;
    }
    bool has(const void* address) {
        const std::lock_guard lock(mutex_);
        return std::any_of(all_.begin(), all_.end(),
                           [&](const Entry& one) { return one.address == address; });
    }
    int count() {
        const std::lock_guard lock(mutex_);
        return static_cast<int>(all_.size());
    }
    /// What an aborted communicator knew.
    void drop(const Shared& comm) {
        const std::lock_guard lock(mutex_);
        std::erase_if(all_, [&](const Entry& one) { return one.comm == comm; });
    }

  private:
    struct Entry {
        void* address;
        Shared comm;
    };
    std::mutex mutex_;
    std::vector<Entry> all_;
};
Registrations& registrations() {
    static auto* const all = new Registrations;
    return *all;
}
std::atomic<int> misuses{0};

}  // namespace
}  // namespace fake

using namespace fake;
using ddp::nccl::Config;
using ddp::nccl::Residence;
using ddp::nccl::Window;

extern "C" {

Code ncclGetVersion(int* version) {
    const char* set = std::getenv("FAKE_NCCL_VERSION");
    return *version = set != nullptr ? std::atoi(set) : 22809, Code::Success;
}
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
    registrations().drop(comm);
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
    misuses += comm_of(handle)->registered;
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

Code ncclAlltoAll(const void* in, void* out, std::size_t count, Type type, Handle comm, void* stream) {
    const std::size_t bytes = count * bytes_of(type);
    const auto ranks = static_cast<std::size_t>(comm_of(comm)->ranks);
    return collective(comm, stream, in, ranks * bytes, [=](const Comm& c) {
        for (int rank = 0; rank < c.ranks; ++rank) {
            std::memcpy(static_cast<std::byte*>(out) + static_cast<std::size_t>(rank) * bytes,
                        c.meeting->area(rank) + static_cast<std::size_t>(c.rank) * bytes, bytes);
        }
    });
}
Code ncclGather(const void* in, void* out, std::size_t count, Type type, int root, Handle comm,
                void* stream) {
    const std::size_t bytes = count * bytes_of(type);
    return collective(comm, stream, in, bytes, [=](const Comm& c) {
        for (int rank = 0; c.rank == root && rank < c.ranks; ++rank) {
            std::memcpy(static_cast<std::byte*>(out) + static_cast<std::size_t>(rank) * bytes,
                        c.meeting->area(rank), bytes);
        }
    });
}
Code ncclScatter(const void* in, void* out, std::size_t count, Type type, int root, Handle comm,
                 void* stream) {
    const Comm& own = *comm_of(comm);
    const std::size_t bytes = count * bytes_of(type);
    const std::size_t sent = own.rank == root ? bytes * static_cast<std::size_t>(own.ranks) : 0;
    return collective(comm, stream, in, sent, [=](const Comm& c) {
        std::memcpy(out, c.meeting->area(root) + static_cast<std::size_t>(c.rank) * bytes, bytes);
    });
}

Code ncclSend(const void* in, std::size_t count, Type type, int peer, Handle comm, void* stream) {
    const std::span sent(static_cast<const std::byte*>(in), count * bytes_of(type));
    return message(comm, stream, sent.size(), peer, true,
                   [=](Comm& c) { c.meeting->post(peer, sent, c.aborted); });
}
Code ncclRecv(void* out, std::size_t count, Type type, int peer, Handle comm, void* stream) {
    const std::span received(static_cast<std::byte*>(out), count * bytes_of(type));
    return message(comm, stream, received.size(), peer, false,
                   [=](Comm& c) { c.meeting->fetch(peer, received, c.aborted); });
}
Code ncclGroupStart() { return ++current_group().depth, Code::Success; }
Code ncclGroupEnd() {
    Group& group = current_group();
    return --group.depth == 0 ? end_group(group) : Code::Success;
}
Code ncclCommSplit(Handle comm, int color, int key, Handle* made, Config*) {
    return split(comm, color, key, made);
}

// What libddp finds but does not call: as a communicator answers that was made without it.
Code ncclRedOpCreatePreMulSum(Op*, void*, Type, Residence, Handle) { return Code::InvalidUsage; }
Code ncclRedOpDestroy(Op, Handle) { return Code::InvalidUsage; }

Code ncclMemAlloc(void** address, std::size_t bytes) {
    const TracedCall traced("cuMemCreate");
    *address = allocate(bytes, Memory::Device);
    return *address != nullptr ? Code::Success : Code::UnhandledCudaError;
}

// Which memory is registered, in which communicator. Windows are collective, as NCCL's are.
Code ncclCommWindowRegister(Handle handle, void* address, std::size_t, Window* window, int) {
    const Shared comm = comm_of(handle);
    const std::optional<Fault> fault = comm->fault("window");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    comm->state = fault && fault->what == "async" ? static_cast<Code>(fault->number) : Code::InProgress;
    if (fault && fault->what != "null") return Code::InProgress;
    ++comm->running;
    std::thread([comm, fault, address, window] {
        if (comm->meeting->arrive(comm->aborted)) {
            if (!fault) *window = static_cast<Window>(registrations().add(address, comm));
            comm->state = Code::Success;
        }
        --comm->running;
    }).detach();
    return Code::InProgress;
}
Code ncclCommWindowDeregister(Handle, Window window) { return registrations().remove(window); }
Code ncclCommRegister(Handle handle, void* address, std::size_t, void** registered) {
    if (const auto fault = comm_of(handle)->fault("buffer")) return static_cast<Code>(fault->number);
    *registered = registrations().add(address, comm_of(handle));
    return Code::Success;
}
Code ncclCommDeregister(Handle, void* registered) { return registrations().remove(registered); }

/// How often memory was freed, or a communicator destroyed, with a registration still there.
int fake_nccl_misuses() { return misuses; }
/// Pieces of memory that are registered now: windows, and others.
int fake_nccl_registered() { return registrations().count(); }

Code ncclMemFree(void* address) {
    const TracedCall traced("cuMemRelease");
    if (registrations().has(address)) ++misuses;
    return release(address), Code::Success;
}

}  // extern "C"
