#include "reference_reduction.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tests/support/half_float.h"

namespace reference {

using ddp::DType;
using ddp::ReduceOp;
using half_float::from_bf16;
using half_float::from_f16;
using half_float::to_bf16;
using half_float::to_f16;

namespace {

template <class Stored, class Wide, class Widen, class Narrow>
Bytes reduce_as(const std::vector<Bytes>& inputs, ReduceOp op, Widen widen, Narrow narrow) {
    Bytes out(inputs[0].size());
    for (std::size_t at = 0; at + sizeof(Stored) <= out.size(); at += sizeof(Stored)) {
        Wide result{};
        for (std::size_t r = 0; r < inputs.size(); ++r) {
            Stored stored;
            std::memcpy(&stored, inputs[r].data() + at, sizeof stored);
            const Wide value = widen(stored);
            if (r == 0) result = value;
            else if (op == ReduceOp::Max) result = std::max(result, value);
            else if (op == ReduceOp::Min) result = std::min(result, value);
            else if (op == ReduceOp::Product) result = static_cast<Wide>(result * value);
            else result = static_cast<Wide>(result + value);
        }
        if (op == ReduceOp::Avg) result = static_cast<Wide>(result / static_cast<Wide>(inputs.size()));
        const Stored stored = narrow(result);
        std::memcpy(out.data() + at, &stored, sizeof stored);
    }
    return out;
}

template <class Stored>
Bytes reduce_plain(const std::vector<Bytes>& inputs, ReduceOp op) {
    const auto same = [](Stored value) { return value; };
    return reduce_as<Stored, Stored>(inputs, op, same, same);
}

bool wraps(ReduceOp op) { return op != ReduceOp::Max && op != ReduceOp::Min; }

/// Random numbers by splitmix64; std::mt19937_64 would be most of the time of many tests.
class Dice {
  public:
    explicit Dice(std::uint64_t seed) : state_(seed) {}
    std::uint64_t operator()() {
        std::uint64_t bits = state_ += 0x9e3779b97f4a7c15;
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
        return bits ^ (bits >> 31);
    }

  private:
    std::uint64_t state_;
};

template <class T, class Draw>
void fill(Bytes& bytes, Draw draw) {
    for (std::size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
        const T value = static_cast<T>(draw());
        std::memcpy(bytes.data() + at, &value, sizeof value);
    }
}

}  // namespace

Bytes random_values(DType type, std::size_t count, unsigned seed) {
    Bytes bytes(count * ddp::size_of(type));
    Dice dice(seed);
    // Magnitudes from 2^-20 to 2^20: another order of additions gives other bits.
    const auto real = [&] {
        const double mantissa = static_cast<double>(dice() >> 11) * 0x1p-53 * 2 - 1;
        return mantissa * 0x1p-20 * static_cast<double>(std::uint64_t{1} << dice() % 41);
    };
    switch (type) {
        case DType::F32: fill<float>(bytes, real); break;
        case DType::F64: fill<double>(bytes, real); break;
        case DType::I32: fill<std::uint32_t>(bytes, dice); break;
        case DType::I64: fill<std::uint64_t>(bytes, dice); break;
        case DType::BF16:
            fill<std::uint16_t>(bytes, [&] { return to_bf16(static_cast<float>(real())); });
            break;
        case DType::F16:
            // Includes subnormal numbers; sums of a few values do not overflow.
            fill<std::uint16_t>(bytes, [&] { return to_f16(static_cast<float>(real() * 0.005)); });
            break;
        case DType::U8:
        case DType::I8: return random_bytes(bytes.size(), seed);
        case DType::Bool: fill<std::uint8_t>(bytes, [&] { return dice() % 2; }); break;
    }
    return bytes;
}

Bytes random_bytes(std::size_t bytes, unsigned seed) {
    Bytes values(bytes);
    fill<std::uint8_t>(values, Dice(seed));
    return values;
}

Bytes reduce(const std::vector<Bytes>& inputs, DType type, ReduceOp op) {
    switch (type) {
        case DType::F32: return reduce_plain<float>(inputs, op);
        case DType::F64: return reduce_plain<double>(inputs, op);
        case DType::I32:
            return wraps(op) ? reduce_plain<std::uint32_t>(inputs, op)
                             : reduce_plain<std::int32_t>(inputs, op);
        case DType::I64:
            return wraps(op) ? reduce_plain<std::uint64_t>(inputs, op)
                             : reduce_plain<std::int64_t>(inputs, op);
        case DType::BF16: return reduce_as<std::uint16_t, float>(inputs, op, from_bf16, to_bf16);
        case DType::F16: return reduce_as<std::uint16_t, float>(inputs, op, from_f16, to_f16);
        case DType::I8:
            if (!wraps(op)) return reduce_plain<std::int8_t>(inputs, op);
            [[fallthrough]];
        case DType::U8:
        case DType::Bool: return reduce_plain<std::uint8_t>(inputs, op);
    }
    return {};
}

}  // namespace reference
