#pragma once

#include <memory>
#include <span>
#include <vector>

#include "ddp/cuda/steps.h"
#include "ddp/optimizer.h"

namespace ddp::device {

/// The options as the kernels take them, before the first step; nothing is scaled or skipped.
StepScalars sgd_scalars(const SgdOptions& options);
StepScalars adamw_scalars(const AdamWOptions& options);

/// Appends "step.fc1.weight" and so on, the step count of each parameter, for a checkpoint. `corrections`,
/// one per parameter and on the parameters' device, are borrowed.
void append_step_counts(std::vector<Tensor>& state, std::span<const Tensor> parameters,
                        Correction* corrections);

}  // namespace ddp::device

namespace ddp::cuda {

/// Optimizers of parameters on one CUDA device, with checked options. Throw InvalidInput for parameters
/// elsewhere or of another type, and for copies that do not fit.
std::unique_ptr<Optimizer> make_device_sgd(std::vector<Tensor> parameters, SgdOptions options);
std::unique_ptr<Optimizer> make_device_adamw(std::vector<Tensor> parameters, AdamWOptions options);

}  // namespace ddp::cuda
