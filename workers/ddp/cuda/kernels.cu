// The kernels of libddp and their launches. A kernel is a struct with its arguments and a call for one of
// several threads; `array` is an index into the batch. A step has the same order of operations as
// optimizer.cpp.
#if defined(__CUDACC__)
#include "ddp/cuda/launch.cuh"
#endif

#include "ddp/cuda/kernels.h"

namespace ddp::device {
namespace {

template <class From, class To>
struct ScaleCast {
    const From* from;
    To* to;
    std::uint64_t count;
    float scale;

    template <int N>
    DDP_BOTH void run(std::uint64_t i) const {
        Floats<N> values = load<N>(from + i);
        for (int k = 0; k < N; ++k) values.of[k] *= scale;
        store(to + i, values);
    }
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t threads, unsigned) const {
        for_elements(thread, threads, count, *this, from, to);
    }
};

/// Remembers whether all elements of this thread were finite. The flag is written at the end only: nothing
/// between the loads keeps the compiler from overlapping them.
template <class T>
struct AllFinite {
    const T* values;
    bool holds = true;

    template <int N>
    DDP_BOTH void run(std::uint64_t i) {
        const Floats<N> v = load<N>(values + i);
        for (int k = 0; k < N; ++k) holds &= is_finite(v.of[k]);
    }
};
struct FindNonFinite {
    GradientBatch batch;
    GradScale* scale;

    template <class T>
    DDP_BOTH void check(std::uint64_t thread, std::uint64_t threads, const GradientArray& array) const {
        AllFinite<T> all{static_cast<const T*>(array.values)};
        for_elements(thread, threads, array.count, all, all.values);
        // All threads write the same value, so their order does not matter.
        if (!all.holds) scale->found_non_finite = 1;
    }
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t threads, unsigned array) const {
        const GradientArray& mine = batch.arrays[array];
        with_type(mine.type, [&](auto type) { check<decltype(type)>(thread, threads, mine); });
    }
};

struct UpdateScale {
    GradScale* scale;
    GradScaleRules rules;
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t, unsigned) const {
        if (thread == 0) *scale = next_scale(*scale, rules);
    }
};

/// One warp sums one stretch. The sum does not depend on the memory's alignment or the number of warps.
struct SumSquares {
    GradientBatch batch;
    double* sums;

    DDP_BOTH std::uint64_t end_of(unsigned array) const {
        const GradientArray& of = batch.arrays[array];
        return of.first_stretch + stretches_of(of.count);
    }
    template <class T, class Lanes>
    DDP_BOTH double sum(const GradientArray& array, std::uint64_t stretch, Lanes lanes) const {
        const T* const values = static_cast<const T*>(array.values);
        const bool together = is_aligned(values);
        const std::uint64_t packs = (array.count + kPack - 1) / kPack, stretches = stretches_of(array.count);
        const std::uint64_t length = (packs + stretches - 1) / stretches;
        const std::uint64_t end = (stretch + 1) * length < packs ? (stretch + 1) * length : packs;
        double sum = 0;
        for (std::uint64_t pack = stretch * length + lanes.mine(); pack < end; pack += Lanes::count) {
            const std::uint64_t i = pack * kPack;
            Floats<kPack> v{};
            if (together && i + kPack <= array.count) {
                v = load<kPack>(values + i);
            } else {
                for (std::uint64_t k = 0; k < kPack && i + k < array.count; ++k)
                    v.of[k] = to_float(values[i + k]);
            }
            for (int k = 0; k < kPack; ++k)
                sum += static_cast<double>(v.of[k]) * static_cast<double>(v.of[k]);
        }
        return lanes.sum(sum);
    }
    template <class Lanes>
    DDP_BOTH double sum_of(const GradientArray& array, std::uint64_t stretch, Lanes lanes) const {
        return with_type(array.type, [&](auto type) { return sum<decltype(type)>(array, stretch, lanes); });
    }
    template <class Lanes>
    DDP_BOTH void operator()(std::uint64_t warp, std::uint64_t warps, Lanes lanes) const {
        unsigned array = 0;
        for (std::uint64_t at = batch.arrays[0].first_stretch + warp;; at += warps) {
            while (array < batch.count && at >= end_of(array)) ++array;
            if (array == batch.count) return;
            const double sum = sum_of(batch.arrays[array], at - batch.arrays[array].first_stretch, lanes);
            if (lanes.mine() == 0) sums[at] = sum;
        }
    }
};

struct UpdateClip {
    GradClip* clip;
    const double* sums;
    std::uint64_t stretches;
    const GradScale* scale;
    template <class Lanes>
    DDP_BOTH void operator()(std::uint64_t warp, std::uint64_t, Lanes lanes) const {
        if (warp != 0) return;
        double sum = 0;
        for (std::uint64_t i = lanes.mine(); i < stretches; i += Lanes::count) sum += sums[i];
        sum = lanes.sum(sum);
        if (lanes.mine() == 0) finish_norm(*clip, sum, scale);
    }
};

struct BeginStep {
    Rule rule;
    StepScalars* scalars;
    Rescaling rescaling;
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t, unsigned) const {
        if (thread != 0) return;
        start_step(*scalars, rescaling);
        if (rule == Rule::Sgd) set_sgd_factors(*scalars);
        else set_adamw_factors(*scalars);
    }
};
struct BeginParameters {
    ParameterBatch batch;
    const StepScalars* scalars;
    Rescaling rescaling;
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t threads, unsigned) const {
        if (is_skipped(rescaling)) return;
        for (std::uint64_t i = thread; i < batch.count; i += threads)
            start_step(*batch.arrays[i].correction, *scalars);
    }
};
struct SetLearningRate {
    StepScalars* scalars;
    double rate;
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t, unsigned) const {
        if (thread == 0) scalars->learning_rate = rate;
    }
};

/// One pass over a parameter: reads the gradient, updates the float32 value and its states, writes the
/// low-precision copy and zeroes the gradient, where requested.
template <class Gradient, class Copy>
struct Pass {
    StepScalars scalars;
    bool zero_gradient;
    float* value;
    Gradient* gradient;
    Copy* copy;  ///< null without one

    template <int N>
    DDP_BOTH Floats<N> scaled_gradient(std::uint64_t i) const {
        Floats<N> g = load<N>(gradient + i);
        for (int k = 0; k < N; ++k) g.of[k] *= scalars.gradient_factor;
        return g;
    }
    /// Called after all loads: a store between them would delay the later ones.
    template <int N>
    DDP_BOTH void put_value(std::uint64_t i, const Floats<N>& p) const {
        store(value + i, p);
        if (copy != nullptr) store(copy + i, p);
        if (zero_gradient) store(gradient + i, Floats<N>{});
    }
};

template <class Gradient, class Copy>
struct Sgd : Pass<Gradient, Copy> {
    float* velocity;  ///< null without momentum

    DDP_BOTH Sgd(const Pass<Gradient, Copy>& pass, const ParameterArray& of)
        : Pass<Gradient, Copy>(pass), velocity(of.states[0]) {}
    template <int N>
    DDP_BOTH void run(std::uint64_t i) const {
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
    DDP_BOTH void run_all(std::uint64_t thread, std::uint64_t threads, std::uint64_t count) const {
        for_elements(thread, threads, count, *this, this->gradient, this->value, this->copy, velocity);
    }
};

template <class Gradient, class Copy>
struct AdamW : Pass<Gradient, Copy> {
    float* average;
    float* square_average;
    float rate, root;  ///< from the parameter's Correction

    DDP_BOTH AdamW(const Pass<Gradient, Copy>& pass, const ParameterArray& of)
        : Pass<Gradient, Copy>(pass),
          average(of.states[0]),
          square_average(of.states[1]),
          rate(of.correction->rate),
          root(of.correction->root) {}
    template <int N>
    DDP_BOTH void run(std::uint64_t i) const {
        const StepScalars& s = this->scalars;
        const Floats<N> g = this->template scaled_gradient<N>(i);
        Floats<N> p = load<N>(this->value + i), m = load<N>(average + i), v = load<N>(square_average + i);
        for (int k = 0; k < N; ++k) {
            m.of[k] = s.b1 * m.of[k] + s.a1 * g.of[k];
            v.of[k] = s.b2 * v.of[k] + s.a2 * g.of[k] * g.of[k];
            p.of[k] = s.keep * p.of[k] - rate * m.of[k] / (sqrtf(v.of[k]) * root + s.epsilon);
        }
        store(average + i, m);
        store(square_average + i, v);
        this->put_value(i, p);
    }
    DDP_BOTH void run_all(std::uint64_t thread, std::uint64_t threads, std::uint64_t count) const {
        for_elements(thread, threads, count, *this, this->gradient, this->value, this->copy, average,
                     square_average);
    }
};

/// The rest of a skipped step: the next step must not see these gradients.
template <class Gradient>
struct Zero {
    Gradient* gradient;

    template <int N>
    DDP_BOTH void run(std::uint64_t i) const {
        store(gradient + i, Floats<N>{});
    }
};

/// The step of one rule, for all types.
template <template <class, class> class Update>
struct Step {
    ParameterBatch batch;
    const StepScalars* scalars;
    bool zero_gradients;

    template <class Gradient, class Copy>
    DDP_BOTH void update(std::uint64_t thread, std::uint64_t threads, const ParameterArray& mine) const {
        const Pass<Gradient, Copy> pass{*scalars, zero_gradients, mine.value,
                                        static_cast<Gradient*>(mine.gradient), static_cast<Copy*>(mine.copy)};
        Update<Gradient, Copy>(pass, mine).run_all(thread, threads, mine.count);
    }
    template <class Gradient>
    DDP_BOTH void step(std::uint64_t thread, std::uint64_t threads, const ParameterArray& mine) const {
        if (scalars->skip != 0) {
            const Zero<Gradient> zero{static_cast<Gradient*>(mine.gradient)};
            if (zero_gradients) for_elements(thread, threads, mine.count, zero, zero.gradient);
        } else if (mine.copy_type == ElementType::F16) {
            update<Gradient, F16>(thread, threads, mine);
        } else {
            update<Gradient, Bf16>(thread, threads, mine);
        }
    }
    DDP_BOTH void operator()(std::uint64_t thread, std::uint64_t threads, unsigned array) const {
        const ParameterArray& mine = batch.arrays[array];
        with_type(mine.gradient_type, [&](auto type) { step<decltype(type)>(thread, threads, mine); });
    }
};

}  // namespace

cudaError_t scale_cast(const Cast& cast, unsigned blocks, cudaStream_t stream) {
    return with_type(cast.from_type, [&]<class From>(From) {
        return with_type(cast.to_type, [&]<class To>(To) {
            return launch(ScaleCast<From, To>{static_cast<const From*>(cast.from), static_cast<To*>(cast.to),
                                              cast.count, cast.scale},
                          blocks, 1, stream);
        });
    });
}

cudaError_t find_non_finite(const GradientBatch& batch, GradScale* scale, unsigned blocks,
                            cudaStream_t stream) {
    return launch(FindNonFinite{batch, scale}, blocks, batch.count, stream);
}
cudaError_t update_scale(GradScale* scale, GradScaleRules rules, cudaStream_t stream) {
    return launch(UpdateScale{scale, rules}, 1, 1, stream);
}
cudaError_t sum_squares(const GradientBatch& batch, double* sums, unsigned blocks, cudaStream_t stream) {
    return launch_rows(SumSquares{batch, sums}, blocks, stream);
}
cudaError_t update_clip(GradClip* clip, const double* sums, std::uint64_t stretches, const GradScale* scale,
                        cudaStream_t stream) {
    return launch_rows(UpdateClip{clip, sums, stretches, scale}, 1, stream);
}
cudaError_t begin_step(Rule rule, StepScalars* scalars, const Rescaling& rescaling, cudaStream_t stream) {
    return launch(BeginStep{rule, scalars, rescaling}, 1, 1, stream);
}
cudaError_t begin_parameters(const ParameterBatch& batch, const StepScalars* scalars,
                             const Rescaling& rescaling, cudaStream_t stream) {
    return launch(BeginParameters{batch, scalars, rescaling}, 1, 1, stream);
}
cudaError_t step(Rule rule, const ParameterBatch& batch, const StepScalars* scalars, bool zero_gradients,
                 unsigned blocks, cudaStream_t stream) {
    if (rule == Rule::Sgd)
        return launch(Step<Sgd>{batch, scalars, zero_gradients}, blocks, batch.count, stream);
    return launch(Step<AdamW>{batch, scalars, zero_gradients}, blocks, batch.count, stream);
}
cudaError_t set_learning_rate(StepScalars* scalars, double rate, cudaStream_t stream) {
    return launch(SetLearningRate{scalars, rate}, 1, 1, stream);
}

}  // namespace ddp::device
