#include <memory>
#include <span>
#include <unordered_map>

#include "ddp/cuda/device_average.h"
#include "ddp/cuda/numbers.h"
#include "ddp/ddp.h"

namespace ddp {
namespace {

template <class Half>
void compress(const Buffer& from, Half* to) {
    const auto* values = static_cast<const float*>(from.data);
    for (std::size_t i = 0; i < from.count; ++i) device::round_to(values[i], to[i]);
}

template <class Half>
void expand(const Half* from, const Buffer& to) {
    auto* values = static_cast<float*>(to.data);
    for (std::size_t i = 0; i < to.count; ++i) values[i] = device::to_float(from[i]);
}

FinishReduction start_on_device(ProcessGroup& group, const Buffer& bucket, const Buffer& compressed) {
    return [&group, bucket, compressed,
            work = cuda::start_compressed_average(group, bucket, compressed)]() mutable {
        work.wait();
        cuda::finish_compressed(group, compressed, bucket);
    };
}

/// Shared memory for compressed buckets, by the place of the bucket. Buckets come in the same order on all
/// ranks, so the collective allocation matches. The layout changes once, so there are at most two sets.
class Scratch {
  public:
    std::byte* of(ProcessGroup& group, const Buffer& bucket) {
        std::span<std::byte>& memory = buffers_[bucket.data];
        const std::size_t bytes = bucket.count * size_of(DType::F16);
        if (memory.size() < bytes) memory = group.allocate_shared(bytes);
        return memory.data();
    }

  private:
    std::unordered_map<const void*, std::span<std::byte>> buffers_;
};

template <class Half>
CommunicationHook compression(DType type) {
    return [type, scratch = std::make_shared<Scratch>()](ProcessGroup& group,
                                                         const GradientBucket& bucket) -> FinishReduction {
        if (bucket.buffer.dtype != DType::F32)
            return [work = group.all_reduce(bucket.buffer, ReduceOp::Avg)]() mutable { work.wait(); };
        const Buffer half{scratch->of(group, bucket.buffer), bucket.buffer.count, type, group.device()};
        if (group.device().kind == Device::Kind::Cuda) return start_on_device(group, bucket.buffer, half);
        auto* const compressed = static_cast<Half*>(half.data);
        compress(bucket.buffer, compressed);
        return [work = group.all_reduce(half, ReduceOp::Avg), compressed, target = bucket.buffer]() mutable {
            work.wait();
            expand(compressed, target);
        };
    };
}

}  // namespace

CommunicationHook bf16_compression() { return compression<device::Bf16>(DType::BF16); }
CommunicationHook fp16_compression() { return compression<device::F16>(DType::F16); }

}  // namespace ddp
