#include "ddp/process_group.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "ddp/group/split.h"
#include "ddp/worker/fork.h"
#include "ddp/worker/operation.h"

namespace ddp {

using ddprun::SegmentOp;

namespace {

bool share_memory(const ConstBuffer& one, const ConstBuffer& other) {
    const auto a = reinterpret_cast<std::uintptr_t>(one.data),
               b = reinterpret_cast<std::uintptr_t>(other.data);
    return one.bytes() > 0 && other.bytes() > 0 && a < b + other.bytes() && b < a + one.bytes();
}

/// Whether no rank gets out of the call before all ranks are in it.
bool waits_for_all(SegmentOp operation) {
    return operation == SegmentOp::AllReduce || operation == SegmentOp::AllGather ||
           operation == SegmentOp::ReduceScatter || operation == SegmentOp::AllToAll ||
           operation == SegmentOp::Barrier;
}

}  // namespace

/// A thread inside one call: excludes a second thread meanwhile, and checks the arguments. Messages are
/// formatted only when they are thrown: formatting takes longer than a small collective.
class ProcessGroup::Entry {
  public:
    Entry(ProcessGroup& group, const char* call) : group_(group), call_(call) {
        group.require_own_process(call);
        if (is_in_commit_)
            throw Error(fmt::format(
                "rank {}: {} was called inside Recovery::commit; call it before: no rank may wait for another there",
                group.identity_.world_rank, call));
        const char* other = nullptr;
        if (group.inside_.compare_exchange_strong(other, call, std::memory_order_acquire)) return;
        is_nested_ = group.coalesced_ != nullptr && group.coalescing_thread_ == std::this_thread::get_id();
        if (is_nested_) return;
        throw Error(fmt::format(
            "rank {}: {} was called while another thread was in {} of the same group; call a group from one thread at a "
            "time, in an order that is the same on all ranks, or give each thread a group of its own by split",
            group.identity_.world_rank, call, other));
    }
    ~Entry() {
        if (!is_nested_) group_.inside_.store(nullptr, std::memory_order_release);
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    /// Throws inside coalesced(): this call is not one of those that can be started later.
    void require_alone() const {
        if (is_nested_) refuse("cannot be part of coalesced calls");
    }
    /// Throws unless the buffer is on the device of this group.
    void require_memory(const ConstBuffer& buffer) const {
        if (!is_known(buffer.dtype)) refuse("there is no element type {}", static_cast<int>(buffer.dtype));
        if (buffer.data == nullptr && buffer.count > 0) refuse("the buffer is null");
        if (buffer.device != group_.device()) refuse_device(buffer.device);
    }
    void require_root(int root) const {
        if (root < 0 || root >= size()) refuse("root {} is not a rank of 0-{}", root, size() - 1);
    }
    void require_peer(int peer) const {
        if (peer < 0 || peer >= size()) refuse("peer {} is not a rank of 0-{}", peer, size() - 1);
        if (peer == rank()) refuse("rank {} is this rank itself", peer);
    }
    /// Throws unless these are different ranks, and this one is among them.
    void require_members(const std::vector<int>& ranks) const {
        for (const int one : ranks) {
            if (one < 0 || one >= size()) refuse("{} is not a rank of 0-{}", one, size() - 1);
            if (std::count(ranks.begin(), ranks.end(), one) > 1) refuse("rank {} is listed twice", one);
        }
        if (std::count(ranks.begin(), ranks.end(), rank()) == 0)
            refuse("rank {} is not a member, and must not call it", rank());
    }
    void require_reducible(DType type, ReduceOp op) const {
        if (is_reducible(type, op)) return;
        if (!is_known(op)) refuse("there is no reduction {}", static_cast<int>(op));
        refuse("no {} of {} buffers", name_of(op), name_of(type));
    }
    void require_same_type(const ConstBuffer& one, const ConstBuffer& other) const {
        if (one.dtype != other.dtype)
            refuse("one buffer is {}, the other {}", name_of(one.dtype), name_of(other.dtype));
    }
    void require_apart(const ConstBuffer& output, const ConstBuffer& input) const {
        if (share_memory(output, input)) refuse("input and output overlap; they must lie apart");
    }
    /// Throws unless `large` (the call's "input" or "output") has size() times the elements of `small`, and
    /// the two do not overlap or `small` is this rank's slice of it.
    void require_n_times(const char* large_name, const ConstBuffer& large, const ConstBuffer& small) const {
        require_same_type(small, large);
        const std::size_t needed = small.count * static_cast<std::size_t>(size());
        if (large.count != needed)
            refuse("{} has {} elements, {} ranks of {} need {}", large_name, large.count, size(), small.count,
                   needed);
        require_apart_or_own(large, small, static_cast<std::size_t>(rank()) * small.bytes());
    }
    void require_equal(const ConstBuffer& output, const ConstBuffer& input) const {
        require_same_type(input, output);
        if (output.count != input.count)
            refuse("output has {} elements, input {}", output.count, input.count);
    }
    /// Throws unless both buffers have size() equal slices and do not overlap.
    void require_slices(const ConstBuffer& output, const ConstBuffer& input) const {
        require_equal(output, input);
        if (input.count % static_cast<std::size_t>(size()) != 0)
            refuse("{} elements are not {} equal slices", input.count, size());
        require_apart(output, input);
    }
    /// Throws unless there is one count per rank, and their sum is the size of `large` (the call's "input" or
    /// "output").
    void require_counts(const char* large_name, const ConstBuffer& large, const Counts& counts) const {
        if (counts.size() != static_cast<std::size_t>(size()))
            refuse("{} counts for the {} of {} ranks", counts.size(), large_name, size());
        std::size_t all = 0;
        bool fits = true;
        for (const std::size_t count : counts) fits = fits && !__builtin_add_overflow(all, count, &all);
        if (fits && all == large.count) return;
        refuse("{} has {} elements, its counts make {}", large_name, large.count,
               fits ? std::to_string(all) : "too many");
    }
    /// Throws unless `small` has the length of this rank's slice of `large`, and is that slice or does not
    /// overlap.
    void require_own_slice(const char* large_name, const ConstBuffer& large, const ConstBuffer& small,
                           const Counts& counts) const {
        require_same_type(small, large);
        require_counts(large_name, large, counts);
        const std::size_t own = counts[static_cast<std::size_t>(rank())];
        if (small.count != own) refuse("rank {} has {} elements, its count is {}", rank(), small.count, own);
        require_apart_or_own(large, small,
                             Slices(counts, large.dtype).offset(static_cast<std::size_t>(rank())));
    }

  private:
    template <class... Values>
    [[noreturn]] void refuse(fmt::format_string<Values...> why, Values&&... values) const {
        throw InvalidInput(std::string(call_) + ": " + fmt::format(why, std::forward<Values>(values)...));
    }
    [[noreturn]] void refuse_device(const Device& other) const {
        const bool is_on_host = other.kind == Device::Kind::Cpu;
        if (group_.device().kind == Device::Kind::Cpu)
            refuse("the {} backend takes host memory, the buffer lies on CUDA device {}",
                   group_.identity_.backend, other.index);
        refuse("rank {}'s {} backend takes memory of CUDA device {}, the buffer {}",
               group_.identity_.world_rank, group_.identity_.backend, group_.device().index,
               is_on_host ? "is in host memory" : fmt::format("lies on CUDA device {}", other.index));
    }
    /// Throws on an overlap, unless `small` is this rank's slice of `large`, which begins at byte `offset`.
    void require_apart_or_own(const ConstBuffer& large, const ConstBuffer& small, std::size_t offset) const {
        if (small.data != static_cast<const std::byte*>(large.data) + offset && share_memory(large, small))
            refuse("input and output overlap; one may be the other's slice {}, this rank's own, or lie apart",
                   rank());
    }
    [[nodiscard]] int rank() const { return group_.rank(); }
    [[nodiscard]] int size() const { return group_.size(); }

    ProcessGroup& group_;
    const char* const call_;
    bool is_nested_ = false;  ///< inside coalesced()
};

constinit thread_local bool ProcessGroup::is_in_commit_ = false;

ProcessGroup::ProcessGroup() : made_in_(fork_count()) {}

bool ProcessGroup::is_in_forked_child() const { return made_in_ != fork_count(); }

void ProcessGroup::require_own_process(const char* call) const {
    if (is_in_forked_child())
        require_same_process(made_in_, fmt::format("rank {}: {}", identity_.world_rank, call));
}

Work ProcessGroup::submit(Operation&& operation) {
    if (waits_for_all(operation.call.operation)) ++all_rank_calls_;
    if (coalesced_ == nullptr) return start(std::span(&operation, 1));
    coalesced_->push_back(std::move(operation));
    return {};
}

Work ProcessGroup::coalesced(const std::function<void()>& calls) {
    const Entry entry(*this, "coalesced");
    entry.require_alone();
    std::vector<Operation> operations;
    coalescing_thread_ = std::this_thread::get_id();
    coalesced_ = &operations;
    try {
        calls();
    } catch (...) {
        coalesced_ = nullptr;
        throw;
    }
    coalesced_ = nullptr;
    return operations.empty() ? Work() : start(operations);
}

// Not by the other all_reduce: passing the buffers on would take a fifth of a small one.
Work ProcessGroup::all_reduce(Buffer buffer, ReduceOp op) {
    const Entry entry(*this, "all_reduce");
    entry.require_memory(buffer);
    entry.require_reducible(buffer.dtype, op);
    return submit({.call = call_of(SegmentOp::AllReduce, buffer, op), .out = buffer, .in = buffer});
}

Work ProcessGroup::all_reduce(Buffer output, ConstBuffer input, ReduceOp op) {
    const Entry entry(*this, "all_reduce");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_equal(output, input);
    if (input.data != output.data) entry.require_apart(output, input);
    entry.require_reducible(input.dtype, op);
    return submit({.call = call_of(SegmentOp::AllReduce, input, op), .out = output, .in = input});
}

Work ProcessGroup::broadcast(Buffer buffer, int root) {
    const Entry entry(*this, "broadcast");
    entry.require_memory(buffer);
    entry.require_root(root);
    Operation one{.call = call_of(SegmentOp::Broadcast, buffer, ReduceOp::Sum, root), .root = root};
    if (rank() == root) one.in = buffer;
    else one.out = buffer;
    return submit(std::move(one));
}

Work ProcessGroup::all_gather(Buffer output, ConstBuffer input) {
    const Entry entry(*this, "all_gather");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_n_times("output", output, input);
    return submit({.call = call_of(SegmentOp::AllGather, input), .out = output, .in = input});
}

Work ProcessGroup::reduce_scatter(Buffer output, ConstBuffer input, ReduceOp op) {
    const Entry entry(*this, "reduce_scatter");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_n_times("input", input, output);
    entry.require_reducible(input.dtype, op);
    return submit({.call = call_of(SegmentOp::ReduceScatter, output, op), .out = output, .in = input});
}

Work ProcessGroup::reduce(Buffer buffer, int root, ReduceOp op) {
    const Entry entry(*this, "reduce");
    entry.require_memory(buffer);
    entry.require_root(root);
    entry.require_reducible(buffer.dtype, op);
    return submit({.call = call_of(SegmentOp::Reduce, buffer, op, root),
                   .root = root,
                   .out = rank() == root ? buffer : Buffer{},
                   .in = buffer});
}

Work ProcessGroup::gather(Buffer output, ConstBuffer input, int root) {
    const Entry entry(*this, "gather");
    entry.require_memory(input);
    entry.require_root(root);
    if (rank() == root) {
        entry.require_memory(output);
        entry.require_n_times("output", output, input);
    }
    return submit({.call = call_of(SegmentOp::Gather, input, ReduceOp::Sum, root),
                   .root = root,
                   .out = rank() == root ? output : Buffer{},
                   .in = input});
}

Work ProcessGroup::scatter(Buffer output, ConstBuffer input, int root) {
    const Entry entry(*this, "scatter");
    entry.require_memory(output);
    entry.require_root(root);
    if (rank() == root) {
        entry.require_memory(input);
        entry.require_n_times("input", input, output);
    }
    return submit({.call = call_of(SegmentOp::Scatter, output, ReduceOp::Sum, root),
                   .root = root,
                   .out = output,
                   .in = rank() == root ? input : ConstBuffer{}});
}

Work ProcessGroup::all_to_all(Buffer output, ConstBuffer input) {
    const Entry entry(*this, "all_to_all");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_slices(output, input);
    ConstBuffer each = input;
    each.count /= static_cast<std::size_t>(size());
    return submit({.call = call_of(SegmentOp::AllToAll, each), .out = output, .in = input});
}

Work ProcessGroup::all_gather_v(Buffer output, ConstBuffer input, Counts counts) {
    const Entry entry(*this, "all_gather_v");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_own_slice("output", output, input, counts);
    return submit({.call = call_of(SegmentOp::AllGather, output, ReduceOp::Sum, kUnevenMark),
                   .out = output,
                   .in = input,
                   .received = std::move(counts)});
}

Work ProcessGroup::reduce_scatter_v(Buffer output, ConstBuffer input, Counts counts, ReduceOp op) {
    const Entry entry(*this, "reduce_scatter_v");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_own_slice("input", input, output, counts);
    entry.require_reducible(input.dtype, op);
    return submit({.call = call_of(SegmentOp::ReduceScatter, input, op, kUnevenMark),
                   .out = output,
                   .in = input,
                   .sent = std::move(counts)});
}

Work ProcessGroup::all_to_all_v(Buffer output, Counts received, ConstBuffer input, Counts sent) {
    const Entry entry(*this, "all_to_all_v");
    entry.require_memory(output);
    entry.require_memory(input);
    entry.require_same_type(input, output);
    entry.require_counts("output", output, received);
    entry.require_counts("input", input, sent);
    entry.require_apart(output, input);
    // Without the length, which differs between ranks.
    return submit({.call = {.root = kUnevenMark, .operation = SegmentOp::AllToAll, .dtype = input.dtype},
                   .out = output,
                   .in = input,
                   .received = std::move(received),
                   .sent = std::move(sent)});
}

Work ProcessGroup::send(ConstBuffer buffer, int to) {
    const Entry entry(*this, "send");
    entry.require_alone();
    entry.require_memory(buffer);
    entry.require_peer(to);
    return submit({.call = call_of(SegmentOp::Send, buffer, ReduceOp::Sum, to), .root = to, .in = buffer});
}

Work ProcessGroup::recv(Buffer buffer, int from) {
    const Entry entry(*this, "recv");
    entry.require_alone();
    entry.require_memory(buffer);
    entry.require_peer(from);
    return submit(
        {.call = call_of(SegmentOp::Recv, buffer, ReduceOp::Sum, from), .root = from, .out = buffer});
}

Work ProcessGroup::batch_send_recv(std::vector<Message> messages) {
    const Entry entry(*this, "batch_send_recv");
    entry.require_alone();
    std::size_t bytes = 0;
    for (const Message& one : messages) {
        entry.require_memory(one.buffer);
        entry.require_peer(one.peer);
        bytes += one.buffer.bytes();
    }
    if (messages.empty()) return {};
    return submit({.call = {.bytes = bytes, .root = kBatchMark, .operation = SegmentOp::Send},
                   .messages = std::move(messages)});
}

Work ProcessGroup::barrier() {
    const Entry entry(*this, "barrier");
    entry.require_alone();
    return submit({.call = {.operation = SegmentOp::Barrier}});
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view mine) {
    const Entry entry(*this, "all_gather_bytes");
    entry.require_alone();
    ++all_rank_calls_;
    return do_all_gather_bytes(mine, kBytesMark);
}

std::span<std::byte> ProcessGroup::allocate_shared(std::size_t bytes) {
    const Entry entry(*this, "allocate_shared");
    entry.require_alone();
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
        "outlive them: declare it before the model, and reset it after; Epochs::run and Recovery::run end their groups, so "
        "call inside of them what needs a group");
}

std::unique_ptr<ProcessGroup> ProcessGroup::split(int color, int key) {
    const Entry entry(*this, "split");
    entry.require_alone();
    const std::vector<SplitRequest> requests = decode(do_all_gather_bytes(encode({color, key}), kSplitMark));
    SubGroup part{.color = color, .key = key, .members = {}};
    if (color >= 0) part.members = members_of(color, requests);
    return do_split(part);
}

std::unique_ptr<ProcessGroup> ProcessGroup::create_part(const std::vector<int>& ranks,
                                                        std::string_view name) {
    const Entry entry(*this, "create_part");
    entry.require_alone();
    entry.require_members(ranks);
    return do_create_part({ranks.begin(), ranks.end()},
                          fmt::format("'{}' of ranks {}", name, fmt::join(ranks, ", ")));
}

std::unique_ptr<ProcessGroup> ProcessGroup::do_create_part(const std::vector<std::uint32_t>&,
                                                           const std::string&) {
    throw InvalidInput(fmt::format(
        "create_part: backend {} makes groups only together with all ranks: use split", identity_.backend));
}

Work ProcessGroup::launch_graph(const std::function<void()>& launch) {
    require_own_process("launch_graph");
    launch();
    return {};
}

}  // namespace ddp
