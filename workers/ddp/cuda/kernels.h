#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ddp/cuda/steps.h"

/// The kernels of libddp. Every call puts one launch on `stream`, of `blocks` blocks (Gpu::grid_for) where it
/// says so, and returns whether it was accepted; all memory is the device's, of any alignment (16 bytes is
/// fast), and lives until the stream has come past. Arrays of a list go together in batches, which are
/// arguments of the kernel: nothing is brought to the device first, and a captured launch keeps its own.
namespace ddp::device {

/// Of a list, the arrays that one launch takes: with what goes beside them no more than the 4 KiB of
/// arguments that every driver takes.
template <class Array, unsigned most>
struct Batch {
    static constexpr unsigned kMost = most;
    unsigned count = 0;
    Array arrays[most];
};

/// Sums are made of stretches of an array, always of the same ones: so many, each by one warp.
DDP_BOTH inline std::uint32_t stretches_of(std::uint64_t count) {
    constexpr std::uint64_t kShortest = 4096, kMost = 1024;
    const std::uint64_t stretches = (count + kShortest - 1) / kShortest;
    return static_cast<std::uint32_t>(stretches < kMost ? stretches : kMost);
}

struct GradientArray {
    const void* values;
    std::uint64_t count;
    ElementType type;
    std::uint32_t first_stretch;  ///< of all arrays', one after the other
};
using GradientBatch = Batch<GradientArray, 160>;

/// A parameter, its gradient and what belongs to both.
struct ParameterArray {
    float* value;
    void* gradient;
    void* copy;              ///< in low precision; null for none
    float* states[2];        ///< the velocity (null without momentum), or both of AdamW's averages
    Correction* correction;  ///< AdamW's; null for SGD
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
/// Moves the scale (next_scale).
cudaError_t update_scale(GradScale* scale, GradScaleRules rules, cudaStream_t stream);

/// sums[i]: of the squares of stretch i, for those of the batch. `blocks` are Gpu::grid_for_rows of them.
cudaError_t sum_squares(const GradientBatch& batch, double* sums, unsigned blocks, cudaStream_t stream);
/// How far the gradients are clipped whose stretches have these sums. `scale` may be null.
cudaError_t update_clip(GradClip* clip, const double* sums, std::uint64_t stretches, const GradScale* scale,
                        cudaStream_t stream);

/// The factors of a step, once before its batches.
cudaError_t begin_step(Rule rule, StepScalars* scalars, const Rescaling& rescaling, cudaStream_t stream);
/// The corrections of a batch's parameters, before its step.
cudaError_t begin_parameters(const ParameterBatch& batch, const StepScalars* scalars,
                             const Rescaling& rescaling, cudaStream_t stream);
cudaError_t step(Rule rule, const ParameterBatch& batch, const StepScalars* scalars, bool zero_gradients,
                 unsigned blocks, cudaStream_t stream);
cudaError_t set_learning_rate(StepScalars* scalars, double rate, cudaStream_t stream);

}  // namespace ddp::device
