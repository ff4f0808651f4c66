#pragma once

#include <optional>

#include "ddp/cuda/gpu.h"
#include "ddp/cuda/numbers.h"
#include "ddp/process_group.h"

namespace ddp::cuda {

/// What kernels call the type: float32, bfloat16, float16. None for types that have no kernels.
[[nodiscard]] std::optional<device::ElementType> element_type(DType type);
[[nodiscard]] inline bool has_kernels(DType type) { return element_type(type).has_value(); }

/// to[i] = from[i] * scale, rounded once to nearest even, queued on `stream` of the current device; types with kernels in
/// any combination. In place when both are the same buffer; any other overlap is an error. Throws InvalidInput for other
/// types or different counts, Error when the launch is refused.
void scale_cast(const Gpu& gpu, const Buffer& from, const Buffer& to, float scale, Stream stream);

}  // namespace ddp::cuda
