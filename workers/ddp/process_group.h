#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "ddp/context.h"
#include "ddp/types.h"

namespace ddp {

/// A collective in flight; a copyable handle. wait() blocks until the collective is done and throws its error
/// (PeerLostError, TimeoutError, MismatchError); on a GPU backend it makes the current stream wait instead,
/// and throws the errors known so far. synchronize() blocks the calling thread on every backend. Wait for
/// every Work: otherwise its error is lost, and its buffers may still be in use.
class [[nodiscard]] Work {
  public:
    struct State;
    Work() = default;  ///< already done
    explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
    void wait();
    void synchronize();
    [[nodiscard]] bool done() const;

  private:
    std::shared_ptr<State> state_;
};

/// Element counts, one for each rank, by rank.
using Counts = std::vector<std::size_t>;

/// One message of a batch: to `peer`, or from it.
struct Message {
    enum class Direction : std::uint8_t { Send, Recv } direction = Direction::Send;
    Buffer buffer;
    int peer = -1;
};

struct Operation;

struct ProcessGroupOptions {
    std::chrono::nanoseconds timeout =
        std::chrono::minutes(10);  ///< of each call; positive (see TimeoutScope)
    std::string backend = "auto";  ///< auto, nccl, staged, cpu, mpi
    /// Place of the buffers; backend `auto` depends on it. For a CUDA device, index -1 means the device of
    /// the local rank; where ranks may share devices and there are too few, local ranks are assigned round
    /// robin.
    Device device = {};
    /// cudaStream_t that collectives follow and wait() holds back; null is the default stream. For nccl and
    /// staged. The stream outlives the group, whose destructor waits for it.
    void* stream = nullptr;
    /// Inline runs a collective in the calling thread (best with one core per rank); Thread runs collectives
    /// in order on one progress thread of the group.
    enum class Progress : std::uint8_t { Auto, Inline, Thread } progress = Progress::Auto;
};

/// Ordered collectives over all ranks of a world, or of a part of it (split). Every rank must make the same
/// calls in the same order; when a rank differs in operation, size or type, all ranks throw MismatchError.
///
/// In a call with an output and an input, the smaller buffer may be this rank's slice of the larger one; any
/// other overlap is an InvalidInput.
///
/// Calls are asynchronous: they return a Work. Their buffers must live until the Work is done; after a failed
/// call over MPI they must live until the process ends, because MPI cannot cancel the call.
///
/// The order of a sum decides its last bits. Backends cpu and staged sum in rank order within a node, and in
/// node order between nodes: results are bitwise equal on all ranks, and from run to run on the same nodes.
/// Backend nccl uses NCCL's order, equal on all ranks. Backend mpi uses MPI's order; MPI decides whether all
/// ranks get equal bits.
///
/// One thread at a time issues calls, in an order that is the same on all ranks; a call that begins while
/// another thread is inside one (before it has its Work) throws Error. Independent threads use one group
/// each: see split.
///
/// A forked child may destroy the group, call exec or exit; every call on the group in the child that needs
/// other ranks or the device throws Error.
class ProcessGroup {
  public:
    /// Joins the world that `context` describes; blocks until every rank has joined or the timeout passes.
    /// Throws TimeoutError naming the missing ranks, MismatchError when world sizes disagree, InvalidInput
    /// for the 17th group of a process that live at one time (split() makes more). A group's room is free
    /// again once all ranks of the node have destroyed it, so any number may follow each other; a rank that
    /// makes the next one meanwhile waits for that room.
    [[nodiscard]] static std::unique_ptr<ProcessGroup> create(const Context& context,
                                                              ProcessGroupOptions options = {});
    virtual ~ProcessGroup() = default;

    [[nodiscard]] int rank() const { return identity_.rank; }
    [[nodiscard]] int size() const { return identity_.size; }
    /// "cpu (shared memory)": the backend, for a log line.
    [[nodiscard]] virtual std::string describe() const = 0;
    /// The device of the buffers of collectives.
    [[nodiscard]] Device device() const { return identity_.device; }
    /// cudaStream_t that collectives follow and wait() holds back (ProcessGroupOptions::stream).
    [[nodiscard]] virtual void* stream() const { return nullptr; }
    /// True when memory of allocate_shared is registered so that its sums take the fastest path. Then divide
    /// first and use Sum rather than Avg.
    [[nodiscard]] virtual bool shared_memory_is_symmetric() const { return false; }
    /// The backend that create() chose, and the reason: "nccl (auto: buffers are on a CUDA device)".
    [[nodiscard]] const std::string& choice() const { return choice_; }

    // These calls throw InvalidInput at once for wrong arguments; such a call has no effect on any rank.

    /// In place: every rank ends with the reduction of all ranks' buffers.
    Work all_reduce(Buffer buffer, ReduceOp op = ReduceOp::Sum);
    /// The same into another buffer of the same size: `input` keeps its values.
    Work all_reduce(Buffer output, ConstBuffer input, ReduceOp op = ReduceOp::Sum);
    /// Every rank ends with root's buffer.
    Work broadcast(Buffer buffer, int root);
    /// `output` holds size() * input.count elements: rank r's input at r * input.count.
    Work all_gather(Buffer output, ConstBuffer input);
    /// `input` holds size() * output.count elements; rank r ends with the reduction of slice r.
    Work reduce_scatter(Buffer output, ConstBuffer input, ReduceOp op = ReduceOp::Sum);
    /// In place: `root` ends with the reduction of all ranks' buffers; the other ranks keep theirs.
    Work reduce(Buffer buffer, int root, ReduceOp op = ReduceOp::Sum);
    /// On `root`, `output` holds size() * input.count elements: rank r's input at r * input.count. On other
    /// ranks `output` is ignored: leave it empty.
    Work gather(Buffer output, ConstBuffer input, int root);
    /// On `root`, `input` holds size() * output.count elements; rank r ends with slice r. On other ranks
    /// `input` is ignored: leave it empty.
    Work scatter(Buffer output, ConstBuffer input, int root);
    /// Both buffers hold size() * n elements and must not overlap: rank r ends with slice r of every rank, by
    /// rank.
    Work all_to_all(Buffer output, ConstBuffer input);

    /// all_gather, reduce_scatter and all_to_all with slices of different lengths, stored one after the other
    /// by rank. `counts` holds the length of each rank's slice and must be the same on all ranks; otherwise
    /// all throw MismatchError.
    Work all_gather_v(Buffer output, ConstBuffer input, Counts counts);
    Work reduce_scatter_v(Buffer output, ConstBuffer input, Counts counts, ReduceOp op = ReduceOp::Sum);
    /// sent[r] elements of `input` go to rank r; received[r] elements of `output` come from rank r.
    Work all_to_all_v(Buffer output, Counts received, ConstBuffer input, Counts sent);

    Work barrier();
    /// A blocking barrier with a time-out of its own: its TimeoutError names every rank that did not arrive.
    void monitored_barrier(std::chrono::nanoseconds timeout);

    /// Sends to rank `to`, which calls recv for the same number of elements of the same type; messages of one
    /// pair are matched in order. Only these two ranks take part, and these calls have their own sequence
    /// numbers. recv waits for its message. send may wait until the receiver takes the message: of how many
    /// bytes, each backend decides (cpu keeps 128 KiB for a receiver that comes later). So when two ranks
    /// exchange, one of them must receive first (or both use all_to_all or batch_send_recv), also where
    /// small messages would pass.
    Work send(ConstBuffer buffer, int to);
    Work recv(Buffer buffer, int from);
    /// All messages at once: none waits for another, so both ranks may send first. Messages of one pair and
    /// direction are matched in order. Both ranks of a pair use a batch.
    Work batch_send_recv(std::vector<Message> messages);

    /// Collectives that `calls` makes on this group become one call: nothing is started before `calls`
    /// returns, and the Work is done when all are. Their own Works are empty. A GPU backend starts them
    /// together; none of them may depend on the result of another. For messages see batch_send_recv.
    Work coalesced(const std::function<void()>& calls);

    /// Collective, blocking: ranks of equal `color` form a new group, ordered by `key` and then by their rank
    /// here. Null for a negative color. The new group has this group's backend, options and stream, and may
    /// outlive it; its errors name ranks of the world. At most 48 exist at one time on a node. A split that
    /// fails leaves this group unusable.
    std::unique_ptr<ProcessGroup> split(int color, int key);

    /// Collective over `ranks` of this group only, blocking: they form a new group, in this order, and other
    /// ranks need not know. They agree by messages, which come in order with their send and recv. All pass
    /// the same ranks and name, or they throw MismatchError (TimeoutError where one rank does not list
    /// another). Otherwise as for split. Backend cpu only; others throw InvalidInput.
    std::unique_ptr<ProcessGroup> create_part(const std::vector<int>& ranks, std::string_view name);

    /// Collective: every rank calls it in the same order with the same size. Host memory, 64-byte aligned and
    /// zeroed, that the backend reduces without copying: all_reduce is fastest on it. Freed with the group.
    /// Backends cpu and staged have 64 GiB for all ranks of a node together (21 GiB in a group made by
    /// split), less where the hard limit on file sizes is below 2 TiB; beyond it InvalidInput. On a GPU
    /// backend it is device memory, and allocating it waits for the device.
    std::span<std::byte> allocate_shared(std::size_t bytes);

    /// The memory that one call of allocate_shared gave to all ranks, by rank; `mine` is what it gave to this
    /// one, a multiple of 4096 bytes. Empty where a rank cannot access it all: on several nodes, on a GPU,
    /// over MPI. Ranks must agree on who writes where, and meet (barrier) between a write and another rank's
    /// read. It is freed when all ranks have destroyed the group.
    [[nodiscard]] virtual std::span<std::byte> shared_by_all(std::span<std::byte> /*mine*/) { return {}; }

    /// Collective: `launch` launches, on the group's stream, a CUDA graph in which collectives of this group
    /// were captured. Each launch counts as one collective: it has a sequence number, a time-out and a state
    /// that the launcher reads, and wait() throws the errors known so far. Once the group has failed nothing
    /// is launched any more: the graph would use resources that the failure has freed. Destroy the graph
    /// before the group. Backends that cannot be captured just call `launch`.
    virtual Work launch_graph(const std::function<void()>& launch);

    /// Collective, blocking: gathers bytes, of any length per rank; returns every rank's bytes by rank.
    std::vector<std::string> all_gather_bytes(std::string_view mine);
    /// The same with a value as its bytes, in host memory whatever the group's device. Throws MismatchError
    /// when a rank's value has another size.
    template <class T>
    requires std::is_trivially_copyable_v<T> std::vector<T> all_gather_values(const T& mine);

    /// Seconds this rank has spent inside collectives since the group was made.
    [[nodiscard]] virtual double communication_seconds() const = 0;
    /// The part of communication_seconds() in which this rank waited for other ranks to make the same call:
    /// they were still computing, or had no core. 0 where a backend cannot tell.
    [[nodiscard]] virtual double waiting_seconds() const { return 0; }
    /// The time-out of the next calls: ProcessGroupOptions::timeout, or that of the latest TimeoutScope.
    [[nodiscard]] std::chrono::nanoseconds timeout() const { return timeout_; }
    /// Reports `step` training steps and `samples` samples as done to the launcher (two relaxed stores).
    virtual void report_progress(std::uint64_t step, std::uint64_t samples) = 0;

    /// True once the launcher has ended this generation, where a backend can tell: calls throw PeerLostError.
    [[nodiscard]] virtual bool is_over() const { return false; }
    /// Tells the Recovery (recovery.h) that runs over this group that a failure has to restart all ranks,
    /// because of state that a new process could not get. Without effect where there is none.
    void refuse_recovery(const char* why) const {
        if (refuse_recovery_) refuse_recovery_(why);
    }

  protected:
    /// The facts that all calls use.
    struct GroupIdentity {
        int rank = 0;
        int size = 1;
        Device device = {};           ///< of all buffers
        const char* backend = "cpu";  ///< named in errors, as is world_rank
        int world_rank = 0;
        std::chrono::nanoseconds timeout = ProcessGroupOptions{}.timeout;
    };
    ProcessGroup();
    /// Called once, before the first call.
    void set_identity(const GroupIdentity& identity) { identity_ = identity, timeout_ = identity.timeout; }
    [[nodiscard]] const GroupIdentity& identity() const { return identity_; }
    /// True in a forked child: threads, connections and memory belong to the parent, so destroy nothing it
    /// uses.
    [[nodiscard]] bool is_in_forked_child() const;
    /// Throws Error, naming the call, in a forked child.
    void require_own_process(const char* call) const;

    /// The backend's part of a collective or of messages (worker/operation.h), or of several coalesced
    /// collectives, within timeout(). Borrowed for the call; never empty.
    virtual Work start(std::span<const Operation> operations) = 0;
    virtual std::span<std::byte> do_allocate_shared(std::size_t bytes) = 0;
    /// `mark` is the operation reported to waiting ranks: kBytesMark or kSplitMark (worker/call.h).
    virtual std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) = 0;

    /// A sub-group, as all ranks know it.
    struct SubGroup {
        int color = 0;
        int key = 0;
        std::vector<std::uint32_t> members;  ///< ranks of this group, in the new order; none for color < 0
    };
    /// Collective over this group. Ranks that are in no part take part too, and get null.
    virtual std::unique_ptr<ProcessGroup> do_split(const SubGroup& part) = 0;

    /// Collective over `members`; `name` holds them and the part's name.
    virtual std::unique_ptr<ProcessGroup> do_create_part(const std::vector<std::uint32_t>& members,
                                                         const std::string& name);

    /// Throws Error while a call is in flight, or waits for it, and the failure of a call whose Work nobody
    /// waited for.
    virtual void require_quiet() {}

  private:
    friend class BorrowedGroup;
    friend class Recovery;
    friend class TimeoutScope;
    class Entry;
    Work submit(Operation&& operation);

    GroupIdentity identity_;
    std::chrono::nanoseconds timeout_{};
    std::string choice_;
    std::atomic<const char*> inside_ = nullptr;    ///< the call that a thread is in, or null
    std::vector<Operation>* coalesced_ = nullptr;  ///< collects the calls inside coalesced()
    std::thread::id coalescing_thread_;
    std::uint64_t all_rank_calls_ = 0;  ///< collectives in which every rank waits for every rank
    std::function<void(const char*)> refuse_recovery_;
    static constinit thread_local bool is_in_commit_;  ///< the thread is inside Recovery::commit
    const std::uint32_t made_in_;                      ///< process id of the creator (worker/fork.h)
    const std::shared_ptr<const bool> life_ =
        std::make_shared<const bool>(true);  ///< expires with this group
};

template <class T>
requires std::is_trivially_copyable_v<T> std::vector<T> ProcessGroup::all_gather_values(const T& mine) {
    std::vector<T> all;
    for (const std::string& theirs : all_gather_bytes({reinterpret_cast<const char*>(&mine), sizeof mine})) {
        if (theirs.size() != sizeof mine)
            throw MismatchError("rank " + std::to_string(rank()) + ": rank " + std::to_string(all.size()) +
                                " gives a value of " + std::to_string(theirs.size()) + " bytes, not of " +
                                std::to_string(sizeof mine) + ": ranks run different builds");
        std::memcpy(&all.emplace_back(), theirs.data(), sizeof mine);
    }
    return all;
}

/// A reference to another owner's group, kept beyond one call. Each use after the group's end throws Error.
class BorrowedGroup {
  public:
    BorrowedGroup() = default;  ///< of no group yet
    BorrowedGroup(ProcessGroup& group) : group_(&group), life_(group.life_) {}
    [[nodiscard]] bool is_gone() const { return life_.expired(); }
    void require() const {
        if (is_gone()) throw_gone();
    }
    ProcessGroup& operator*() const {
        require();
        return *group_;
    }
    ProcessGroup* operator->() const { return &**this; }

  private:
    [[noreturn]] static void throw_gone();

    ProcessGroup* group_ = nullptr;
    std::weak_ptr<const bool> life_;
};

/// Sets the time-out of a group's calls while it lives. Scopes end in reverse order.
class TimeoutScope {
  public:
    /// Throws InvalidInput unless `timeout` is positive.
    [[nodiscard]] TimeoutScope(ProcessGroup& group, std::chrono::nanoseconds timeout);
    ~TimeoutScope() {
        if (!group_.is_gone()) group_->timeout_ = before_;
    }
    TimeoutScope(const TimeoutScope&) = delete;
    TimeoutScope& operator=(const TimeoutScope&) = delete;

  private:
    BorrowedGroup group_;
    const std::chrono::nanoseconds before_;
};

}  // namespace ddp
