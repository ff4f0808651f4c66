#pragma once

#include "ddp/cuda/kernels/step_scalars.h"

/// One pass over a parameter: reads the gradient (of any type), updates the float32 value and its states,
/// writes the copy in low precision and zeroes the gradient, where wanted. The order of operations is
/// optimizer.cpp's.
namespace ddp::device {

/// What both optimizers have. A null `copy` is none.
template <class Gradient, class Copy>
struct Pass {
    float* value;
    Gradient* gradient;
    Copy* copy;
    U32 zero_gradient;
    StepScalars scalars;

    template <int N>
    DDP_DEVICE Floats<N> take_gradient(U64 i) const {
        Floats<N> g = load<N>(gradient + i);
        for (int k = 0; k < N; ++k) g.of[k] *= scalars.inverse_scale;
        if (zero_gradient != 0) store(gradient + i, Floats<N>{});
        return g;
    }
    template <int N>
    DDP_DEVICE void put_value(U64 i, const Floats<N>& p) const {
        store(value + i, p);
        if (copy != nullptr) store(copy + i, p);
    }
};

template <class Gradient, class Copy>
struct Sgd : Pass<Gradient, Copy> {
    float* velocity;  ///< null without momentum

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        const StepScalars& s = this->scalars;
        const Floats<N> g = this->template take_gradient<N>(i);
        if (s.skip != 0) return;
        Floats<N> p = load<N>(this->value + i);
        if (velocity == nullptr) {
            for (int k = 0; k < N; ++k) p.of[k] -= s.rate * (g.of[k] + s.decay * p.of[k]);
        } else {
            Floats<N> v = load<N>(velocity + i);
            for (int k = 0; k < N; ++k) {
                const float d = g.of[k] + s.decay * p.of[k];
                v.of[k] = s.momentum * v.of[k] + d;
                p.of[k] -= s.rate * (s.of_gradient * d + s.of_velocity * v.of[k]);
            }
            store(velocity + i, v);
        }
        this->put_value(i, p);
    }
};

template <class Gradient, class Copy>
struct AdamW : Pass<Gradient, Copy> {
    float* average;
    float* square_average;

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        const StepScalars& s = this->scalars;
        const Floats<N> g = this->template take_gradient<N>(i);
        if (s.skip != 0) return;
        Floats<N> p = load<N>(this->value + i), m = load<N>(average + i), v = load<N>(square_average + i);
        for (int k = 0; k < N; ++k) {
            m.of[k] = s.b1 * m.of[k] + s.a1 * g.of[k];
            v.of[k] = s.b2 * v.of[k] + s.a2 * g.of[k] * g.of[k];
            p.of[k] = s.keep * p.of[k] - s.rate * m.of[k] / (square_root(v.of[k]) * s.root + s.epsilon);
        }
        store(average + i, m);
        store(square_average + i, v);
        this->put_value(i, p);
    }
};

}  // namespace ddp::device
