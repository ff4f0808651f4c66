#include "tests/support/fake_nccl/reduction.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/support/half_float.h"

namespace fake {

using ddp::nccl::Op;
using ddp::nccl::Type;

namespace {

template <class T>
T combined(T a, T b, Op op) {
    switch (op) {
        case Op::Sum:
        case Op::Avg:
            // Integer sums and products wrap.
            if constexpr (std::is_integral_v<T>) {
                using Unsigned = std::make_unsigned_t<T>;
                return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
            }
            return static_cast<T>(a + b);
        case Op::Prod:
            if constexpr (std::is_integral_v<T>) {
                using Unsigned = std::make_unsigned_t<T>;
                return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
            }
            return static_cast<T>(a * b);
        case Op::Max: return std::max(a, b);
        case Op::Min: return std::min(a, b);
    }
    return a;
}

/// out[i] = the reduction over all ranks of element first + i. Stored as one type, computed in another.
template <class Stored, class Wide, class Widen, class Narrow>
void reduce_by(const Ranks& ranks, std::size_t first, std::size_t count, Op op, void* out, Widen widen,
               Narrow narrow) {
    for (std::size_t i = 0; i < count; ++i) {
        Wide value{};
        for (int rank = 0; rank < ranks.count; ++rank) {
            Stored theirs;
            std::memcpy(&theirs, ranks.meeting.area(rank) + (first + i) * sizeof(Stored), sizeof(Stored));
            value = rank == 0 ? widen(theirs) : combined(value, widen(theirs), op);
        }
        if (op == Op::Avg) value = static_cast<Wide>(value / static_cast<Wide>(ranks.count));
        const Stored stored = narrow(value);
        std::memcpy(static_cast<std::byte*>(out) + i * sizeof(Stored), &stored, sizeof(Stored));
    }
}
template <class T>
void reduce_as(const Ranks& ranks, std::size_t first, std::size_t count, Op op, void* out) {
    const auto same = [](T value) { return value; };
    reduce_by<T, T>(ranks, first, count, op, out, same, same);
}

}  // namespace

std::size_t bytes_of(Type type) {
    switch (type) {
        case Type::Int8:
        case Type::UInt8: return 1;
        case Type::Float16:
        case Type::BFloat16: return 2;
        case Type::Int32:
        case Type::UInt32:
        case Type::Float32: return 4;
        case Type::Int64:
        case Type::UInt64:
        case Type::Float64: return 8;
    }
    return 0;
}

void reduce(const Ranks& ranks, Type type, std::size_t first, std::size_t count, Op op, void* out) {
    switch (type) {
        case Type::Int8: return reduce_as<std::int8_t>(ranks, first, count, op, out);
        case Type::UInt8: return reduce_as<std::uint8_t>(ranks, first, count, op, out);
        case Type::Int32: return reduce_as<std::int32_t>(ranks, first, count, op, out);
        case Type::UInt32: return reduce_as<std::uint32_t>(ranks, first, count, op, out);
        case Type::Int64: return reduce_as<std::int64_t>(ranks, first, count, op, out);
        case Type::UInt64: return reduce_as<std::uint64_t>(ranks, first, count, op, out);
        case Type::Float16:
            return reduce_by<std::uint16_t, float>(ranks, first, count, op, out, half_float::from_f16,
                                                   half_float::to_f16);
        case Type::Float32: return reduce_as<float>(ranks, first, count, op, out);
        case Type::Float64: return reduce_as<double>(ranks, first, count, op, out);
        case Type::BFloat16:
            return reduce_by<std::uint16_t, float>(ranks, first, count, op, out, half_float::from_bf16,
                                                   half_float::to_bf16);
    }
}

}  // namespace fake
