#include "ddp/cuda/device_kernels.h"

#include <fmt/core.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

DDP_KERNEL_IMAGE(ddp_kernels)

namespace ddp::cuda {
namespace {

/// Place of a type in the tables of kernels; none for types without.
std::optional<std::size_t> place_of(DType type) {
    switch (type) {
        case DType::F32:
            return 0;
        case DType::BF16:
            return 1;
        case DType::F16:
            return 2;
        case DType::F64:
        case DType::I32:
        case DType::I64:
        case DType::U8:
            return std::nullopt;
    }
    return std::nullopt;
}

}  // namespace

const DeviceKernels& DeviceKernels::of(const std::shared_ptr<const Gpu>& gpu) {
    static std::mutex mutex;
    // Never freed, as Gpu::of.
    static auto* const loaded = new std::map<const Gpu*, std::unique_ptr<const DeviceKernels>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<const DeviceKernels>& kernels = (*loaded)[gpu.get()];
    if (!kernels) kernels = std::make_unique<const DeviceKernels>(gpu);
    return *kernels;
}

DeviceKernels::DeviceKernels(std::shared_ptr<const Gpu> gpu)
    : gpu_(std::move(gpu)), module_(gpu_, {"ddp_kernels", ddp_kernels_image}) {
    constexpr const char* kScaleCast[3][3] = {
        {"scale_cast_f32_f32", "scale_cast_f32_bf16", "scale_cast_f32_f16"},
        {"scale_cast_bf16_f32", "scale_cast_bf16_bf16", "scale_cast_bf16_f16"},
        {"scale_cast_f16_f32", "scale_cast_f16_bf16", "scale_cast_f16_f16"}};
    for (std::size_t from = 0; from < 3; ++from) {
        for (std::size_t to = 0; to < 3; ++to) scale_cast_[from][to] = module_.function(kScaleCast[from][to]);
    }
}

void DeviceKernels::scale_cast(const Buffer& from, const Buffer& to, float scale, Stream stream) const {
    const auto source = place_of(from.dtype), target = place_of(to.dtype);
    if (!source || !target || from.count != to.count)
        throw InvalidInput(fmt::format("scale_cast: {} elements of {} to {} of {}", from.count,
                                       name_of(from.dtype), to.count, name_of(to.dtype)));
    if (from.count == 0) return;
    scale_cast_[*source][*target].launch(gpu_->grid_for(from.count), stream,
                                         static_cast<const void*>(from.data), to.data,
                                         static_cast<unsigned long long>(from.count), scale);
}

}  // namespace ddp::cuda
