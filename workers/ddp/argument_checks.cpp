#include "ddp/argument_checks.h"

#include <fmt/core.h>

#include "ddp/kernels.h"

namespace ddp {

namespace {

// The messages are made only when they are thrown: formatting one takes longer than a small collective.

void require_same_type(const char* call, const Buffer& one, const Buffer& other) {
    if (one.dtype == other.dtype) return;
    throw InvalidInput(
        fmt::format("{}: one buffer is {}, the other {}", call, name_of(one.dtype), name_of(other.dtype)));
}

}  // namespace

void require_buffer(const char* call, const Buffer& buffer) {
    if (buffer.data != nullptr || buffer.count == 0) return;
    throw InvalidInput(fmt::format("{}: the buffer is null", call));
}

void require_memory_of(const char* backend, const char* call, const Buffer& buffer, Device device, int rank) {
    require_buffer(call, buffer);
    if (buffer.device == device) return;
    const std::string where = buffer.device.kind == Device::Kind::Cpu
                                  ? "is in host memory"
                                  : fmt::format("lies on CUDA device {}", buffer.device.index);
    throw InvalidInput(fmt::format("{}: rank {}'s {} backend takes memory of CUDA device {}, the buffer {}",
                                   call, rank, backend, device.index, where));
}

void require_reducible(const char* call, const Buffer& buffer, ReduceOp op) {
    if (cpu::is_reducible(buffer.dtype, op)) return;
    throw InvalidInput(fmt::format("{}: no {} of {} buffers", call, name_of(op), name_of(buffer.dtype)));
}

void require_root(const char* call, int root, int size) {
    if (root >= 0 && root < size) return;
    throw InvalidInput(fmt::format("{}: root {} is not a rank of 0-{}", call, root, size - 1));
}

void require_peer(const char* call, int peer, int rank, int size) {
    if (peer < 0 || peer >= size)
        throw InvalidInput(fmt::format("{}: peer {} is not a rank of 0-{}", call, peer, size - 1));
    if (peer == rank) throw InvalidInput(fmt::format("{}: rank {} is this rank itself", call, peer));
}

void require_n_times(const char* call, const char* large_name, const Buffer& large, const Buffer& small,
                     int n) {
    require_same_type(call, small, large);
    const std::size_t needed = small.count * static_cast<std::size_t>(n);
    if (large.count == needed) return;
    throw InvalidInput(fmt::format("{}: {} has {} elements, {} ranks of {} need {}", call, large_name,
                                   large.count, n, small.count, needed));
}

void require_slices(const char* call, const Buffer& output, const Buffer& input, int n) {
    require_same_type(call, input, output);
    if (output.count != input.count) {
        throw InvalidInput(
            fmt::format("{}: output has {} elements, input {}", call, output.count, input.count));
    }
    if (input.count % static_cast<std::size_t>(n) == 0) return;
    throw InvalidInput(fmt::format("{}: {} elements are not {} equal slices", call, input.count, n));
}

}  // namespace ddp
