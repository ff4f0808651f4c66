#pragma once

#include "ddp/cuda/kernels/grad_scale.h"

/// The numbers of an optimizer step. They live on the device: a captured step is launched again with the same
/// arguments, and whether a step counts at all (a gradient may not be finite) is known there only.
namespace ddp::device {

struct StepScalars {
    U64 step;  ///< steps done, this one included
    double learning_rate;
    double weight_decay;
    double beta1, beta2;

    float rate;
    float inverse_scale;                              ///< gradients are multiplied by it
    U32 skip;                                         ///< this step changes nothing
    float decay, momentum, of_gradient, of_velocity;  // SGD
    float keep, root, epsilon, b1, b2, a1, a2;        // AdamW
};

/// base^exponent by squaring: multiplications alone, so the host and every device get the same bits.
DDP_DEVICE double power(double base, U64 exponent) {
    double result = 1;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
    }
    return result;
}

/// Begins a step; one with a gradient that is not finite does not count. `scale` is null without a
/// GradScaler.
DDP_DEVICE void open_step(StepScalars& s, const GradScale* scale) {
    s.inverse_scale = scale != nullptr ? scale->inverse : 1;
    s.skip = scale != nullptr ? scale->found_non_finite : 0;
    if (s.skip == 0) ++s.step;
}

/// What AdamW's step number `step` needs, from the options. As float: see optimizer.cpp, which uses it too.
DDP_DEVICE void set_adamw_factors(StepScalars& s) {
    const double correction1 = 1 - power(s.beta1, s.step);
    const double correction2 = 1 - power(s.beta2, s.step);
    s.keep = static_cast<float>(1 - s.learning_rate * s.weight_decay);
    s.rate = static_cast<float>(s.learning_rate / correction1);
    s.root = static_cast<float>(1 / square_root(correction2));
}
DDP_DEVICE void set_sgd_factors(StepScalars& s) { s.rate = static_cast<float>(s.learning_rate); }

}  // namespace ddp::device
