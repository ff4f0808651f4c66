#pragma once

#include <optional>
#include <span>
#include <vector>

#include "ddp/cuda/kernels/chunks.h"
#include "ddp/process_group.h"

/// How arrays are cut into the chunks that a launch for many of them works on. Pure: nothing here touches the
/// memory that the pointers lead to.
namespace ddp::cuda {

/// What kernels call the type; none for types that have no kernels.
[[nodiscard]] std::optional<device::ElementType> element_type(DType type);

/// Elements of a chunk for so many in all, on a device that `blocks` fill: small enough that blocks which end
/// early find another chunk, large enough that finding it costs little. A multiple of what a block moves at
/// once.
[[nodiscard]] device::U32 chunk_elements(std::uint64_t elements, unsigned blocks);

/// A parameter as an optimizer's pass takes it. `states` are the velocity (null without momentum), or both of
/// AdamW's averages; `copy` has no memory when none is wanted.
struct ParameterMemory {
    float* value;
    Buffer gradient;
    Buffer copy;
    float* states[2];
};
/// Appends the parameter's chunks: none for one without elements. Throws InvalidInput for types that have no
/// kernels.
void append_chunks(std::vector<device::ParameterChunk>& chunks, const ParameterMemory& parameter,
                   device::U32 elements);
/// The chunks of all that have memory, in order. Throws InvalidInput as above.
[[nodiscard]] std::vector<device::GradientChunk> gradient_chunks(std::span<const Buffer> gradients,
                                                                 device::U32 elements);

}  // namespace ddp::cuda
