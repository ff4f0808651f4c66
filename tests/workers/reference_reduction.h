#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <vector>

#include "ddp/types.h"

/// Expected results of collectives, computed in the simple way: one element after the other, in rank order.
namespace reference {

/// Compared by memcmp: std::vector would compare byte by byte, in the tests' code, which is not optimised.
struct Bytes : std::vector<std::byte> {
    using vector::vector;
    friend bool operator==(const Bytes& one, const Bytes& other) {
        return one.size() == other.size() &&
               (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
    }
};

inline constexpr ddp::DType kTypes[] = {ddp::DType::F32, ddp::DType::F64,  ddp::DType::I32,
                                        ddp::DType::I64, ddp::DType::BF16, ddp::DType::F16,
                                        ddp::DType::U8,  ddp::DType::I8,   ddp::DType::Bool};
static_assert(std::size(kTypes) == ddp::kDTypes);

/// Values whose float sums depend on the order; no NaN, and integers may wrap when summed.
Bytes random_values(ddp::DType type, std::size_t count, unsigned seed);
Bytes random_bytes(std::size_t bytes, unsigned seed);

/// All parts in a row, and part `index` of such a row.
inline Bytes joined(const std::vector<Bytes>& parts) {
    Bytes whole;
    for (const Bytes& part : parts) whole.insert(whole.end(), part.begin(), part.end());
    return whole;
}
template <std::integral Index>
Bytes slice(const Bytes& whole, Index index, std::size_t each) {
    const auto begin = whole.begin() + static_cast<long>(index) * static_cast<long>(each);
    return {begin, begin + static_cast<long>(each)};
}

Bytes reduce(const std::vector<Bytes>& inputs, ddp::DType type, ddp::ReduceOp op);

}  // namespace reference
