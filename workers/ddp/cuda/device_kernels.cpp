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

std::size_t require_place(const char* kernel, const Buffer& buffer) {
    if (const auto place = place_of(buffer.dtype)) return *place;
    throw InvalidInput(fmt::format("{}: no kernel for {}; float32, bfloat16 and float16 have one", kernel,
                                   name_of(buffer.dtype)));
}

using device::U32;
using device::U64;

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
    constexpr const char* kRules[] = {"sgd", "adamw"};
    for (std::size_t t = 0; t < 3; ++t) {
        for (std::size_t to = 0; to < 3; ++to)
            scale_cast_[t][to] = module_.function(fmt::format("scale_cast_{}_{}", kTypes[t], kTypes[to]));
        fill_[t] = module_.function(fmt::format("fill_{}", kTypes[t]));
        find_non_finite_[t] = module_.function(fmt::format("find_non_finite_{}", kTypes[t]));
        for (std::size_t rule = 0; rule < 2; ++rule) {
            for (std::size_t copy = 0; copy < 2; ++copy)
                passes_[rule][t][copy] =
                    module_.function(fmt::format("{}_{}_{}", kRules[rule], kTypes[t], kTypes[copy + 1]));
        }
    }
    for (std::size_t rule = 0; rule < 2; ++rule)
        begin_[rule] = module_.function(fmt::format("begin_{}", kRules[rule]));
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

void DeviceKernels::find_non_finite(const Buffer& values, device::GradScale* scale, Stream stream) const {
    const std::size_t type = require_place("find_non_finite", values);
    if (values.count == 0) return;
    find_non_finite_[type].launch(gpu_->grid_for(values.count), stream, static_cast<const void*>(values.data),
                                  U64{values.count}, &scale->found_non_finite);
}

void DeviceKernels::update(device::GradScale* scale, device::GradScaleRules rules, Stream stream) const {
    update_grad_scale_.launch(1, stream, scale, rules);
}

void DeviceKernels::begin_step(Rule rule, device::StepScalars* scalars, const device::GradScale* scale,
                               Stream stream) const {
    begin_[static_cast<std::size_t>(rule)].launch(1, stream, scalars, scale);
}

void DeviceKernels::update_parameter(Rule rule, const device::StepScalars* scalars, const Parameter& p,
                                     Stream stream) const {
    const U64 count = p.gradient.count;
    if (count == 0) return;
    const std::size_t gradient = require_place("optimizer", p.gradient);
    const bool has_copy = p.copy.data != nullptr;
    const std::size_t copy = has_copy ? require_place("optimizer", p.copy) : 1;
    if (copy == 0)
        throw InvalidInput(fmt::format("optimizer: a copy of {} saves nothing", name_of(p.copy.dtype)));
    const Function& pass = passes_[static_cast<std::size_t>(rule)][gradient][copy - 1];
    const unsigned grid = gpu_->grid_for(count);
    const U32 zero = p.zero_gradient ? 1 : 0;
    void* const copied_to = has_copy ? p.copy.data : nullptr;
    if (rule == Rule::Sgd)
        pass.launch(grid, stream, scalars, count, p.value, p.gradient.data, copied_to, zero, p.states[0]);
    else
        pass.launch(grid, stream, scalars, count, p.value, p.gradient.data, copied_to, zero, p.states[0],
                    p.states[1]);
}

void DeviceKernels::set_learning_rate(device::StepScalars* scalars, double rate, Stream stream) const {
    set_learning_rate_.launch(1, stream, scalars, rate);
}

void DeviceKernels::set_step(device::StepScalars* scalars, std::uint64_t step, Stream stream) const {
    set_step_.launch(1, stream, scalars, U64{step});
}

bool has_kernels(DType type) { return place_of(type).has_value(); }

}  // namespace ddp::cuda
