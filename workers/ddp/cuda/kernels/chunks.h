#pragma once

#include "ddp/cuda/kernel_dialect.h"

/// One launch for many arrays: a table of chunks in device memory, each a run of elements of one array, which
/// one block takes at a time. What kind of array it is stands in the chunk, so arrays of all types go
/// together.
namespace ddp::device {

enum class ElementType : U16 { F32, BF16, F16 };

/// Of a gradient.
struct alignas(16) GradientChunk {
    const void* values;
    U32 count;
    ElementType type;
};

/// Of a parameter, its gradient and what belongs to both.
struct alignas(16) ParameterChunk {
    float* value;
    void* gradient;
    void* copy;        ///< in low precision; null for none
    float* states[2];  ///< the velocity (null without momentum), or both of AdamW's averages
    U32 count;
    ElementType gradient_type, copy_type;  ///< a copy is never float32
};

static_assert(sizeof(GradientChunk) == 16 && sizeof(ParameterChunk) == 48);

}  // namespace ddp::device
