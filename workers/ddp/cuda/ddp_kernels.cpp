// The kernels of libddp: what is compiled for devices (and, in tests, for the host).
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
