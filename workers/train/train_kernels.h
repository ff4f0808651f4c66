#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ddp/cuda/numbers.h"

/// The kernels of train beside its products: one launch each on `stream`, of so many blocks. All memory is
/// the device's, of one element type but for what names its own; rows are `stride` elements apart.
namespace train::kernels {

struct Rows {
    void* data;
    std::uint64_t rows, columns, stride;
};

/// Where a launch goes.
struct Place {
    ddp::device::ElementType type;
    unsigned blocks;
    cudaStream_t stream;
};

/// Float32 rows without gaps, in some order (null: as they are), rounded into `to`.
cudaError_t stage(const Place& place, const float* from, const std::uint32_t* order, const Rows& to);
cudaError_t stage_labels(const Place& place, const std::int32_t* from, const std::uint32_t* order,
                         std::int32_t* to, std::uint64_t count);

/// Blocks are for rows. Row r adds its loss, and whether its label won, to slot r % slots: sums do not depend
/// on how many threads there are. `batches`: see Compute::CrossEntropy. `scale`: a number of the device's;
/// null: 1.
struct CrossEntropy {
    Rows logits, delta;
    const std::int32_t* labels;
    std::uint64_t batches;
    const float* scale;
    double* losses;
    unsigned long long* hits;
    std::uint64_t slots;
};
cudaError_t cross_entropy(const Place& place, const CrossEntropy& loss);

/// output = output + bias, 0 at least with `relu`.
cudaError_t add_bias(const Place& place, const Rows& output, const void* bias, bool relu);
/// delta = 0 where the output, a matrix of the same shape, is.
cudaError_t relu_gradient(const Place& place, const Rows& delta, const void* output);

}  // namespace train::kernels
