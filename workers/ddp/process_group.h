#pragma once

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

/// A contiguous buffer of `count` elements. Borrowed: it must live until the collective's Work is done.
struct Buffer {
    void* data = nullptr;
    std::size_t count = 0;
    DType dtype = DType::F32;
    Device device = {};

    [[nodiscard]] std::size_t bytes() const { return count * size_of(dtype); }
};
template <class T>
Buffer buffer_of(std::span<T> values);

/// A collective in flight. Copyable handle. wait() blocks until it is done and throws what went wrong
/// (PeerLostError, TimeoutError, MismatchError); on a GPU backend it makes the current stream wait instead, and
/// throws what went wrong so far. synchronize() blocks the calling thread on every backend.
class Work {
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

struct ProcessGroupOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(10);  ///< per collective
    std::string backend = "auto";                                 ///< auto, nccl, staged, cpu
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
/// Calls are asynchronous: they return a Work. Summation is in rank order, so results are bitwise equal on
/// all ranks and from run to run. Not thread-safe: one thread issues the calls.
class ProcessGroup {
  public:
    /// Joins the world that `context` describes; blocks until every rank has joined or the timeout passes.
    /// Throws TimeoutError naming the ranks that are missing, MismatchError when world sizes disagree.
    static std::unique_ptr<ProcessGroup> create(const Context& context, ProcessGroupOptions options = {});
    virtual ~ProcessGroup() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int size() const = 0;
    /// "cpu (shared memory)", for the one line that says what was chosen.
    [[nodiscard]] virtual std::string describe() const = 0;
    /// Where the buffers of collectives must be.
    [[nodiscard]] virtual Device device() const { return {}; }
    /// cudaStream_t that collectives follow and wait() holds back (ProcessGroupOptions::stream).
    [[nodiscard]] virtual void* stream() const { return nullptr; }
    /// Whether memory of allocate_shared is registered in such a way that its sums take the fastest path.
    /// Then divide first and use Sum rather than Avg.
    [[nodiscard]] virtual bool shared_memory_is_symmetric() const { return false; }
    /// "nccl (auto: buffers are on a CUDA device)": which backend create() chose, and why.
    [[nodiscard]] const std::string& choice() const { return choice_; }

    /// In place: every rank ends with the reduction of all ranks' buffers.
    virtual Work all_reduce(Buffer buffer, ReduceOp op = ReduceOp::Sum) = 0;
    /// Every rank ends with root's buffer.
    virtual Work broadcast(Buffer buffer, int root) = 0;
    /// `output` holds size() * input.count elements: rank r's input at r * input.count.
    virtual Work all_gather(Buffer output, Buffer input) = 0;
    /// `input` holds size() * output.count elements; rank r ends with the reduction of slice r.
    virtual Work reduce_scatter(Buffer output, Buffer input, ReduceOp op = ReduceOp::Sum) = 0;
    /// In place: `root` ends with the reduction of all ranks' buffers, the others keep theirs.
    virtual Work reduce(Buffer buffer, int root, ReduceOp op = ReduceOp::Sum) = 0;
    /// On `root`, `output` holds size() * input.count elements: rank r's input at r * input.count. The
    /// others' output is not looked at: leave it empty.
    virtual Work gather(Buffer output, Buffer input, int root) = 0;
    /// On `root`, `input` holds size() * output.count elements; rank r ends with slice r. The others' input
    /// is not looked at: leave it empty.
    virtual Work scatter(Buffer output, Buffer input, int root) = 0;
    /// Both hold size() * n elements and do not overlap: rank r ends with everyone's slice r, by rank.
    virtual Work all_to_all(Buffer output, Buffer input) = 0;
    virtual Work barrier() = 0;

    /// From this rank to another, which calls recv for as many elements of the same type; the two of one
    /// pair are matched in order. Only these two ranks take part, and the calls have numbers of their own.
    /// Either waits for the other, and for the calls before it: of two ranks that exchange, one receives
    /// first (or both use all_to_all).
    virtual Work send(Buffer buffer, int to) = 0;
    virtual Work recv(Buffer buffer, int from) = 0;

    /// Collective, blocking: the ranks of equal `color` form a group of their own, ranked by `key` and then
    /// by their rank here. Null for a negative color. It has this group's backend, options and stream, and
    /// lives as long as one likes; its errors name ranks of the world. Not more than 48 at one time on a
    /// node. A split that fails leaves this group unusable.
    virtual std::unique_ptr<ProcessGroup> split(int color, int key) = 0;

    /// Collective: every rank calls it in the same order with the same size. Host memory that the backend can
    /// reduce without copying (64-byte aligned, zeroed); all_reduce on a buffer inside it is the fast path.
    /// Freed with the group.
    /// On a GPU backend it is device memory, and allocating it waits for the device.
    virtual std::span<std::byte> allocate_shared(std::size_t bytes) = 0;

    /// Collective: `launch` puts a CUDA graph in which collectives of this group were captured on the group's
    /// stream. Each launch counts as one collective: it has a number, a time-out and a line for the launcher,
    /// and wait() throws what went wrong so far. Once the group has failed nothing is launched any more: the
    /// graph would use what the failure has freed. Destroy the graph before the group. Backends that cannot be
    /// captured just call `launch`.
    virtual Work launch_graph(const std::function<void()>& launch);

    /// Collective on bytes of any length per rank: everyone's message, by rank. Blocking.
    virtual std::vector<std::string> all_gather_bytes(std::string_view mine) = 0;

    /// Seconds this rank has spent inside collectives since the group was made.
    [[nodiscard]] virtual double communication_seconds() const = 0;
    /// Tells the launcher that `step` training steps and `samples` samples are done (two relaxed stores).
    virtual void report_progress(std::uint64_t step, std::uint64_t samples) = 0;

  private:
    std::string choice_;
};

template <class T>
constexpr DType dtype_of();
template <> constexpr DType dtype_of<float>() { return DType::F32; }
template <> constexpr DType dtype_of<double>() { return DType::F64; }
template <> constexpr DType dtype_of<std::int32_t>() { return DType::I32; }
template <> constexpr DType dtype_of<std::int64_t>() { return DType::I64; }
template <> constexpr DType dtype_of<std::uint8_t>() { return DType::U8; }
template <class T>
Buffer buffer_of(std::span<T> values) {
    return {values.data(), values.size(), dtype_of<T>(), {}};
}

}  // namespace ddp
