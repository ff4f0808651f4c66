#pragma once

#include "ddp/cuda/kernel_dialect.h"

/// The scale of the loss under float16 (torch.cuda.amp's rules), and the check that moves it.
namespace ddp::device {

struct GradScale {
    float scale;           ///< the loss is multiplied by it
    float inverse;         ///< and the gradients by this
    U32 found_non_finite;  ///< in this step's gradients
    U32 good_steps;        ///< in a row since the scale was changed
};

struct GradScaleRules {
    float growth_factor;
    float backoff_factor;
    U32 growth_interval;
};

/// The scale after a step. Backs off when a gradient was not finite, grows after an interval without one; a
/// growth that would overflow is left out.
DDP_DEVICE GradScale next_scale(GradScale now, GradScaleRules rules) {
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

template <class T>
struct FindNonFinite {
    const T* values;
    U32* found;

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        const Floats<N> v = load<N>(values + i);
        bool finite = true;
        for (int k = 0; k < N; ++k) finite = finite && is_finite(v.of[k]);
        // Whoever finds one writes the same: no order matters.
        if (!finite) *found = 1;
    }
};

template <class T>
struct Fill {
    T* values;
    float value;

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        Floats<N> v;
        for (int k = 0; k < N; ++k) v.of[k] = value;
        store(values + i, v);
    }
};

}  // namespace ddp::device
