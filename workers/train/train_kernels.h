#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ddp/cuda/numbers.h"

/// The kernels of train beside matrix products: each call puts one launch on the config's stream. Pointers
/// are device memory of `LaunchConfig::type`, unless a field states another type; rows are `stride` elements
/// apart.
namespace train::kernels {

struct Rows {
    void* data;
    std::uint64_t rows, columns, stride;
};

/// Element type, number of blocks and stream of a launch.
struct LaunchConfig {
    ddp::device::ElementType type;
    unsigned blocks;
    cudaStream_t stream;
};

/// Rounds contiguous float32 rows into `to`, in the order of `order` (null: unchanged).
cudaError_t stage(const LaunchConfig& config, const float* from, const std::uint32_t* order, const Rows& to);
cudaError_t stage_labels(const LaunchConfig& config, const std::int32_t* from, const std::uint32_t* order,
                         std::int32_t* to, std::uint64_t count);

/// `blocks` are for rows. Row r adds its loss, and whether its label won, to slot r % slots: sums do not
/// depend on the number of threads. `batches`: see Compute::CrossEntropy. `scale`: a device address; null: 1.
struct CrossEntropy {
    Rows logits, delta;
    const std::int32_t* labels;
    std::uint64_t batches;
    const float* scale;
    double* losses;
    unsigned long long* hits;
    std::uint64_t slots;
};
cudaError_t cross_entropy(const LaunchConfig& config, const CrossEntropy& loss);

/// output = output + bias, at least 0 with `relu`.
cudaError_t add_bias(const LaunchConfig& config, const Rows& output, const void* bias, bool relu);
/// delta = 0 where the output, a matrix of the same shape, is 0.
cudaError_t relu_gradient(const LaunchConfig& config, const Rows& delta, const void* output);

}  // namespace train::kernels
