#pragma once

#include <cmath>

#include "ddp/cuda/numbers.h"

/// The numbers of an optimizer step and of the loss scale. They live on the device: a captured step is
/// launched again with the same arguments, and only the device knows whether a step counts (its gradients are
/// finite).
namespace ddp::device {

/// The loss scale for float16 (torch.cuda.amp's rules).
struct GradScale {
    float scale;                     ///< factor of the loss
    float inverse;                   ///< factor of the gradients
    std::uint32_t found_non_finite;  ///< 1 when this step's gradients have one
    std::uint32_t good_steps;        ///< consecutive, since the last change of the scale
};

struct GradScaleRules {
    float growth_factor;
    float backoff_factor;
    std::uint32_t growth_interval;
};

/// The scale after a step. It shrinks when a gradient was not finite, and grows after an interval of finite
/// ones unless it would overflow.
DDP_BOTH inline GradScale next_scale(GradScale now, GradScaleRules rules) {
    GradScale next = now;
    next.found_non_finite = 0;
    next.good_steps = now.found_non_finite != 0 ? 0 : now.good_steps + 1;
    if (now.found_non_finite != 0) next.scale = now.scale * rules.backoff_factor;
    if (next.good_steps == rules.growth_interval) {
        const float grown = now.scale * rules.growth_factor;
        if (is_finite(grown)) next.scale = grown;
        next.good_steps = 0;
    }
    next.inverse = 1 / next.scale;
    return next;
}

/// Clipping of all gradients together to a joint norm.
struct GradClip {
    double max_norm;
    double norm;            ///< of the gradients last measured, without the loss scale
    std::uint64_t skipped;  ///< number of steps whose norm was not finite
    float factor;           ///< factor of the gradients
    std::uint32_t skip;     ///< 1 when this step's norm is not finite
};

/// Computes norm and factor from the sum of all gradients' squares, as stored. `scale` may be null.
DDP_BOTH inline void finish_norm(GradClip& c, double squares, const GradScale* scale) {
    c.norm = sqrt(squares) * static_cast<double>(scale != nullptr ? scale->inverse : 1);
    c.skip = c.norm < INFINITY ? 0 : 1;
    c.skipped += c.skip;
    const double factor = c.max_norm / (c.norm + 1e-6);
    c.factor = factor < 1 ? static_cast<float>(factor) : 1;
}

/// The changes to gradients before a step uses them. Both may be null.
struct Rescaling {
    const GradScale* scale = nullptr;
    const GradClip* clip = nullptr;
};

struct StepScalars {
    std::uint64_t step;  ///< steps done, this one included; each parameter has its own count (Correction)
    double learning_rate;
    double weight_decay;
    double beta1, beta2;

    float rate;                                       ///< SGD
    float gradient_factor;                            ///< factor of the gradients
    std::uint32_t skip;                               ///< this step changes nothing
    float decay, momentum, of_gradient, of_velocity;  // SGD
    float keep, epsilon, b1, b2, a1, a2;              // AdamW
};

/// AdamW's averages begin at zero, and the correction for that depends on the number of their updates: the
/// parameter's own steps, which are fewer when it is unused at times.
struct alignas(16) Correction {
    std::uint64_t step;  ///< steps of this parameter, the current one included
    float rate;          ///< learning rate, corrected for the first average
    float root;          ///< root of the second average's correction
};

/// base^exponent by squaring: only multiplications, so the host and every device get the same bits.
DDP_BOTH inline double power(double base, std::uint64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
    }
    return result;
}

/// A step with a gradient that is not finite does not count.
DDP_BOTH inline bool is_skipped(const Rescaling& by) {
    return (by.scale != nullptr && by.scale->found_non_finite != 0) ||
           (by.clip != nullptr && by.clip->skip != 0);
}
DDP_BOTH inline void start_step(StepScalars& s, const Rescaling& by) {
    s.gradient_factor =
        (by.scale != nullptr ? by.scale->inverse : 1) * (by.clip != nullptr ? by.clip->factor : 1);
    s.skip = is_skipped(by) ? 1 : 0;
    if (s.skip == 0) ++s.step;
}

/// AdamW's factors, from the options. optimizer.cpp uses the same functions on the host.
DDP_BOTH inline double decay_factor(const StepScalars& s) { return 1 - s.learning_rate * s.weight_decay; }
DDP_BOTH inline void set_adamw_factors(StepScalars& s) { s.keep = static_cast<float>(decay_factor(s)); }
/// The learning rate corrected for the first average, and the root of the second average's correction, in
/// step number `step` of a parameter.
DDP_BOTH inline double corrected_rate(const StepScalars& s, std::uint64_t step) {
    return s.learning_rate / (1 - power(s.beta1, step));
}
DDP_BOTH inline double correction_root(const StepScalars& s, std::uint64_t step) {
    return 1 / sqrt(1 - power(s.beta2, step));
}
/// Begins the step of one parameter. It reads only options, so it may run beside start_step.
DDP_BOTH inline void start_step(Correction& c, const StepScalars& s) {
    ++c.step;
    c.rate = static_cast<float>(corrected_rate(s, c.step));
    c.root = static_cast<float>(correction_root(s, c.step));
}
DDP_BOTH inline void set_sgd_factors(StepScalars& s) { s.rate = static_cast<float>(s.learning_rate); }

}  // namespace ddp::device
