#pragma once

#include "ddp/cuda/kernel_dialect.h"

/// to[i] = from[i] * scale, rounded once. In place when both are the same array.
namespace ddp::device {

template <class From, class To>
struct ScaleCast {
    const From* from;
    To* to;
    float scale;

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        Floats<N> values = load<N>(from + i);
        for (int k = 0; k < N; ++k) values.of[k] *= scale;
        store(to + i, values);
    }
};

template <class From, class To>
DDP_DEVICE void scale_cast(const From* from, To* to, U64 count, float scale) {
    const ScaleCast<From, To> body{from, to, scale};
    // The smaller type decides where packs begin.
    if constexpr (sizeof(From) < sizeof(To)) for_elements(count, body, from, to);
    else for_elements(count, body, to, from);
}

}  // namespace ddp::device
