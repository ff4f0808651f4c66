#include "ddp/cuda/device_average.h"

#include "ddp/cuda/cast.h"

namespace ddp::cuda {
namespace {

void cast(const ProcessGroup& group, const Buffer& from, const Buffer& to, float scale) {
    scale_cast(*Gpu::of(group.device().index), from, to, scale, static_cast<Stream>(group.stream()));
}

/// True when a pass of libddp divides before the sum.
bool divides_first(const ProcessGroup& group, DType type) {
    return group.shared_memory_is_symmetric() && has_kernels(type);
}
float share_of_one(const ProcessGroup& group) { return 1.0F / static_cast<float>(group.size()); }

/// With one rank the sum is the average, and in place no work at all; for an average NCCL would run a kernel
/// over the buffer that multiplies by 1.
bool is_alone(const ProcessGroup& group) { return group.size() == 1; }

}  // namespace

Work start_average(ProcessGroup& group, const Buffer& buffer) {
    if (is_alone(group)) return group.all_reduce(buffer, ReduceOp::Sum);
    if (!divides_first(group, buffer.dtype)) return group.all_reduce(buffer, ReduceOp::Avg);
    cast(group, buffer, buffer, share_of_one(group));
    return group.all_reduce(buffer, ReduceOp::Sum);
}

Work start_compressed_average(ProcessGroup& group, const Buffer& buffer, const Buffer& compressed) {
    const bool first = is_alone(group) || divides_first(group, compressed.dtype);
    cast(group, buffer, compressed, first ? share_of_one(group) : 1);
    return group.all_reduce(compressed, first ? ReduceOp::Sum : ReduceOp::Avg);
}

void finish_compressed(ProcessGroup& group, const Buffer& compressed, const Buffer& buffer) {
    cast(group, compressed, buffer, 1);
}

}  // namespace ddp::cuda
