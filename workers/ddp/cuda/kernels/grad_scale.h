#pragma once

#include "ddp/cuda/kernels/chunks.h"

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

/// Whether all that this thread has looked at was finite. Written down at the end only: nothing between the
/// loads keeps the compiler from having several under way.
template <class T>
struct AllFinite {
    const T* values;
    bool holds = true;

    template <int N>
    DDP_DEVICE void run(U64 i) {
        const Floats<N> v = load<N>(values + i);
        for (int k = 0; k < N; ++k) holds &= is_finite(v.of[k]);
    }
};

template <class T>
DDP_DEVICE bool all_finite(const T* values, U32 count) {
    AllFinite<T> all{on_device(values)};
    for_elements_in_block(count, all, values);
    return all.holds;
}
DDP_DEVICE bool all_finite(GradientChunk chunk) {
    switch (chunk.type) {
        case ElementType::F32:
            return all_finite(static_cast<const float*>(chunk.values), chunk.count);
        case ElementType::BF16:
            return all_finite(static_cast<const Bf16*>(chunk.values), chunk.count);
        case ElementType::F16:
            return all_finite(static_cast<const F16*>(chunk.values), chunk.count);
    }
    return true;
}

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
