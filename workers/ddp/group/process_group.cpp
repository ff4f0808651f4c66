#include "ddp/process_group.h"

#include <fmt/core.h>

#include <utility>

#include "ddp/group/split.h"
#include "ddp/worker/call.h"
#include "ddp/worker/fork.h"
#include "ddp/worker/slices.h"

namespace ddp {

namespace {

// Messages are formatted only when they are thrown: formatting takes longer than a small collective.

void require_same_type(const char* call, const Buffer& one, const Buffer& other) {
    if (one.dtype == other.dtype) return;
    throw InvalidInput(
        fmt::format("{}: one buffer is {}, the other {}", call, name_of(one.dtype), name_of(other.dtype)));
}

bool share_memory(const Buffer& one, const Buffer& other) {
    const auto a = reinterpret_cast<std::uintptr_t>(one.data),
               b = reinterpret_cast<std::uintptr_t>(other.data);
    return one.bytes() > 0 && other.bytes() > 0 && a < b + other.bytes() && b < a + one.bytes();
}

void require_reducible(const char* call, const Buffer& buffer, ReduceOp op) {
    if (is_reducible(buffer.dtype, op)) return;
    if (!is_known(op))
        throw InvalidInput(fmt::format("{}: there is no reduction {}", call, static_cast<int>(op)));
    throw InvalidInput(fmt::format("{}: no {} of {} buffers", call, name_of(op), name_of(buffer.dtype)));
}

void require_apart(const char* call, const Buffer& output, const Buffer& input) {
    if (!share_memory(output, input)) return;
    throw InvalidInput(fmt::format("{}: input and output overlap; they must lie apart", call));
}

/// Throws on an overlap, unless `small` is this rank's slice of `large`, which begins at byte `offset`.
void require_apart_or_own(const char* call, const Buffer& large, const Buffer& small, std::size_t offset,
                          int own) {
    if (small.data == static_cast<const std::byte*>(large.data) + offset || !share_memory(large, small))
        return;
    throw InvalidInput(fmt::format(
        "{}: input and output overlap; one may be the other's slice {}, this rank's own, or lie apart", call,
        own));
}

/// Throws unless both buffers have n equal slices and do not overlap.
void require_slices(const char* call, const Buffer& output, const Buffer& input, int n) {
    require_same_type(call, input, output);
    if (output.count != input.count) {
        throw InvalidInput(
            fmt::format("{}: output has {} elements, input {}", call, output.count, input.count));
    }
    if (input.count % static_cast<std::size_t>(n) != 0)
        throw InvalidInput(fmt::format("{}: {} elements are not {} equal slices", call, input.count, n));
    require_apart(call, output, input);
}

}  // namespace

/// Excludes a second thread while one is inside a call.
class ProcessGroup::OneAtATime {
  public:
    OneAtATime(ProcessGroup& group, const char* call) : inside_(group.inside_) {
        if (group.is_in_forked_child())
            require_same_process(group.made_in_,
                                 fmt::format("rank {}: {}", group.identity_.world_rank, call));
        const char* other = nullptr;
        if (inside_.compare_exchange_strong(other, call, std::memory_order_acquire)) return;
        throw Error(fmt::format(
            "rank {}: {} was called while another thread was in {} of the same group; call a group from one thread at a "
            "time, in an order that is the same on all ranks, or give each thread a group of its own by split",
            group.identity_.world_rank, call, other));
    }
    ~OneAtATime() { inside_.store(nullptr, std::memory_order_release); }
    OneAtATime(const OneAtATime&) = delete;
    OneAtATime& operator=(const OneAtATime&) = delete;

  private:
    std::atomic<const char*>& inside_;
};

ProcessGroup::ProcessGroup() : made_in_(fork_count()) {}

bool ProcessGroup::is_in_forked_child() const { return made_in_ != fork_count(); }

/// Throws unless the buffer is on the device of this group.
void ProcessGroup::require_memory(const char* call, const Buffer& buffer) const {
    if (!is_known(buffer.dtype))
        throw InvalidInput(
            fmt::format("{}: there is no element type {}", call, static_cast<int>(buffer.dtype)));
    if (buffer.data == nullptr && buffer.count > 0)
        throw InvalidInput(fmt::format("{}: the buffer is null", call));
    if (buffer.device == device()) return;
    const bool is_on_host = buffer.device.kind == Device::Kind::Cpu;
    if (device().kind == Device::Kind::Cpu) {
        if (is_on_host) return;
        throw InvalidInput(
            fmt::format("{}: the {} backend takes host memory, the buffer lies on CUDA device {}", call,
                        identity_.backend, buffer.device.index));
    }
    const std::string where =
        is_on_host ? "is in host memory" : fmt::format("lies on CUDA device {}", buffer.device.index);
    throw InvalidInput(fmt::format("{}: rank {}'s {} backend takes memory of CUDA device {}, the buffer {}",
                                   call, identity_.world_rank, identity_.backend, device().index, where));
}

void ProcessGroup::require_root(const char* call, int root) const {
    if (root >= 0 && root < size()) return;
    throw InvalidInput(fmt::format("{}: root {} is not a rank of 0-{}", call, root, size() - 1));
}

void ProcessGroup::require_peer(const char* call, int peer) const {
    if (peer < 0 || peer >= size())
        throw InvalidInput(fmt::format("{}: peer {} is not a rank of 0-{}", call, peer, size() - 1));
    if (peer == rank()) throw InvalidInput(fmt::format("{}: rank {} is this rank itself", call, peer));
}

/// Throws unless `large` (the call's "input" or "output") has size() times the elements of `small`, and the
/// two do not overlap or `small` is this rank's slice of it.
void ProcessGroup::require_n_times(const char* call, const char* large_name, const Buffer& large,
                                   const Buffer& small) const {
    const int n = size();
    require_same_type(call, small, large);
    const std::size_t needed = small.count * static_cast<std::size_t>(n);
    if (large.count != needed)
        throw InvalidInput(fmt::format("{}: {} has {} elements, {} ranks of {} need {}", call, large_name,
                                       large.count, n, small.count, needed));
    require_apart_or_own(call, large, small, static_cast<std::size_t>(rank()) * small.bytes(), rank());
}

/// Throws unless there is one count per rank, and their sum is the size of `large` (the call's "input" or
/// "output").
void ProcessGroup::require_counts(const char* call, const char* large_name, const Buffer& large,
                                  const Counts& counts) const {
    if (counts.size() != static_cast<std::size_t>(size()))
        throw InvalidInput(
            fmt::format("{}: {} counts for the {} of {} ranks", call, counts.size(), large_name, size()));
    std::size_t all = 0;
    bool fits = true;
    for (const std::size_t count : counts) fits = fits && !__builtin_add_overflow(all, count, &all);
    if (fits && all == large.count) return;
    throw InvalidInput(fmt::format("{}: {} has {} elements, its counts make {}", call, large_name,
                                   large.count, fits ? std::to_string(all) : "too many"));
}

/// Throws unless `small` has the length of this rank's slice of `large`, and is that slice or does not
/// overlap.
void ProcessGroup::require_own_slice(const char* call, const char* large_name, const Buffer& large,
                                     const Buffer& small, const Counts& counts) const {
    require_same_type(call, small, large);
    require_counts(call, large_name, large, counts);
    const std::size_t own = counts[static_cast<std::size_t>(rank())];
    if (small.count != own)
        throw InvalidInput(
            fmt::format("{}: rank {} has {} elements, its count is {}", call, rank(), small.count, own));
    const std::size_t offset = Slices(counts, large.dtype).offset(static_cast<std::size_t>(rank()));
    require_apart_or_own(call, large, small, offset, rank());
}

Work ProcessGroup::all_reduce(Buffer buffer, ReduceOp op) {
    const OneAtATime alone(*this, "all_reduce");
    require_memory("all_reduce", buffer);
    require_reducible("all_reduce", buffer, op);
    return do_all_reduce(buffer, op);
}

Work ProcessGroup::broadcast(Buffer buffer, int root) {
    const OneAtATime alone(*this, "broadcast");
    require_memory("broadcast", buffer);
    require_root("broadcast", root);
    return do_broadcast(buffer, root);
}

Work ProcessGroup::all_gather(Buffer output, Buffer input) {
    const OneAtATime alone(*this, "all_gather");
    require_memory("all_gather", output);
    require_memory("all_gather", input);
    require_n_times("all_gather", "output", output, input);
    return do_all_gather(output, input);
}

Work ProcessGroup::reduce_scatter(Buffer output, Buffer input, ReduceOp op) {
    const OneAtATime alone(*this, "reduce_scatter");
    require_memory("reduce_scatter", output);
    require_memory("reduce_scatter", input);
    require_n_times("reduce_scatter", "input", input, output);
    require_reducible("reduce_scatter", input, op);
    return do_reduce_scatter(output, input, op);
}

Work ProcessGroup::reduce(Buffer buffer, int root, ReduceOp op) {
    const OneAtATime alone(*this, "reduce");
    require_memory("reduce", buffer);
    require_root("reduce", root);
    require_reducible("reduce", buffer, op);
    return do_reduce(buffer, root, op);
}

Work ProcessGroup::gather(Buffer output, Buffer input, int root) {
    const OneAtATime alone(*this, "gather");
    require_memory("gather", input);
    require_root("gather", root);
    if (rank() == root) {
        require_memory("gather", output);
        require_n_times("gather", "output", output, input);
    }
    return do_gather(output, input, root);
}

Work ProcessGroup::scatter(Buffer output, Buffer input, int root) {
    const OneAtATime alone(*this, "scatter");
    require_memory("scatter", output);
    require_root("scatter", root);
    if (rank() == root) {
        require_memory("scatter", input);
        require_n_times("scatter", "input", input, output);
    }
    return do_scatter(output, input, root);
}

Work ProcessGroup::all_to_all(Buffer output, Buffer input) {
    const OneAtATime alone(*this, "all_to_all");
    require_memory("all_to_all", output);
    require_memory("all_to_all", input);
    require_slices("all_to_all", output, input, size());
    return do_all_to_all(output, input);
}

Work ProcessGroup::all_gather_v(Buffer output, Buffer input, Counts counts) {
    const OneAtATime alone(*this, "all_gather_v");
    require_memory("all_gather_v", output);
    require_memory("all_gather_v", input);
    require_own_slice("all_gather_v", "output", output, input, counts);
    return do_all_gather_v(output, input, std::move(counts));
}

Work ProcessGroup::reduce_scatter_v(Buffer output, Buffer input, Counts counts, ReduceOp op) {
    const OneAtATime alone(*this, "reduce_scatter_v");
    require_memory("reduce_scatter_v", output);
    require_memory("reduce_scatter_v", input);
    require_own_slice("reduce_scatter_v", "input", input, output, counts);
    require_reducible("reduce_scatter_v", input, op);
    return do_reduce_scatter_v(output, input, std::move(counts), op);
}

Work ProcessGroup::all_to_all_v(Buffer output, Counts received, Buffer input, Counts sent) {
    const OneAtATime alone(*this, "all_to_all_v");
    require_memory("all_to_all_v", output);
    require_memory("all_to_all_v", input);
    require_same_type("all_to_all_v", input, output);
    require_counts("all_to_all_v", "output", output, received);
    require_counts("all_to_all_v", "input", input, sent);
    require_apart("all_to_all_v", output, input);
    return do_all_to_all_v(output, std::move(received), input, std::move(sent));
}

Work ProcessGroup::send(Buffer buffer, int to) {
    const OneAtATime alone(*this, "send");
    require_memory("send", buffer);
    require_peer("send", to);
    return do_send(buffer, to);
}

Work ProcessGroup::recv(Buffer buffer, int from) {
    const OneAtATime alone(*this, "recv");
    require_memory("recv", buffer);
    require_peer("recv", from);
    return do_recv(buffer, from);
}

Work ProcessGroup::batch_send_recv(std::vector<Message> messages) {
    const OneAtATime alone(*this, "batch_send_recv");
    for (const Message& one : messages) {
        require_memory("batch_send_recv", one.buffer);
        require_peer("batch_send_recv", one.peer);
    }
    return messages.empty() ? Work() : do_batch(std::move(messages));
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view mine) {
    const OneAtATime alone(*this, "all_gather_bytes");
    return do_all_gather_bytes(mine, kBytesMark);
}

Work ProcessGroup::barrier() {
    const OneAtATime alone(*this, "barrier");
    return do_barrier();
}

std::span<std::byte> ProcessGroup::allocate_shared(std::size_t bytes) {
    const OneAtATime alone(*this, "allocate_shared");
    return do_allocate_shared(bytes);
}

void ProcessGroup::monitored_barrier(std::chrono::nanoseconds timeout) {
    const TimeoutScope limit(*this, timeout);
    barrier().synchronize();
}

TimeoutScope::TimeoutScope(ProcessGroup& group, std::chrono::nanoseconds timeout)
    : group_(group), before_(group.timeout_) {
    if (timeout <= timeout.zero())
        throw InvalidInput(fmt::format("rank {}: a time-out of {} ns; it must be positive",
                                       group.identity_.world_rank, timeout.count()));
    group.timeout_ = timeout;
}

void BorrowedGroup::throw_gone() {
    throw Error(
        "the ProcessGroup was destroyed before what was made over it (DistributedDataParallel, Join, Reducer); the group has to "
        "outlive them: declare it before the model, and reset it after");
}

std::unique_ptr<ProcessGroup> ProcessGroup::split(int color, int key) {
    const OneAtATime alone(*this, "split");
    const std::vector<SplitRequest> requests = decode(do_all_gather_bytes(encode({color, key}), kSplitMark));
    SubGroup part{.color = color, .key = key, .members = {}};
    if (color >= 0) part.members = members_of(color, requests);
    return do_split(part);
}

Work ProcessGroup::launch_graph(const std::function<void()>& launch) {
    launch();
    return {};
}

}  // namespace ddp
