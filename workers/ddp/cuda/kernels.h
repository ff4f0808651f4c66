#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ddp/cuda/steps.h"

/// The kernels of libddp. Every call puts one launch on `stream`, of `blocks` blocks (Gpu::grid_for) where it
/// has that parameter, and returns whether it was accepted. All memory is device memory of any alignment (16
/// bytes is fast), and must live until the launch is done. Several arrays share a launch as a batch in the
/// kernel's arguments: nothing is copied to the device first, and a captured launch keeps its own.
namespace ddp::device {

/// The arrays of a list that share one launch; with the other arguments at most 4 KiB, the limit of every
/// driver.
template <class Array, unsigned most>
struct Batch {
    static constexpr unsigned kMost = most;
    unsigned count = 0;
    Array arrays[most];
};

/// Sums are computed over fixed stretches of an array, each by one warp; this is their number.
DDP_BOTH inline std::uint32_t stretches_of(std::uint64_t count) {
    constexpr std::uint64_t kShortest = 4096, kMost = 1024;
    const std::uint64_t stretches = (count + kShortest - 1) / kShortest;
    return static_cast<std::uint32_t>(stretches < kMost ? stretches : kMost);
}

struct GradientArray {
    const void* values;
    std::uint64_t count;
    ElementType type;
    std::uint32_t first_stretch;  ///< index among the stretches of all arrays
};
using GradientBatch = Batch<GradientArray, 160>;

/// A parameter, its gradient and its optimizer state.
struct ParameterArray {
    float* value;
    void* gradient;
    void* copy;              ///< in low precision; null without one
    float* states[2];        ///< the velocity (null without momentum), or both averages of AdamW
    Correction* correction;  ///< for AdamW; null for SGD
    std::uint64_t count;
    ElementType gradient_type, copy_type;  ///< a copy is never float32
};
using ParameterBatch = Batch<ParameterArray, 60>;

enum class Rule : std::uint32_t { Sgd, AdamW };

/// to[i] = from[i] * scale, rounded once to nearest even. In place when both are the same array; any other
/// overlap is an error.
struct Cast {
    const void* from;
    ElementType from_type;
    void* to;
    ElementType to_type;
    std::uint64_t count;
    float scale;
};
cudaError_t scale_cast(const Cast& cast, unsigned blocks, cudaStream_t stream);

/// Sets scale->found_non_finite when an element is infinite or NaN; never clears it.
cudaError_t find_non_finite(const GradientBatch& batch, GradScale* scale, unsigned blocks,
                            cudaStream_t stream);
cudaError_t update_scale(GradScale* scale, GradScaleRules rules, cudaStream_t stream);

/// sums[i] = the sum of squares of stretch i, for the stretches of the batch; `blocks` from
/// Gpu::grid_for_rows.
cudaError_t sum_squares(const GradientBatch& batch, double* sums, unsigned blocks, cudaStream_t stream);
/// Computes the clipping factor from the sums of all stretches. `scale` may be null.
cudaError_t update_clip(GradClip* clip, const double* sums, std::uint64_t stretches, const GradScale* scale,
                        cudaStream_t stream);

/// Computes the factors of a step, once before its batches.
cudaError_t begin_step(Rule rule, StepScalars* scalars, const Rescaling& rescaling, cudaStream_t stream);
/// Updates the corrections of a batch's parameters, before its step.
cudaError_t begin_parameters(const ParameterBatch& batch, const StepScalars* scalars,
                             const Rescaling& rescaling, cudaStream_t stream);
cudaError_t step(Rule rule, const ParameterBatch& batch, const StepScalars* scalars, bool zero_gradients,
                 unsigned blocks, cudaStream_t stream);
cudaError_t set_learning_rate(StepScalars* scalars, double rate, cudaStream_t stream);

}  // namespace ddp::device
