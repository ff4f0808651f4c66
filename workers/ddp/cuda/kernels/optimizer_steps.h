#pragma once

#include "ddp/cuda/kernels/chunks.h"
#include "ddp/cuda/kernels/step_scalars.h"

/// One pass over a chunk of a parameter: reads the gradient (of any type), updates the float32 value and its
/// states, writes the copy in low precision and zeroes the gradient, where wanted. The order of operations is
/// optimizer.cpp's.
namespace ddp::device {

/// What both optimizers have. A null `copy` is none.
template <class Gradient, class Copy>
struct Pass {
    const StepScalars& scalars;
    U32 zero_gradient;
    float* value;
    Gradient* gradient;
    Copy* copy;

    template <int N>
    DDP_DEVICE Floats<N> scaled_gradient(U64 i) const {
        Floats<N> g = load<N>(gradient + i);
        for (int k = 0; k < N; ++k) g.of[k] *= scalars.inverse_scale;
        return g;
    }
    /// Behind all loads: a store between them would hold the later ones back.
    template <int N>
    DDP_DEVICE void put_value(U64 i, const Floats<N>& p) const {
        store(value + i, p);
        if (copy != nullptr) store(copy + i, p);
        if (zero_gradient != 0) store(gradient + i, Floats<N>{});
    }
};

/// What is left of a step that changes nothing: the next one must not see these gradients.
template <class Gradient>
struct Zero {
    Gradient* gradient;

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        store(gradient + i, Floats<N>{});
    }
};

template <class Gradient, class Copy>
struct Sgd : Pass<Gradient, Copy> {
    float* velocity;  ///< null without momentum

    template <int N>
    DDP_DEVICE void run(U64 i) const {
        const StepScalars& s = this->scalars;
        const Floats<N> g = this->template scaled_gradient<N>(i);
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
        const Floats<N> g = this->template scaled_gradient<N>(i);
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

// ---- which of them a chunk is for

struct SgdRule {
    template <class Gradient, class Copy>
    static DDP_DEVICE void step(const Pass<Gradient, Copy>& pass, const ParameterChunk& chunk) {
        const Sgd<Gradient, Copy> body{pass, on_device(chunk.states[0])};
        for_elements_in_block(chunk.count, body, pass.gradient, pass.value, pass.copy, body.velocity);
    }
};
struct AdamWRule {
    template <class Gradient, class Copy>
    static DDP_DEVICE void step(const Pass<Gradient, Copy>& pass, const ParameterChunk& chunk) {
        const AdamW<Gradient, Copy> body{pass, on_device(chunk.states[0]), on_device(chunk.states[1])};
        for_elements_in_block(chunk.count, body, pass.gradient, pass.value, pass.copy, body.average,
                              body.square_average);
    }
};

template <class Rule, class Gradient>
DDP_DEVICE void step_with(const StepScalars& scalars, const ParameterChunk& chunk, U32 zero_gradient) {
    auto* const gradient = on_device(static_cast<Gradient*>(chunk.gradient));
    if (scalars.skip != 0) {
        const Zero<Gradient> body{gradient};
        if (zero_gradient != 0) for_elements_in_block(chunk.count, body, gradient);
    } else if (chunk.copy_type == ElementType::F16) {
        Rule::step(Pass<Gradient, F16>{scalars, zero_gradient, on_device(chunk.value), gradient,
                                       on_device(static_cast<F16*>(chunk.copy))},
                   chunk);
    } else {
        Rule::step(Pass<Gradient, Bf16>{scalars, zero_gradient, on_device(chunk.value), gradient,
                                        on_device(static_cast<Bf16*>(chunk.copy))},
                   chunk);
    }
}

/// All chunks of a step, block by block.
template <class Rule>
DDP_DEVICE void step_chunks(const StepScalars& all_scalars, const ParameterChunk* chunks, U32 count,
                            U32 zero_gradient) {
    const StepScalars scalars = all_scalars;  // in registers: what is stored might be this memory
    for (U32 c = block(); c < count; c += blocks()) {
        const ParameterChunk chunk = chunks[c];
        switch (chunk.gradient_type) {
            case ElementType::F32:
                step_with<Rule, float>(scalars, chunk, zero_gradient);
                break;
            case ElementType::BF16:
                step_with<Rule, Bf16>(scalars, chunk, zero_gradient);
                break;
            case ElementType::F16:
                step_with<Rule, F16>(scalars, chunk, zero_gradient);
                break;
        }
    }
}

}  // namespace ddp::device
