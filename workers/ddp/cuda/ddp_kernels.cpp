// The kernels of libddp: what is compiled for devices (and, in tests, for the host).
#include "ddp/cuda/kernels/grad_scale.h"
#include "ddp/cuda/kernels/optimizer_steps.h"
#include "ddp/cuda/kernels/scale_cast.h"

using namespace ddp::device;

#define SCALE_CAST(from_name, From, to_name, To)                                                       \
    DDP_KERNEL(scale_cast_##from_name##_##to_name, const From* from, To* to, U64 count, float scale) { \
        scale_cast(from, to, count, scale);                                                            \
    }
SCALE_CAST(f32, float, f32, float)
SCALE_CAST(f32, float, bf16, Bf16)
SCALE_CAST(f32, float, f16, F16)
SCALE_CAST(bf16, Bf16, f32, float)
SCALE_CAST(bf16, Bf16, bf16, Bf16)
SCALE_CAST(bf16, Bf16, f16, F16)
SCALE_CAST(f16, F16, f32, float)
SCALE_CAST(f16, F16, bf16, Bf16)
SCALE_CAST(f16, F16, f16, F16)

// ---- the scale of the loss

#define OF_EACH_TYPE(OF_TYPE) OF_TYPE(f32, float) OF_TYPE(bf16, Bf16) OF_TYPE(f16, F16)

#define FILL(name, T)                                            \
    DDP_KERNEL(fill_##name, T* values, U64 count, float value) { \
        for_elements(count, Fill<T>{values, value}, values);     \
    }
OF_EACH_TYPE(FILL)

DDP_KERNEL(find_non_finite, const GradientChunk* chunks, U32 count, GradScale* scale) {
    // Whoever finds one writes the same: no order matters.
    for (U32 c = block(); c < count; c += blocks()) {
        if (!all_finite(chunks[c])) scale->found_non_finite = 1;
    }
}
DDP_KERNEL(update_grad_scale, GradScale* scale, GradScaleRules rules) {
    if (thread() == 0) *scale = next_scale(*scale, rules);
}

// ---- optimizers

DDP_KERNEL(begin_sgd, StepScalars* scalars, const GradScale* scale) {
    if (thread() != 0) return;
    open_step(*scalars, scale);
    set_sgd_factors(*scalars);
}
DDP_KERNEL(begin_adamw, StepScalars* scalars, const GradScale* scale) {
    if (thread() != 0) return;
    open_step(*scalars, scale);
    set_adamw_factors(*scalars);
}
DDP_KERNEL(set_learning_rate, StepScalars* scalars, double learning_rate) {
    if (thread() == 0) scalars->learning_rate = learning_rate;
}
DDP_KERNEL(set_step, StepScalars* scalars, U64 step) {
    if (thread() == 0) scalars->step = step;
}

DDP_KERNEL(step_sgd, const StepScalars* scalars, const ParameterChunk* chunks, U32 count, U32 zero_gradient) {
    step_chunks<SgdRule>(*scalars, chunks, count, zero_gradient);
}
DDP_KERNEL(step_adamw, const StepScalars* scalars, const ParameterChunk* chunks, U32 count,
           U32 zero_gradient) {
    step_chunks<AdamWRule>(*scalars, chunks, count, zero_gradient);
}
