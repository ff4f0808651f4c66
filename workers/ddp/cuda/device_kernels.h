#pragma once

#include <memory>

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
    /// Sets scale->found_non_finite when an element is infinite or NaN; never clears it. `scale` is device
    /// memory.
    void find_non_finite(const Buffer& values, device::GradScale* scale, Stream stream) const;
    /// Moves the scale (next_scale). Device memory.
    void update(device::GradScale* scale, device::GradScaleRules rules, Stream stream) const;

    /// The parameter of an optimizer's pass; all in device memory. `states` are the velocity (null without
    /// momentum), or both of AdamW's averages. `copy` has no memory when none is wanted.
    struct Parameter {
        float* value;
        Buffer gradient;
        Buffer copy;
        float* states[2];
        bool zero_gradient;
    };
    enum class Rule { Sgd, AdamW };
    /// The step's factors; once per step, before its passes. `scale` may be null. `scalars` is device memory.
    void begin_step(Rule rule, device::StepScalars* scalars, const device::GradScale* scale,
                    Stream stream) const;
    void update_parameter(Rule rule, const device::StepScalars* scalars, const Parameter& parameter,
                          Stream stream) const;
    void set_learning_rate(device::StepScalars* scalars, double rate, Stream stream) const;
    void set_step(device::StepScalars* scalars, std::uint64_t step, Stream stream) const;

  private:
    std::shared_ptr<const Gpu> gpu_;
    Module module_;
    // By the place of a type: float32, bfloat16, float16. Copies are of the last two.
    Function scale_cast_[3][3], fill_[3], find_non_finite_[3];
    Function passes_[2][3][2];
    Function begin_[2];
    Function update_grad_scale_, set_learning_rate_, set_step_;
};

/// Whether kernels take the type: float32, bfloat16, float16.
[[nodiscard]] bool has_kernels(DType type);

}  // namespace ddp::cuda
