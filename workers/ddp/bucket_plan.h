#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ddp/types.h"

namespace ddp {

/// What the plan has to know about one gradient.
struct GradientSpec {
    std::size_t bytes = 0;
    DType dtype = DType::F32;
    Device device = {};
};

/// A bucket is closed by the gradient that brings it to its limit, so it may exceed it by that gradient.
/// The first bucket of each (dtype, device) is small so that the first reduction starts early.
struct BucketLimits {
    std::size_t first_bytes = std::size_t{1} << 20;
    std::size_t cap_bytes = std::size_t{25} << 20;
    bool operator==(const BucketLimits&) const = default;
};

/// Buckets in the order in which they are reduced; each lists the indices of its gradients in memory order.
/// Every gradient is in exactly one bucket; one bucket holds one dtype and one device.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// The plan before anything is known about the order of arrival: PyTorch's, that is, filled in the order of
/// the parameters and then reversed, because a backward pass reaches the last layer first. (The small bucket
/// therefore holds the first layers, whose gradients come last and are waited for.)
BucketPlan plan_buckets(std::span<const GradientSpec> gradients, const BucketLimits& limits);

/// The plan for an order of arrival that was seen, first to last. `arrival` is a permutation of all indices
/// (a bug of the caller otherwise).
BucketPlan plan_buckets(std::span<const GradientSpec> gradients, std::span<const std::size_t> arrival,
                        const BucketLimits& limits);

}  // namespace ddp
