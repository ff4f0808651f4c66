#pragma once

#include <memory>
#include <span>

#include "ddp/cuda/chunking.h"
#include "ddp/cuda/kernels/step_scalars.h"
#include "ddp/cuda/module.h"
#include "ddp/process_group.h"

namespace ddp::cuda {

/// The kernels of libddp on one device. Every call puts work on `stream` and returns; buffers are device
/// memory of any alignment (16 bytes is fast) and live until the stream has come past. Thread-safe.
class DeviceKernels {
  public:
    /// Loaded at the first call, kept for the life of the process. Throws Error (see Module).
    static const DeviceKernels& of(const std::shared_ptr<const Gpu>& gpu);

    explicit DeviceKernels(std::shared_ptr<const Gpu> gpu);

    [[nodiscard]] const Gpu& gpu() const { return *gpu_; }

    /// to[i] = from[i] * scale, rounded once to nearest even; float32, bfloat16, float16 in any combination.
    /// In place when both are the same buffer; any other overlap is an error. Throws InvalidInput for other
    /// types or different counts.
    void scale_cast(const Buffer& from, const Buffer& to, float scale, Stream stream) const;

    /// Every element becomes the value. float32, bfloat16 or float16.
    void fill(const Buffer& target, float value, Stream stream) const;
    /// Sets scale->found_non_finite when an element is infinite or NaN; never clears it. One launch, or none
    /// without chunks. `chunks` and `scale` are device memory.
    void find_non_finite(std::span<const device::GradientChunk> chunks, device::GradScale* scale,
                         Stream stream) const;
    /// Moves the scale (next_scale). Device memory.
    void update(device::GradScale* scale, device::GradScaleRules rules, Stream stream) const;

    enum class Rule { Sgd, AdamW };
    /// The step's factors; once per step, before its pass. `scale` may be null. `scalars` is device memory.
    void begin_step(Rule rule, device::StepScalars* scalars, const device::GradScale* scale,
                    Stream stream) const;
    /// The pass over all parameters: one launch, or none without chunks. `chunks` are device memory.
    void step(Rule rule, const device::StepScalars* scalars, std::span<const device::ParameterChunk> chunks,
              bool zero_gradients, Stream stream) const;
    void set_learning_rate(device::StepScalars* scalars, double rate, Stream stream) const;
    void set_step(device::StepScalars* scalars, std::uint64_t step, Stream stream) const;

  private:
    std::shared_ptr<const Gpu> gpu_;
    Module module_;
    Function scale_cast_[3][3], fill_[3];  ///< by the place of a type: float32, bfloat16, float16
    Function begin_[2], step_[2];          ///< by rule
    Function find_non_finite_, update_grad_scale_, set_learning_rate_, set_step_;
};

/// Whether kernels take the type: float32, bfloat16, float16.
[[nodiscard]] bool has_kernels(DType type);

}  // namespace ddp::cuda
