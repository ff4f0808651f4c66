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
    const std::optional<device::ElementType> element = element_type(type);
    if (!element) return std::nullopt;
    return static_cast<std::size_t>(*element);
}

std::size_t require_place(const char* kernel, const Buffer& buffer) {
    if (const auto place = place_of(buffer.dtype)) return *place;
    throw InvalidInput(fmt::format("{}: no kernel for {}; float32, bfloat16 and float16 have one", kernel,
                                   name_of(buffer.dtype)));
}

using device::U32;
using device::U64;

/// A block for each chunk: the device starts the next one when any of them ends.
U32 blocks_for(std::size_t chunks) { return static_cast<U32>(chunks); }

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
    constexpr const char* kTypes[] = {"f32", "bf16", "f16"};
    for (std::size_t t = 0; t < 3; ++t) {
        for (std::size_t to = 0; to < 3; ++to)
            scale_cast_[t][to] = module_.function(fmt::format("scale_cast_{}_{}", kTypes[t], kTypes[to]));
        fill_[t] = module_.function(fmt::format("fill_{}", kTypes[t]));
    }
    constexpr const char* kRules[] = {"sgd", "adamw"};
    for (std::size_t rule = 0; rule < 2; ++rule) {
        begin_[rule] = module_.function(fmt::format("begin_{}", kRules[rule]));
        step_[rule] = module_.function(fmt::format("step_{}", kRules[rule]));
    }
    find_non_finite_ = module_.function("find_non_finite");
    update_grad_scale_ = module_.function("update_grad_scale");
    set_learning_rate_ = module_.function("set_learning_rate");
    set_step_ = module_.function("set_step");
}

void DeviceKernels::scale_cast(const Buffer& from, const Buffer& to, float scale, Stream stream) const {
    const auto source = place_of(from.dtype), target = place_of(to.dtype);
    if (!source || !target || from.count != to.count)
        throw InvalidInput(fmt::format("scale_cast: {} elements of {} to {} of {}", from.count,
                                       name_of(from.dtype), to.count, name_of(to.dtype)));
    if (from.count == 0) return;
    scale_cast_[*source][*target].launch(gpu_->grid_for(from.count), stream,
                                         static_cast<const void*>(from.data), to.data, U64{from.count},
                                         scale);
}

void DeviceKernels::fill(const Buffer& target, float value, Stream stream) const {
    const std::size_t type = require_place("fill", target);
    if (target.count == 0) return;
    fill_[type].launch(gpu_->grid_for(target.count), stream, target.data, U64{target.count}, value);
}

void DeviceKernels::find_non_finite(std::span<const device::GradientChunk> chunks, device::GradScale* scale,
                                    Stream stream) const {
    if (chunks.empty()) return;
    find_non_finite_.launch(blocks_for(chunks.size()), stream, chunks.data(), blocks_for(chunks.size()),
                            scale);
}

void DeviceKernels::update(device::GradScale* scale, device::GradScaleRules rules, Stream stream) const {
    update_grad_scale_.launch(1, stream, scale, rules);
}

void DeviceKernels::begin_step(Rule rule, device::StepScalars* scalars, const device::GradScale* scale,
                               Stream stream) const {
    begin_[static_cast<std::size_t>(rule)].launch(1, stream, scalars, scale);
}

void DeviceKernels::step(Rule rule, const device::StepScalars* scalars,
                         std::span<const device::ParameterChunk> chunks, bool zero_gradients,
                         Stream stream) const {
    if (chunks.empty()) return;
    step_[static_cast<std::size_t>(rule)].launch(blocks_for(chunks.size()), stream, scalars, chunks.data(),
                                                 blocks_for(chunks.size()), U32{zero_gradients ? 1U : 0U});
}

void DeviceKernels::set_learning_rate(device::StepScalars* scalars, double rate, Stream stream) const {
    set_learning_rate_.launch(1, stream, scalars, rate);
}

void DeviceKernels::set_step(device::StepScalars* scalars, std::uint64_t step, Stream stream) const {
    set_step_.launch(1, stream, scalars, U64{step});
}

bool has_kernels(DType type) { return place_of(type).has_value(); }

}  // namespace ddp::cuda
