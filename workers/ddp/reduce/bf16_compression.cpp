#include <memory>
#include <unordered_map>

#include "ddp/cuda/device_average.h"
#include "ddp/cuda/numbers.h"
#include "ddp/ddp.h"

namespace ddp {
namespace {

void compress(const Buffer& from, device::Bf16* to) {
    const auto* values = static_cast<const float*>(from.data);
    for (std::size_t i = 0; i < from.count; ++i) device::round_to(values[i], to[i]);
}

void expand(const device::Bf16* from, const Buffer& to) {
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

/// Shared memory for the compressed buckets, by the place of the bucket. Buckets come in the same order on
/// all ranks, so the collective allocation is in step. The layout changes once, so there are at most two
/// sets.
class Scratch {
  public:
    device::Bf16* of(ProcessGroup& group, const Buffer& bucket) {
        Room& room = rooms_[bucket.data];
        if (room.count < bucket.count)
            room = {reinterpret_cast<device::Bf16*>(
                        group.allocate_shared(bucket.count * sizeof(device::Bf16)).data()),
                    bucket.count};
        return room.values;
    }

  private:
    struct Room {
        device::Bf16* values = nullptr;
        std::size_t count = 0;
    };
    std::unordered_map<const void*, Room> rooms_;
};

}  // namespace

CommunicationHook bf16_compression() {
    return [scratch = std::make_shared<Scratch>()](ProcessGroup& group,
                                                   const GradientBucket& bucket) -> FinishReduction {
        if (bucket.buffer.dtype != DType::F32)
            return [work = group.all_reduce(bucket.buffer, ReduceOp::Avg)]() mutable { work.wait(); };
        if (group.device().kind == Device::Kind::Cuda) {
            const Buffer room{scratch->of(group, bucket.buffer), bucket.buffer.count, DType::BF16,
                              group.device()};
            return start_on_device(group, bucket.buffer, room);
        }
        device::Bf16* const compressed = scratch->of(group, bucket.buffer);
        compress(bucket.buffer, compressed);
        Work work = group.all_reduce({compressed, bucket.buffer.count, DType::BF16, {}}, ReduceOp::Avg);
        return [work, compressed, target = bucket.buffer]() mutable {
            work.wait();
            expand(compressed, target);
        };
    };
}

}  // namespace ddp
