#pragma once

#include <cstddef>
#include <vector>

#include "ddp/types.h"

/// Expected results of collectives, computed in the simple way: one element after the other, in rank order.
namespace reference {

using Bytes = std::vector<std::byte>;

/// Values whose float sums depend on the order; no NaN, and integers may wrap when summed.
Bytes random_values(ddp::DType type, std::size_t count, unsigned seed);
Bytes random_bytes(std::size_t bytes, unsigned seed);

Bytes reduce(const std::vector<Bytes>& inputs, ddp::DType type, ddp::ReduceOp op);

}  // namespace reference
