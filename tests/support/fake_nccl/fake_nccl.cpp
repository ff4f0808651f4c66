// The entry points of libnccl that libddp calls, over host memory and tests/support/fake_nccl/fake_cuda.
// Results and their timing are those of NCCL 2.28.9 with non-blocking communicators, or of 2.31 where a
// comment names it. FAKE_NCCL plants faults (fault.h).
//
// FAKE_NCCL_VERSION  the result of ncclGetVersion; 22809 by default
// FAKE_NCCL_NETWORK  the network named under NCCL_DEBUG=INFO; Socket by default
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/nccl/api.h"
#include "tests/support/fake_nccl/fake_cuda.h"
#include "tests/support/fake_nccl/fake_trace.h"
#include "tests/support/fake_nccl/fault.h"
#include "tests/support/fake_nccl/meeting.h"
#include "tests/support/fake_nccl/reduction.h"

namespace fake {

using ddp::nccl::Code;
using ddp::nccl::Config;
using ddp::nccl::Handle;
using ddp::nccl::Op;
using ddp::nccl::Type;
using ddp::nccl::UniqueId;

namespace {

/// The number of calls that would have crashed or corrupted NCCL.
std::atomic<int> misuses{0};

struct Comm {
    int rank = 0, ranks = 1;
    const int device = current_device();
    std::vector<Fault> faults = faults_from_environment();
    std::atomic<Code> state{Code::InProgress};  ///< of the last call
    std::atomic<Code> found{Code::Success};     ///< a network error, visible between calls
    Code upcoming = Code::Success;              ///< the result of the current call, once it was queried
    std::atomic<bool> aborted{false};
    std::atomic<int> running{0};  ///< collectives on a device, and threads that start one
    std::atomic<int> graphs{0};   ///< captured collectives that still exist
    std::atomic<bool> inside{false};
    std::unique_ptr<Meeting> meeting;
    int collectives = 0;
    std::atomic<int> registered{0};  ///< the number of registrations
    bool joined = false, finalizing = false;

    std::optional<Fault> fault(const std::string& where) const { return find(faults, rank, where); }
    /// The result of ncclCommGetAsyncError.
    Code answer() const {
        if (finalizing && (graphs != 0 || !meeting->all_finalized())) return Code::InProgress;
        const Code now = state;
        return now == Code::Success ? found.load() : now;
    }
};
using Shared = std::shared_ptr<Comm>;

/// The communicator of a call. A second concurrent call is a misuse: NCCL is not thread-safe.
class Entry {
  public:
    explicit Entry(Handle handle) : comm_(*reinterpret_cast<Shared*>(handle)) {
        if (comm_->inside.exchange(true)) ++misuses;
    }
    ~Entry() { comm_->inside = false; }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    const Shared& operator*() const { return comm_; }
    Comm* operator->() const { return comm_.get(); }

  private:
    const Shared comm_;
};

/// A failed communicator returns its error again; one with a call in progress accepts no other.
Code refusal(const Comm& comm) {
    const Code code = comm.answer();
    if (code != Code::InProgress) return code;
    ++misuses;
    return Code::InvalidArgument;
}

/// A refused collective makes the communicator unusable.
Code spoil(Comm& comm, Code code) { return comm.state = code; }

void wait_for_abort(const Comm& comm) {
    while (!comm.aborted) nap();
}

int version() {
    const char* set = std::getenv("FAKE_NCCL_VERSION");
    return set != nullptr ? std::atoi(set) : 22809;
}

/// Since 2.31, finalizing or destroying a communicator that a peer has aborted blocks until this rank aborts
/// it, too. True if it did.
bool hangs_after_an_abort(const Comm& comm) {
    if (version() < 23100 || !comm.meeting->somebody_aborted()) return false;
    wait_for_abort(comm);
    return true;
}

void sleep_unless_aborted(const Comm& comm, int milliseconds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (!comm.aborted && std::chrono::steady_clock::now() < until) nap();
}

/// The work of a rank on the device, until it ends or the communicator is aborted.
using Task = std::function<void(Comm&)>;
using Combine = std::function<void(const Comm&)>;

/// All ranks publish their inputs, and each computes its own result.
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
    if (fault && fault->what == "async") comm.found = static_cast<Code>(fault->number);
    if (fault && (fault->what == "async" || fault->what == "hang")) return wait_for_abort(comm);
    if (fault && fault->what == "delay") sleep_unless_aborted(comm, fault->number);
    if (fault && fault->what == "cuda") {
        stream.error = fault->number;
        return;
    }
    task(comm);
}

/// Keeps the communicator alive as long as a graph with its collectives.
std::shared_ptr<void> reference_of_graph(const Shared& comm, const Stream& stream) {
    if (comm->ranks == 1 || stream.capture() == nullptr) return nullptr;
    ++comm->graphs;
    return {nullptr, [comm](void*) { --comm->graphs; }};
}

Code put_on_stream(const Shared& comm, void* stream, Task task) {
    if (const Code refused = refusal(*comm); refused != Code::Success) return spoil(*comm, refused);
    const std::optional<Fault> fault = comm->fault(std::to_string(++comm->collectives));
    if (fault && fault->what == "fail") return spoil(*comm, static_cast<Code>(fault->number));
    if (fault && fault->what == "stuck") return comm->state = Code::InProgress;
    const std::shared_ptr<Stream> on = stream_of(stream);
    if (on->device != comm->device) return spoil(*comm, Code::UnhandledCudaError);
    auto work = [comm, fault, task = std::move(task), device = on.get(),
                 graph = reference_of_graph(comm, *on)] {
        ++comm->running;
        run(*comm, fault, task, *device);
        --comm->running;
    };
    if (comm->ranks == 1) return on->post(std::move(work)), Code::Success;
    comm->state = Code::InProgress;
    ++comm->running;
    std::thread([comm, on, work = std::move(work)]() mutable {
        on->post(std::move(work));
        comm->state = Code::Success;
        --comm->running;
    }).detach();
    return Code::InProgress;
}

std::size_t ranks_of(Handle handle) { return static_cast<std::size_t>(Entry(handle)->ranks); }

/// The calls between ncclGroupStart and ncclGroupEnd of a thread.
struct Group {
    int depth = 0;
    Shared comm;
    void* stream = nullptr;
    std::vector<Task> sends, receives, collectives;
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

/// Adds the call to this thread's group, or starts it on the stream without a group.
Code call(const Shared& comm, void* stream, std::vector<Task> Group::*calls, Task task) {
    Group& group = current_group();
    if (group.depth == 0) return put_on_stream(comm, stream, std::move(task));
    group.comm = comm;
    group.stream = stream;
    (group.*calls).push_back(std::move(task));
    return Code::Success;
}

Code message(Handle handle, void* stream, std::size_t bytes, int peer, bool sends, Task task) {
    const Entry comm(handle);
    if (bytes > kMailboxBytes || peer < 0 || peer >= comm->ranks) return Code::InvalidArgument;
    return call(*comm, stream, sends ? &Group::sends : &Group::receives, std::move(task));
}

Code collective(Handle handle, void* stream, const void* in, std::size_t bytes, Combine combine) {
    const Entry comm(handle);
    if (bytes > kAreaBytes) return Code::InvalidArgument;
    return call(*comm, stream, &Group::collectives, meet(in, bytes, std::move(combine)));
}

/// A group is one task. Its sends go first, so that no rank waits for another's.
Code end_group(Group& group) {
    if (group.comm == nullptr) return Code::Success;
    std::vector<Task> all = std::exchange(group.sends, {});
    for (const auto calls : {&Group::receives, &Group::collectives}) {
        for (Task& task : std::exchange(group.*calls, {})) all.push_back(std::move(task));
    }
    return put_on_stream(std::exchange(group.comm, nullptr), group.stream,
                         [all = std::move(all)](Comm& comm) {
                             for (const Task& one : all) one(comm);
                         });
}

bool is_non_blocking(const Config* config) {
    return config != nullptr && config->size == sizeof(Config) && config->magic == 0xcafebeef &&
           config->blocking == 0;
}

/// Writes a line of NCCL's log where NCCL_DEBUG asks for it: to NCCL_DEBUG_FILE, else to stdout.
void say(const std::string& words) {
    const char* level = std::getenv("NCCL_DEBUG");
    if (level == nullptr || std::string(level) != "INFO") return;
    static std::FILE* const file = [] {
        const char* path = std::getenv("NCCL_DEBUG_FILE");
        std::FILE* const opened = path == nullptr ? nullptr : std::fopen(path, "w");
        return opened == nullptr ? stdout : opened;
    }();
    std::fprintf(file, "node:%d:%d [0] NCCL INFO %s\n", ::getpid(), ::getpid(), words.c_str());
    std::fflush(file);
}

const char* network() {
    const char* named = std::getenv("FAKE_NCCL_NETWORK");
    return named == nullptr ? "Socket" : named;
}

Code join(Handle* handle, int ranks, int rank, const UniqueId& id, const Config* config) {
    *handle = nullptr;
    if (!is_non_blocking(config)) return Code::InvalidArgument;
    auto comm = std::make_shared<Comm>();
    comm->rank = rank;
    comm->ranks = ranks;
    const std::optional<Fault> fault = comm->fault("init");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    *handle = reinterpret_cast<Handle>(new Shared(comm));
    if (fault && fault->what == "async") comm->state = static_cast<Code>(fault->number);
    if (fault && fault->what != "delay") return Code::InProgress;
    ++comm->running;
    std::thread([comm, fault, name = std::string(id.internal)] {
        if (fault) sleep_unless_aborted(*comm, fault->number);
        if (!comm->aborted) comm->meeting = std::make_unique<Meeting>(name, comm->rank, comm->ranks);
        while (!comm->aborted && !comm->meeting->complete()) nap();
        if (!comm->aborted) {
            say(std::string("Using network ") + network());
            comm->joined = true;
            comm->state = Code::Success;
        }
        --comm->running;
    }).detach();
    return Code::InProgress;
}

/// A rank's arguments of a split.
struct Wish {
    int color = 0, key = 0;
    char name[64] = {};
};

/// The ranks of one color in their new order, and the name of their meeting.
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

/// Every rank creates a meeting, and the new rank 0's is used; the others are removed at exit. False: the
/// parent was aborted meanwhile.
bool join_part(const Comm& comm, Comm& made, Wish wish) {
    if (wish.color >= 0) Meeting::create().copy(wish.name, sizeof wish.name - 1);
    std::memcpy(comm.meeting->area(comm.rank), &wish, sizeof wish);
    if (!comm.meeting->arrive(comm.aborted)) return false;
    const Part part = wish.color >= 0 ? part_of(comm, wish) : Part{};
    if (!comm.meeting->arrive(comm.aborted)) return false;
    if (wish.color < 0) return true;
    const auto place = std::find(part.members.begin(), part.members.end(), comm.rank);
    made.rank = static_cast<int>(place - part.members.begin());
    made.ranks = static_cast<int>(part.members.size());
    made.faults = faults_of_part(made.faults);
    made.meeting = std::make_unique<Meeting>(part.name, made.rank, made.ranks);
    while (!made.meeting->complete()) {
        if (comm.aborted) return false;
        nap();
    }
    made.joined = true;
    made.state = Code::Success;
    return true;
}

/// The child's handle is set last, even for an unfinished child. A caller that aborts the parent must abort
/// the child, too.
Code split(const Shared& comm, int color, int key, Handle* handle) {
    *handle = nullptr;
    if (const Code refused = refusal(*comm); refused != Code::Success) return refused;
    const std::optional<Fault> fault = comm->fault("split");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    comm->state = fault && fault->what == "async" ? static_cast<Code>(fault->number) : Code::InProgress;
    if (fault && fault->what != "delay") return Code::Success;
    ++comm->running;
    std::thread([comm, fault, handle, wish = Wish{color, key, {}}, made = std::make_shared<Comm>()] {
        if (fault) sleep_unless_aborted(*comm, fault->number);
        const bool done = join_part(*comm, *made, wish);
        if (wish.color >= 0) *handle = reinterpret_cast<Handle>(new Shared(made));
        if (done) comm->state = Code::Success;
        --comm->running;
    }).detach();
    return Code::Success;  // NCCL, too, returns Success once the call has begun
}

/// Memory that is registered with communicators of this process.
class Registrations {
  public:
    void* add(void* address, const Shared& comm) {
        const std::lock_guard lock(mutex_);
        ++comm->registered;
        all_.push_back({address, comm});
        return handles_.emplace_back(std::make_unique<Entry>(all_.back())).get();
    }
    Code remove(void* handle) {
        const auto* const entry = static_cast<Entry*>(handle);
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
    /// Forgets the registrations of an aborted communicator.
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
    std::vector<std::unique_ptr<Entry>>
        handles_;  ///< kept, because handles of an aborted communicator may never be returned
};
Registrations& registrations() {
    static auto* const all = new Registrations;
    return *all;
}

}  // namespace
}  // namespace fake

using namespace fake;
using ddp::nccl::Window;

extern "C" {

Code ncclGetVersion(int* version) { return *version = fake::version(), Code::Success; }
const char* ncclGetErrorString(Code code) {
    switch (code) {
        case Code::Success: return "no error";
        case Code::UnhandledCudaError: return "unhandled cuda error";
        case Code::SystemError: return "unhandled system error";
        case Code::InternalError: return "internal error";
        case Code::InvalidArgument: return "invalid argument";
        case Code::InvalidUsage: return "invalid usage";
        case Code::RemoteError: return "remote process exited or there was a network error";
        case Code::InProgress: return "NCCL operation in progress";
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
    return join(comm, ranks, rank, id, config);
}
Code ncclCommInitRankScalable(Handle* comm, int ranks, int rank, int count, UniqueId* ids, Config* config) {
    if (count < 1 || count > ranks) return Code::InvalidArgument;
    return join(comm, ranks, rank, ids[0], config);
}
Code ncclCommGetAsyncError(Handle handle, Code* state) {
    const Entry comm(handle);
    *state = comm->answer();
    if (comm->upcoming != Code::Success) comm->state = std::exchange(comm->upcoming, Code::Success);
    return Code::Success;
}
// Another thread may be inside a call. Blocks until all graphs with this communicator's collectives are gone.
Code ncclCommAbort(Handle handle) {
    const Shared comm = *reinterpret_cast<Shared*>(handle);
    if (const auto fault = comm->fault("abort")) {
        while (fault->what != "delay") nap();
        std::this_thread::sleep_for(std::chrono::milliseconds(fault->number));
    }
    comm->aborted = true;
    if (comm->joined) comm->meeting->note_abort();
    while (comm->running != 0 || comm->graphs != 0) nap();
    registrations().drop(comm);
    delete reinterpret_cast<Shared*>(handle);
    return Code::Success;
}
Code ncclCommFinalize(Handle handle) {
    const Entry comm(handle);
    if (const Code refused = refusal(**comm); refused != Code::Success) return spoil(**comm, refused);
    if (comm->finalizing) return spoil(**comm, Code::InvalidArgument);
    if (hangs_after_an_abort(**comm)) return Code::InternalError;
    const auto fault = comm->fault("finalize");
    if (fault && fault->what == "fail") return spoil(**comm, static_cast<Code>(fault->number));
    comm->finalizing = true;
    if (!fault) comm->meeting->finalize();
    return Code::InProgress;
}
Code ncclCommDestroy(Handle handle) {
    {
        const Entry comm(handle);
        if (const Code refused = refusal(**comm); refused != Code::Success) return refused;
        if (hangs_after_an_abort(**comm)) return Code::InternalError;
        misuses += comm->registered + comm->graphs;
    }
    delete reinterpret_cast<Shared*>(handle);
    return Code::Success;
}

Code ncclAllReduce(const void* in, void* out, std::size_t count, Type type, Op op, Handle comm,
                   void* stream) {
    return collective(comm, stream, in, count * bytes_of(type), [=](const Comm& c) {
        fake::reduce({*c.meeting, c.ranks}, type, 0, count, op, out);
    });
}
Code ncclReduce(const void* in, void* out, std::size_t count, Type type, Op op, int root, Handle comm,
                void* stream) {
    return collective(comm, stream, in, count * bytes_of(type), [=](const Comm& c) {
        if (c.rank == root) fake::reduce({*c.meeting, c.ranks}, type, 0, count, op, out);
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
    const std::size_t ranks = ranks_of(comm);
    return collective(comm, stream, in, ranks * count * bytes_of(type), [=](const Comm& c) {
        fake::reduce({*c.meeting, c.ranks}, type, static_cast<std::size_t>(c.rank) * count, count, op, out);
    });
}

Code ncclAlltoAll(const void* in, void* out, std::size_t count, Type type, Handle comm, void* stream) {
    const std::size_t bytes = count * bytes_of(type);
    const std::size_t ranks = ranks_of(comm);
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
    const std::size_t bytes = count * bytes_of(type);
    const bool sends = Entry(comm)->rank == root;
    const std::size_t sent = sends ? bytes * ranks_of(comm) : 0;
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
Code ncclCommSplit(Handle handle, int color, int key, Handle* made, Config* config) {
    const Entry comm(handle);
    return is_non_blocking(config) ? split(*comm, color, key, made) : Code::InvalidArgument;
}

Code ncclMemAlloc(void** address, std::size_t bytes) {
    const TracedCall traced("cuMemCreate");
    *address = allocate(bytes, Memory::Nccl);
    return *address != nullptr ? Code::Success : Code::UnhandledCudaError;
}

// Registered memory and its communicator. As in NCCL, windows are collective and need memory of ncclMemAlloc.
Code ncclCommWindowRegister(Handle handle, void* address, std::size_t, Window* window, int) {
    const Entry entry(handle);
    const Shared comm = *entry;
    if (const Code refused = refusal(*comm); refused != Code::Success) return refused;
    const std::optional<Fault> fault = comm->fault("window");
    if (fault && fault->what == "fail") return static_cast<Code>(fault->number);
    comm->state = Code::InProgress;
    if (kind_of(address) != Memory::Nccl) comm->upcoming = Code::UnhandledCudaError;
    if (fault && fault->what == "async") comm->upcoming = static_cast<Code>(fault->number);
    if (fault && fault->what == "early") comm->state = static_cast<Code>(fault->number);
    if (comm->upcoming != Code::Success || (fault && fault->what != "null")) return Code::Success;
    ++comm->running;
    std::thread([comm, fault, address, window] {
        if (comm->meeting->arrive(comm->aborted)) {
            if (!fault) *window = static_cast<Window>(registrations().add(address, comm));
            comm->state = Code::Success;
        }
        --comm->running;
    }).detach();
    return Code::Success;  // NCCL, too, returns Success once the call has begun
}
Code ncclCommWindowDeregister(Handle, Window window) { return registrations().remove(window); }
Code ncclCommRegister(Handle handle, void* address, std::size_t, void** registered) {
    const Entry comm(handle);
    if (const auto fault = comm->fault("buffer")) return static_cast<Code>(fault->number);
    *registered = registrations().add(address, *comm);
    return Code::Success;
}
Code ncclCommDeregister(Handle, void* registered) { return registrations().remove(registered); }

/// The number of calls that would have crashed NCCL or used freed objects: concurrent calls of a
/// communicator, a call while another is in progress, memory freed or a communicator destroyed while still
/// registered, and the like.
int fake_nccl_misuses() { return misuses; }
/// The number of current registrations: windows and others.
int fake_nccl_registered() { return registrations().count(); }

Code ncclMemFree(void* address) {
    const TracedCall traced("cuMemRelease");
    if (registrations().has(address) || kind_of(address) != Memory::Nccl) ++misuses;
    return release(address), Code::Success;
}

}  // extern "C"
