#include "ddp/cuda/cast.h"

#include <fmt/core.h>

#include "ddp/cuda/kernels.h"

namespace ddp::cuda {

std::optional<device::ElementType> element_type(DType type) {
    switch (type) {
        case DType::F32:
            return device::ElementType::F32;
        case DType::BF16:
            return device::ElementType::BF16;
        case DType::F16:
            return device::ElementType::F16;
        case DType::F64:
        case DType::I32:
        case DType::I64:
        case DType::U8:
            return std::nullopt;
    }
    return std::nullopt;
}

void scale_cast(const Gpu& gpu, const Buffer& from, const Buffer& to, float scale, Stream stream) {
    const auto source = element_type(from.dtype), target = element_type(to.dtype);
    if (!source || !target || from.count != to.count)
        throw InvalidInput(fmt::format("scale_cast: {} elements of {} to {} of {}", from.count,
                                       name_of(from.dtype), to.count, name_of(to.dtype)));
    if (from.count == 0) return;
    check(device::scale_cast({from.data, *source, to.data, *target, from.count, scale}, gpu.grid_for(from.count), stream),
          "launching scale_cast");
}

}  // namespace ddp::cuda
