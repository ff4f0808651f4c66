#include "ddp/cuda/cast.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>

namespace ddp::cuda {
namespace {

std::string place(const Device& device) {
    if (device.kind == Device::Kind::Cpu) return "host memory";
    return fmt::format("memory of CUDA device {}", device.index);
}

void require_kernels(const Gpu& gpu, const Buffer& gradient, std::string_view who) {
    const Device device{Device::Kind::Cuda, gpu.index()};
    if (gradient.device == device && has_kernels(gradient.dtype)) return;
    throw InvalidInput(fmt::format(
        "{}: a gradient of {} elements of {} in {} cannot be read; it takes float32, bfloat16 and float16 in {}",
        who, gradient.count, name_of(gradient.dtype), place(gradient.device), place(device)));
}

}  // namespace

std::optional<device::ElementType> element_type(DType type) {
    switch (type) {
        case DType::F32: return device::ElementType::F32;
        case DType::BF16: return device::ElementType::BF16;
        case DType::F16: return device::ElementType::F16;
        default: return std::nullopt;
    }
}

void scale_cast(const Gpu& gpu, const Buffer& from, const Buffer& to, float scale, Stream stream) {
    const auto source = element_type(from.dtype), target = element_type(to.dtype);
    if (!source || !target || from.count != to.count)
        throw InvalidInput(fmt::format("scale_cast: {} elements of {} to {} of {}", from.count,
                                       name_of(from.dtype), to.count, name_of(to.dtype)));
    if (from.count == 0) return;
    check(device::scale_cast({from.data, *source, to.data, *target, from.count, scale},
                             gpu.grid_for(from.count), stream),
          "launching scale_cast");
}

void for_gradients(const Gpu& gpu, std::span<const Buffer> gradients, std::string_view who,
                   const LaunchGradients& launch) {
    for (const Buffer& gradient : gradients) {
        if (gradient.data != nullptr) require_kernels(gpu, gradient, who);
    }
    device::GradientBatch batch;
    std::uint64_t largest = 0;
    std::uint32_t stretches = 0;
    const auto launch_batch = [&] {
        if (batch.count > 0) launch(batch, gpu.grid_for(largest));
        batch.count = 0;
        largest = 0;
    };
    for (const Buffer& gradient : gradients) {
        if (gradient.data == nullptr || gradient.count == 0) continue;
        batch.arrays[batch.count++] = {gradient.data, gradient.count, *element_type(gradient.dtype),
                                       stretches};
        stretches += device::stretches_of(gradient.count);
        largest = std::max<std::uint64_t>(largest, gradient.count);
        if (batch.count == batch.kMost) launch_batch();
    }
    launch_batch();
}

}  // namespace ddp::cuda
