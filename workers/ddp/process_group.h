#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/context.h"
#include "ddp/types.h"

namespace ddp {

/// A collective in flight. Copyable handle. wait() blocks until it is done and throws what went wrong
/// (PeerLostError, TimeoutError, MismatchError); on a GPU backend it makes the current stream wait instead,
/// and throws what went wrong so far. synchronize() blocks the calling thread on every backend. A Work that
/// nobody waits for is a bug of the caller: its error is lost, and its buffers may still be in use.
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

/// Elements for each rank, by rank.
using Counts = std::vector<std::size_t>;

/// One of several messages at once: to `peer`, or from it.
struct Message {
    enum class Way : std::uint8_t { Send, Recv } way = Way::Send;
    Buffer buffer;
    int peer = -1;
};

struct ProcessGroupOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(10);  ///< per call; positive (TimeoutScope)
    std::string backend = "auto";                                 ///< auto, nccl, staged, cpu, mpi
    /// Where the buffers will be; `auto` chooses by it. Of a CUDA device, index -1 is that of the local rank;
    /// where ranks may share devices and there are too few, they go round.
    Device device = {};
    /// cudaStream_t that collectives follow and wait() holds back; null is the default stream. nccl, staged.
    /// Outlives the group, which waits for it at its end.
    void* stream = nullptr;
    /// Inline runs a collective in the calling thread (best with one core per rank);
    /// Thread runs them, in order, on one progress thread of the group.
    enum class Progress : std::uint8_t { Auto, Inline, Thread } progress = Progress::Auto;
};

/// Ordered collectives over all ranks of a world, or of a part of it (split). Every rank must make the same
/// calls in the same order; a rank that differs in operation, size or type is told so by MismatchError on all
/// ranks.
///
/// Of a call with an output and an input, the smaller may be this rank's slice of the larger; any other
/// overlap is an InvalidInput.
///
/// Calls are asynchronous: they return a Work. Their buffers stay until it is done; those of a call over MPI
/// that failed stay until the process ends, for MPI cannot cancel it.
///
/// The order of a sum, and so its last bits. Backends cpu and staged sum in rank order within a node, and in
/// node order between nodes: results are bitwise equal on all ranks, and from run to run of the same nodes.
/// Backend nccl: NCCL's order, equal on all ranks. Backend mpi: MPI's order, and whether all ranks get equal
/// bits is MPI's matter.
///
/// One thread at a time issues calls, in an order that is the same on all ranks; a call that begins while
/// another thread is inside one (until it has its Work) throws Error. Threads that are to be independent have
/// a group each: split.
///
/// A forked child may destroy the group, call exec or end; each call of it in the child throws Error.
class ProcessGroup {
  public:
    /// Joins the world that `context` describes; blocks until every rank has joined or the timeout passes.
    /// Throws TimeoutError naming the ranks that are missing, MismatchError when world sizes disagree,
    /// InvalidInput for the 17th group of a process: on nodes with several ranks there is room for 16 in a
    /// generation, which a group that ends does not give back. split() makes more.
    [[nodiscard]] static std::unique_ptr<ProcessGroup> create(const Context& context,
                                                              ProcessGroupOptions options = {});
    virtual ~ProcessGroup() = default;

    [[nodiscard]] int rank() const { return seat_.rank; }
    [[nodiscard]] int size() const { return seat_.size; }
    /// "cpu (shared memory)", for the one line that says what was chosen.
    [[nodiscard]] virtual std::string describe() const = 0;
    /// Where the buffers of collectives must be.
    [[nodiscard]] Device device() const { return seat_.device; }
    /// cudaStream_t that collectives follow and wait() holds back (ProcessGroupOptions::stream).
    [[nodiscard]] virtual void* stream() const { return nullptr; }
    /// Whether memory of allocate_shared is registered in such a way that its sums take the fastest path.
    /// Then divide first and use Sum rather than Avg.
    [[nodiscard]] virtual bool shared_memory_is_symmetric() const { return false; }
    /// "nccl (auto: buffers are on a CUDA device)": which backend create() chose, and why.
    [[nodiscard]] const std::string& choice() const { return choice_; }

    // These throw InvalidInput at once for wrong arguments, and have then not taken part in anything.

    /// In place: every rank ends with the reduction of all ranks' buffers.
    Work all_reduce(Buffer buffer, ReduceOp op = ReduceOp::Sum);
    /// Every rank ends with root's buffer.
    Work broadcast(Buffer buffer, int root);
    /// `output` holds size() * input.count elements: rank r's input at r * input.count.
    Work all_gather(Buffer output, Buffer input);
    /// `input` holds size() * output.count elements; rank r ends with the reduction of slice r.
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op = ReduceOp::Sum);
    /// In place: `root` ends with the reduction of all ranks' buffers, the others keep theirs.
    Work reduce(Buffer buffer, int root, ReduceOp op = ReduceOp::Sum);
    /// On `root`, `output` holds size() * input.count elements: rank r's input at r * input.count. The
    /// others' output is not looked at: leave it empty.
    Work gather(Buffer output, Buffer input, int root);
    /// On `root`, `input` holds size() * output.count elements; rank r ends with slice r. The others' input
    /// is not looked at: leave it empty.
    Work scatter(Buffer output, Buffer input, int root);
    /// Both hold size() * n elements and do not overlap at all: rank r ends with everyone's slice r, by rank.
    Work all_to_all(Buffer output, Buffer input);

    /// As all_gather, reduce_scatter and all_to_all, with slices of different lengths, which lie one behind
    /// the other by rank. `counts` is the same on all ranks and tells how long each rank's slice is; ranks
    /// that count differently get a MismatchError that says so.
    Work all_gather_v(Buffer output, Buffer input, Counts counts);
    Work reduce_scatter_v(Buffer output, Buffer input, Counts counts, ReduceOp op = ReduceOp::Sum);
    /// sent[r] elements of `input` go to rank r, received[r] elements of `output` come from it.
    Work all_to_all_v(Buffer output, Counts received, Buffer input, Counts sent);

    Work barrier();
    /// A barrier that blocks, and has a time-out of its own: a TimeoutError names every rank that did not
    /// come.
    void monitored_barrier(std::chrono::nanoseconds timeout);

    /// From this rank to another, which calls recv for as many elements of the same type; the two of one
    /// pair are matched in order. Only these two ranks take part, and the calls have numbers of their own.
    /// Either waits for the other, and for the calls before it: of two ranks that exchange, one receives
    /// first (or both use all_to_all, or batch_send_recv).
    Work send(Buffer buffer, int to);
    Work recv(Buffer buffer, int from);
    /// All of these at once: none waits for another, so ranks may send each other first. Those of one pair
    /// and direction are matched in order. Each side of a pair has its messages in a batch.
    Work batch_send_recv(std::vector<Message> messages);

    /// Collective, blocking: the ranks of equal `color` form a group of their own, ranked by `key` and then
    /// by their rank here. Null for a negative color. It has this group's backend, options and stream, and
    /// lives as long as one likes; its errors name ranks of the world. Not more than 48 at one time on a
    /// node. A split that fails leaves this group unusable.
    std::unique_ptr<ProcessGroup> split(int color, int key);

    /// Collective: every rank calls it in the same order with the same size. Host memory that the backend can
    /// reduce without copying (64-byte aligned, zeroed); all_reduce on a buffer inside it is the fast path.
    /// Freed with the group. Backends cpu and staged have 64 GiB for all ranks of a node together (21 GiB in
    /// a group made by split), less where the hard limit on file sizes is below 2 TiB; InvalidInput beyond
    /// it. On a GPU backend it is device memory, and allocating it waits for the device.
    std::span<std::byte> allocate_shared(std::size_t bytes);

    /// Collective: `launch` puts a CUDA graph in which collectives of this group were captured on the group's
    /// stream. Each launch counts as one collective: it has a number, a time-out and a line for the launcher,
    /// and wait() throws what went wrong so far. Once the group has failed nothing is launched any more: the
    /// graph would use what the failure has freed. Destroy the graph before the group. Backends that cannot
    /// be captured just call `launch`.
    virtual Work launch_graph(const std::function<void()>& launch);

    /// Collective on bytes of any length per rank: everyone's message, by rank. Blocking.
    std::vector<std::string> all_gather_bytes(std::string_view mine);

    /// Seconds this rank has spent inside collectives since the group was made.
    [[nodiscard]] virtual double communication_seconds() const = 0;
    /// Of these, seconds in which this rank had made a call and waited for others to make it: they were still
    /// computing, or had no core. 0 where a backend cannot tell.
    [[nodiscard]] virtual double waiting_seconds() const { return 0; }
    /// Of the calls that it is given now: ProcessGroupOptions::timeout, or that of the latest TimeoutScope.
    [[nodiscard]] std::chrono::nanoseconds timeout() const { return timeout_; }
    /// Tells the launcher that `step` training steps and `samples` samples are done (two relaxed stores).
    virtual void report_progress(std::uint64_t step, std::uint64_t samples) = 0;

  protected:
    /// What all calls go by.
    struct Seat {
        int rank = 0;
        int size = 1;
        Device device = {};           ///< of all buffers
        const char* backend = "cpu";  ///< for messages, as the rank in the world
        int world_rank = 0;
        std::chrono::nanoseconds timeout = ProcessGroupOptions{}.timeout;
    };
    ProcessGroup();
    /// Once, before the first call.
    void take_seat(const Seat& seat) { seat_ = seat, timeout_ = seat.timeout; }
    [[nodiscard]] const Seat& seat() const { return seat_; }
    /// Then the threads, the connections and the memory are the parent's: destroy nothing that it uses.
    [[nodiscard]] bool is_in_forked_child() const;

    // What a backend does: as the calls of those names, with arguments that are checked, within timeout(). Of
    // gather's output and scatter's input that holds on `root` alone; the others must not look at theirs.
    virtual Work do_all_reduce(Buffer buffer, ReduceOp op) = 0;
    virtual Work do_broadcast(Buffer buffer, int root) = 0;
    virtual Work do_all_gather(Buffer output, Buffer input) = 0;
    virtual Work do_reduce_scatter(Buffer output, Buffer input, ReduceOp op) = 0;
    virtual Work do_reduce(Buffer buffer, int root, ReduceOp op) = 0;
    virtual Work do_gather(Buffer output, Buffer input, int root) = 0;
    virtual Work do_scatter(Buffer output, Buffer input, int root) = 0;
    virtual Work do_all_to_all(Buffer output, Buffer input) = 0;
    virtual Work do_send(Buffer buffer, int to) = 0;
    virtual Work do_recv(Buffer buffer, int from) = 0;
    virtual Work do_barrier() = 0;
    virtual std::span<std::byte> do_allocate_shared(std::size_t bytes) = 0;
    virtual Work do_batch(std::vector<Message> messages) = 0;
    virtual Work do_all_gather_v(Buffer output, Buffer input, Counts counts) = 0;
    virtual Work do_reduce_scatter_v(Buffer output, Buffer input, Counts counts, ReduceOp op) = 0;
    virtual Work do_all_to_all_v(Buffer output, Counts received, Buffer input, Counts sent) = 0;
    /// As what it is reported to those who wait for it: kBytesMark or kSplitMark (worker/call.h).
    virtual std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) = 0;

    /// A sub-group as all ranks know it.
    struct Part {
        int color = 0;
        int key = 0;
        std::vector<std::uint32_t> members;  ///< ranks of this group, in the new order; none for color < 0
    };
    /// Collective over this group, also for those who are in no part: null for them.
    virtual std::unique_ptr<ProcessGroup> do_split(const Part& part) = 0;

  private:
    friend class BorrowedGroup;
    friend class TimeoutScope;
    class OneAtATime;
    void require_memory(const char* call, const Buffer& buffer) const;
    void require_root(const char* call, int root) const;
    void require_peer(const char* call, int peer) const;
    void require_n_times(const char* call, const char* large_name, const Buffer& large,
                         const Buffer& small) const;
    void require_counts(const char* call, const char* large_name, const Buffer& large,
                        const Counts& counts) const;
    void require_own_slice(const char* call, const char* large_name, const Buffer& large, const Buffer& small,
                           const Counts& counts) const;

    Seat seat_;
    std::chrono::nanoseconds timeout_{};
    std::string choice_;
    std::atomic<const char*> inside_ = nullptr;  ///< the call that a thread is in
    const std::uint32_t made_in_;                ///< the process that made it (worker/fork.h)
    const std::shared_ptr<const bool> life_ = std::make_shared<const bool>(true);  ///< as long as this
};

/// A group that is kept beyond a call and is somebody else's. Once it has been destroyed each use throws
/// Error, which says so.
class BorrowedGroup {
  public:
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

    ProcessGroup* group_;
    std::weak_ptr<const bool> life_;
};

/// While it lives, the calls that a group is given have this time-out. Scopes end in reverse order.
class TimeoutScope {
  public:
    /// Throws InvalidInput unless it is positive.
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
