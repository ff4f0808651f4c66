#pragma once

#include <memory>
#include <span>
#include <vector>

#include "ddp/cuda/steps.h"
#include "ddp/optimizer.h"

namespace ddp::device {

/// The numbers of the options, as the steps take them. The step is 0, nothing is scaled or skipped.
StepScalars sgd_scalars(const SgdOptions& options);
StepScalars adamw_scalars(const AdamWOptions& options);

/// Appends "step.fc1.weight" and so on: how often each parameter was stepped, as a checkpoint holds it.
/// `corrections`, one for each parameter and where the parameters are, are borrowed.
void append_step_counts(std::vector<Tensor>& state, std::span<const Tensor> parameters,
                        Correction* corrections);

}  // namespace ddp::device

namespace ddp::cuda {

/// Optimizers of parameters on one CUDA device; the options have been checked. Throw InvalidInput for
/// parameters that are not there or of another type, and for copies that do not fit.
std::unique_ptr<Optimizer> make_device_sgd(std::vector<Tensor> parameters, SgdOptions options);
std::unique_ptr<Optimizer> make_device_adamw(std::vector<Tensor> parameters, AdamWOptions options);

}  // namespace ddp::cuda
