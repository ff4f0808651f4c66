#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "compute.h"
#include "ddp/cuda/gpu.h"
#include "ddp/cuda/memory.h"
#include "ddp/cuda/module.h"

namespace train {

/// The kernels of train_kernels.cpp for one element type, queued on one stream. Nothing blocks but what says
/// so. Not thread-safe.
class LayerKernels {
  public:
    /// Makes the device current. Throws ddp::Error, as every launch does that is refused.
    LayerKernels(std::shared_ptr<const ddp::cuda::Gpu> gpu, ddp::cuda::Stream stream, ddp::DType type);

    /// Rows without gaps, in some order (null: as they are), rounded into the rows of `to`.
    void stage(const float* from, const std::uint32_t* order, const Matrix& to) const;
    void stage_labels(const BatchSource& from, std::int32_t* to) const;

    /// Where the score is added to: row r of a batch to slot r % kSlots, always in the same order.
    static constexpr std::size_t kSlots = 8192;
    void cross_entropy(const Compute::CrossEntropy& loss, double* losses, unsigned long long* hits) const;

    /// output = activation(output + bias)
    void add_bias(const Matrix& output, const void* bias, Activation activation) const;
    /// delta = 0 where the output, a matrix of the same shape, is.
    void relu_gradient(const Matrix& delta, const void* output) const;
    /// The sums of the columns. Allocates, which blocks, when a width is new.
    void bias_gradient(const Matrix& delta, void* to);

  private:
    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    ddp::cuda::Module module_;
    ddp::cuda::Function stage_, stage_labels_, cross_entropy_, add_bias_, relu_gradient_, column_sums_,
        sum_parts_;
    std::map<std::size_t, ddp::cuda::DeviceMemory> parts_;  ///< sums of runs of rows, by columns
};

}  // namespace train
