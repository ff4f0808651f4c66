#include <memory>
#include <span>
#include <unordered_map>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/device_average.h"
#include "ddp/ddp.h"

namespace ddp {
namespace {

FinishReduction start_on_device(ProcessGroup& group, const Buffer& bucket, const Buffer& compressed) {
    return [&group, bucket, compressed,
            work = cuda::start_compressed_average(group, bucket, compressed)]() mutable {
        work.wait();
        cuda::finish_compressed(group, compressed, bucket);
    };
}

/// Shared memory for compressed buckets, by the place of the bucket. Buckets come in the same order on all
/// ranks, so the collective allocation matches. A hook may serve several groups, one after the other: memory
/// goes with its group, and a bucket of the next one may lie at the same place.
class Scratch {
  public:
    std::byte* of(ProcessGroup& group, const Buffer& bucket) {
        Place& place = places_[bucket.data];
        const std::size_t bytes = bucket.count * size_of(DType::F16);
        if (place.group.is_gone() || place.memory.size() < bytes)
            place = {group, group.allocate_shared(bytes)};
        return place.memory.data();
    }

  private:
    struct Place {
        BorrowedGroup group;
        std::span<std::byte> memory;
    };
    std::unordered_map<const void*, Place> places_;
};

CommunicationHook compression(DType type) {
    return [type, scratch = std::make_shared<Scratch>()](ProcessGroup& group,
                                                         const GradientBucket& bucket) -> FinishReduction {
        if (bucket.buffer.dtype != DType::F32)
            return [work = group.all_reduce(bucket.buffer, ReduceOp::Avg)]() mutable { work.wait(); };
        const Buffer half{scratch->of(group, bucket.buffer), bucket.buffer.count, type, group.device()};
        if (group.device().kind == Device::Kind::Cuda) return start_on_device(group, bucket.buffer, half);
        const device::ElementType element = *cuda::element_type(type);
        const Buffer whole = bucket.buffer;
        device::round_floats(static_cast<const float*>(whole.data), element, half.data, half.count);
        return [work = group.all_reduce(half, ReduceOp::Avg), element, half, whole]() mutable {
            work.wait();
            device::to_floats(element, half.data, static_cast<float*>(whole.data), half.count);
        };
    };
}

}  // namespace

CommunicationHook bf16_compression() { return compression(DType::BF16); }
CommunicationHook fp16_compression() { return compression(DType::F16); }

}  // namespace ddp
