#include <bit>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "ddp/cuda/device_average.h"
#include "ddp/reducer.h"

namespace ddp {
namespace {

/// Rounds to nearest even. NaN stays NaN: rounding its low bits up could turn it into infinity.
std::uint16_t to_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return static_cast<std::uint16_t>((is_nan ? bits | 0x400000 : rounded) >> 16);
}

float from_bf16(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

void compress(const Buffer& from, std::uint16_t* to) {
    const auto* values = static_cast<const float*>(from.data);
    for (std::size_t i = 0; i < from.count; ++i) to[i] = to_bf16(values[i]);
}

void expand(const std::uint16_t* from, const Buffer& to) {
    auto* values = static_cast<float*>(to.data);
    for (std::size_t i = 0; i < to.count; ++i) values[i] = from_bf16(from[i]);
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
    std::uint16_t* of(ProcessGroup& group, const Buffer& bucket) {
        Room& room = rooms_[bucket.data];
        if (room.count < bucket.count)
            room = {reinterpret_cast<std::uint16_t*>(group.allocate_shared(bucket.count * 2).data()),
                    bucket.count};
        return room.values;
    }

  private:
    struct Room {
        std::uint16_t* values = nullptr;
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
        std::uint16_t* const compressed = scratch->of(group, bucket.buffer);
        compress(bucket.buffer, compressed);
        Work work = group.all_reduce({compressed, bucket.buffer.count, DType::BF16, {}}, ReduceOp::Avg);
        return [work, compressed, target = bucket.buffer]() mutable {
            work.wait();
            expand(compressed, target);
        };
    };
}

}  // namespace ddp
