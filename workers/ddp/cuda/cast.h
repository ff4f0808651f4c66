#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "ddp/cuda/gpu.h"
#include "ddp/cuda/kernels.h"
#include "ddp/process_group.h"

namespace ddp::cuda {

/// The kernels' name of the type: float32, bfloat16, float16; nullopt for types without kernels.
[[nodiscard]] std::optional<device::ElementType> element_type(DType type);
[[nodiscard]] inline bool has_kernels(DType type) { return element_type(type).has_value(); }

/// to[i] = from[i] * scale, rounded once to nearest even, queued on `stream` of the current device; any
/// combination of types with kernels. In place when both are the same buffer; any other overlap is an error.
/// Throws InvalidInput for other types or different counts, Error when the launch is refused.
void scale_cast(const Gpu& gpu, const Buffer& from, const Buffer& to, float scale, Stream stream);

/// Calls `launch` with all gradients that have elements, in their order, as many at once as a kernel takes,
/// and with the number of blocks of an element-wise kernel for them. Throws InvalidInput, before any call and
/// beginning with `who`, unless they are float32, bfloat16 or float16 on the GPU.
using LaunchGradients = std::function<void(const device::GradientBatch& batch, unsigned blocks)>;
void for_gradients(const Gpu& gpu, std::span<const Buffer> gradients, std::string_view who,
                   const LaunchGradients& launch);

}  // namespace ddp::cuda
