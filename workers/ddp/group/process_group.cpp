#include "ddp/process_group.h"

#include <fmt/core.h>

#include "ddp/group/split.h"
#include "ddp/worker/call.h"

namespace ddp {

namespace {

// The messages are made only when they are thrown: formatting one takes longer than a small collective.

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
    throw InvalidInput(fmt::format("{}: no {} of {} buffers", call, name_of(op), name_of(buffer.dtype)));
}

/// Two equal buffers of n slices that do not overlap.
void require_slices(const char* call, const Buffer& output, const Buffer& input, int n) {
    require_same_type(call, input, output);
    if (output.count != input.count) {
        throw InvalidInput(
            fmt::format("{}: output has {} elements, input {}", call, output.count, input.count));
    }
    if (input.count % static_cast<std::size_t>(n) != 0)
        throw InvalidInput(fmt::format("{}: {} elements are not {} equal slices", call, input.count, n));
    if (share_memory(output, input))
        throw InvalidInput(fmt::format("{}: input and output overlap; they must lie apart", call));
}

}  // namespace

/// Memory of the device that this group works on.
void ProcessGroup::require_memory(const char* call, const Buffer& buffer) const {
    if (buffer.data == nullptr && buffer.count > 0)
        throw InvalidInput(fmt::format("{}: the buffer is null", call));
    if (buffer.device == device()) return;
    const bool is_on_host = buffer.device.kind == Device::Kind::Cpu;
    if (device().kind == Device::Kind::Cpu) {
        if (is_on_host) return;
        throw InvalidInput(
            fmt::format("{}: the {} backend takes host memory, the buffer lies on CUDA device {}", call,
                        seat_.backend, buffer.device.index));
    }
    const std::string where =
        is_on_host ? "is in host memory" : fmt::format("lies on CUDA device {}", buffer.device.index);
    throw InvalidInput(fmt::format("{}: rank {}'s {} backend takes memory of CUDA device {}, the buffer {}",
                                   call, seat_.world_rank, seat_.backend, device().index, where));
}

void ProcessGroup::require_root(const char* call, int root) const {
    if (root >= 0 && root < size()) return;
    throw InvalidInput(fmt::format("{}: root {} is not a rank of 0-{}", call, root, size() - 1));
}

/// Another rank of the group.
void ProcessGroup::require_peer(const char* call, int peer) const {
    if (peer < 0 || peer >= size())
        throw InvalidInput(fmt::format("{}: peer {} is not a rank of 0-{}", call, peer, size() - 1));
    if (peer == rank()) throw InvalidInput(fmt::format("{}: rank {} is this rank itself", call, peer));
}

/// `large` (the call's "input" or "output") has size() times the elements of `small`, and does not overlap
/// it: unless `small` is this rank's slice of it.
void ProcessGroup::require_n_times(const char* call, const char* large_name, const Buffer& large,
                                   const Buffer& small) const {
    const int n = size(), own = rank();
    require_same_type(call, small, large);
    const std::size_t needed = small.count * static_cast<std::size_t>(n);
    if (large.count != needed)
        throw InvalidInput(fmt::format("{}: {} has {} elements, {} ranks of {} need {}", call, large_name,
                                       large.count, n, small.count, needed));
    const auto* const own_slice =
        static_cast<const std::byte*>(large.data) + static_cast<std::size_t>(own) * small.bytes();
    if (small.data == own_slice || !share_memory(large, small)) return;
    throw InvalidInput(fmt::format(
        "{}: input and output overlap; one may be the other's slice {}, this rank's own, or lie apart", call,
        own));
}

Work ProcessGroup::all_reduce(Buffer buffer, ReduceOp op) {
    require_memory("all_reduce", buffer);
    require_reducible("all_reduce", buffer, op);
    return do_all_reduce(buffer, op);
}

Work ProcessGroup::broadcast(Buffer buffer, int root) {
    require_memory("broadcast", buffer);
    require_root("broadcast", root);
    return do_broadcast(buffer, root);
}

Work ProcessGroup::all_gather(Buffer output, Buffer input) {
    require_memory("all_gather", output);
    require_memory("all_gather", input);
    require_n_times("all_gather", "output", output, input);
    return do_all_gather(output, input);
}

Work ProcessGroup::reduce_scatter(Buffer output, Buffer input, ReduceOp op) {
    require_memory("reduce_scatter", output);
    require_memory("reduce_scatter", input);
    require_n_times("reduce_scatter", "input", input, output);
    require_reducible("reduce_scatter", input, op);
    return do_reduce_scatter(output, input, op);
}

Work ProcessGroup::reduce(Buffer buffer, int root, ReduceOp op) {
    require_memory("reduce", buffer);
    require_root("reduce", root);
    require_reducible("reduce", buffer, op);
    return do_reduce(buffer, root, op);
}

Work ProcessGroup::gather(Buffer output, Buffer input, int root) {
    require_memory("gather", input);
    require_root("gather", root);
    if (rank() == root) {
        require_memory("gather", output);
        require_n_times("gather", "output", output, input);
    }
    return do_gather(output, input, root);
}

Work ProcessGroup::scatter(Buffer output, Buffer input, int root) {
    require_memory("scatter", output);
    require_root("scatter", root);
    if (rank() == root) {
        require_memory("scatter", input);
        require_n_times("scatter", "input", input, output);
    }
    return do_scatter(output, input, root);
}

Work ProcessGroup::all_to_all(Buffer output, Buffer input) {
    require_memory("all_to_all", output);
    require_memory("all_to_all", input);
    require_slices("all_to_all", output, input, size());
    return do_all_to_all(output, input);
}

Work ProcessGroup::send(Buffer buffer, int to) {
    require_memory("send", buffer);
    require_peer("send", to);
    return do_send(buffer, to);
}

Work ProcessGroup::recv(Buffer buffer, int from) {
    require_memory("recv", buffer);
    require_peer("recv", from);
    return do_recv(buffer, from);
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view mine) {
    return do_all_gather_bytes(mine, kBytesMark);
}

std::unique_ptr<ProcessGroup> ProcessGroup::split(int color, int key) {
    const std::vector<SplitRequest> requests = decode(do_all_gather_bytes(encode({color, key}), kSplitMark));
    Part part{.color = color, .key = key, .members = {}};
    if (color >= 0) part.members = members_of(color, requests);
    return do_split(part);
}

Work ProcessGroup::launch_graph(const std::function<void()>& launch) {
    launch();
    return {};
}

}  // namespace ddp
