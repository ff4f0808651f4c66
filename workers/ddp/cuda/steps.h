#pragma once

#include <cmath>

#include "ddp/cuda/numbers.h"

/// The numbers of an optimizer step and of the scale of the loss. They live on the device: a captured step is launched
/// again with the same arguments, and whether a step counts at all (a gradient may not be finite) is known there only.
namespace ddp::device {

/// Under float16 (torch.cuda.amp's rules).
struct GradScale {
    float scale;                     ///< the loss is multiplied by it
    float inverse;                   ///< and the gradients by this
    std::uint32_t found_non_finite;  ///< in this step's gradients
    std::uint32_t good_steps;        ///< in a row since the scale was changed
};

struct GradScaleRules {
    float growth_factor;
    float backoff_factor;
    std::uint32_t growth_interval;
};

/// The scale after a step. Backs off when a gradient was not finite, grows after an interval without one; a
/// growth that would overflow is left out.
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

struct StepScalars {
    std::uint64_t step;  ///< steps done, this one included; each parameter counts its own (Correction)
    double learning_rate;
    double weight_decay;
    double beta1, beta2;

    float rate;                                       ///< SGD
    float inverse_scale;                              ///< gradients are multiplied by it
    std::uint32_t skip;                               ///< this step changes nothing
    float decay, momentum, of_gradient, of_velocity;  // SGD
    float keep, epsilon, b1, b2, a1, a2;              // AdamW
};

/// AdamW's averages begin at zero, which is corrected by how often they were moved: by the parameter's own
/// steps, of which one that is unused at times has fewer.
struct alignas(16) Correction {
    std::uint64_t step;  ///< of this parameter, the one under way included
    float rate;          ///< the learning rate, corrected for the first average
    float root;          ///< of the correction of the second
};

/// base^exponent by squaring: multiplications alone, so the host and every device get the same bits.
DDP_BOTH inline double power(double base, std::uint64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
    }
    return result;
}

/// A step with a gradient that is not finite does not count. `scale` is null without a GradScaler.
DDP_BOTH inline bool is_skipped(const GradScale* scale) {
    return scale != nullptr && scale->found_non_finite != 0;
}
DDP_BOTH inline void open_step(StepScalars& s, const GradScale* scale) {
    s.inverse_scale = scale != nullptr ? scale->inverse : 1;
    s.skip = is_skipped(scale) ? 1 : 0;
    if (s.skip == 0) ++s.step;
}

/// What AdamW's step needs, from the options. As float: see optimizer.cpp, which uses both too.
DDP_BOTH inline double kept_by_decay(const StepScalars& s) { return 1 - s.learning_rate * s.weight_decay; }
DDP_BOTH inline void set_adamw_factors(StepScalars& s) { s.keep = static_cast<float>(kept_by_decay(s)); }
/// The learning rate, corrected for the first average, and the root of the second's correction, in the nth step of a
/// parameter.
DDP_BOTH inline double corrected_rate(const StepScalars& s, std::uint64_t step) {
    return s.learning_rate / (1 - power(s.beta1, step));
}
DDP_BOTH inline double correction_root(const StepScalars& s, std::uint64_t step) {
    return 1 / sqrt(1 - power(s.beta2, step));
}
/// Begins the step of one parameter. Reads what the options gave alone, so it may run beside open_step.
DDP_BOTH inline void open_step(Correction& c, const StepScalars& s) {
    ++c.step;
    c.rate = static_cast<float>(corrected_rate(s, c.step));
    c.root = static_cast<float>(correction_root(s, c.step));
}
DDP_BOTH inline void set_sgd_factors(StepScalars& s) { s.rate = static_cast<float>(s.learning_rate); }

}  // namespace ddp::device
