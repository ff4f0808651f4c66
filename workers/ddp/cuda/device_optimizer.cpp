#include "ddp/cuda/device_optimizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/kernels.h"
#include "ddp/cuda/memory.h"
#include "ddp/grad_clipper.h"
#include "ddp/grad_scaler.h"

namespace ddp::device {

StepScalars sgd_scalars(const SgdOptions& options) {
    StepScalars s{};
    s.gradient_factor = 1;
    s.learning_rate = options.learning_rate;
    s.decay = static_cast<float>(options.weight_decay);
    s.momentum = static_cast<float>(options.momentum);
    // Nesterov's step adds the gradient to the momentum's part of the velocity; a plain step is the velocity.
    s.of_gradient = options.nesterov ? 1.0F : 0.0F;
    s.of_velocity = options.nesterov ? s.momentum : 1.0F;
    return s;
}

StepScalars adamw_scalars(const AdamWOptions& options) {
    StepScalars s{};
    s.gradient_factor = 1;
    s.learning_rate = options.learning_rate;
    s.weight_decay = options.weight_decay;
    s.beta1 = options.beta1;
    s.beta2 = options.beta2;
    s.epsilon = static_cast<float>(options.epsilon);
    s.b1 = static_cast<float>(options.beta1);
    s.b2 = static_cast<float>(options.beta2);
    s.a1 = static_cast<float>(1 - options.beta1);
    s.a2 = static_cast<float>(1 - options.beta2);
    return s;
}

void append_step_counts(std::vector<Tensor>& state, std::span<const Tensor> parameters,
                        Correction* corrections) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
        state.push_back({std::string(kStepPrefix) + parameters[i].name,
                         {},
                         {&corrections[i].step, 1, DType::I64, parameters[i].memory.device}});
}

}  // namespace ddp::device

namespace ddp::cuda {
namespace {

using device::Rule;

class DeviceOptimizer final : public Optimizer {
  public:
    DeviceOptimizer(Rule rule, std::vector<Tensor> all, const device::StepScalars& scalars,
                    std::vector<std::string_view> slots, DeviceStepOptions options)
        : Optimizer(std::move(all), {&scalars.learning_rate, 1}),
          rule_(rule),
          options_(std::move(options)),
          stream_(static_cast<Stream>(options_.stream)),
          gpu_(Gpu::of(parameters().front().memory.device.index)),
          scalars_(gpu_, sizeof scalars),
          slot_names_(std::move(slots)),
          corrections_(gpu_, rule == Rule::AdamW ? parameters().size() * sizeof(device::Correction) : 0) {
        check_parameters();
        check_copies();
        copy(scalars_.get(), &scalars, sizeof scalars, stream_);
        for (std::size_t s = 0; s < slot_names_.size(); ++s) {
            for (const Tensor& parameter : parameters())
                slots_.emplace_back(gpu_, parameter.memory.count * sizeof(float)).clear(stream_);
        }
        corrections_.clear(stream_);
        make_masters();
        synchronize(stream_);
    }

    std::string_view name() const override { return rule_ == Rule::Sgd ? "sgd" : "adamw"; }

    std::vector<Tensor> state() const override {
        std::vector<Tensor> tensors;
        const std::size_t count = parameters().size();
        for (std::size_t s = 0; s < slot_names_.size(); ++s) {
            for (std::size_t i = 0; i < count; ++i)
                tensors.push_back(state_tensor(slot_names_[s], i, slots_[s * count + i].as<float>()));
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (has_master(i)) tensors.push_back(state_tensor("master", i, masters_[i].as<float>()));
        }
        tensors.push_back({std::string(kStepsName),
                           {},
                           {&scalars()->step, 1, DType::I64, parameters().front().memory.device}});
        if (rule_ == Rule::AdamW)
            device::append_step_counts(tensors, parameters(), corrections_.as<device::Correction>());
        return tensors;
    }
    std::uint64_t steps() const override { return scalars_.read<device::StepScalars>(stream_).step; }

  private:
    void learning_rate_changed(std::size_t /*group*/) override {
        check(device::set_learning_rate(scalars(), learning_rate(), stream_), "setting a learning rate");
    }
    bool takes_gradient(DType gradient, DType) const override { return has_kernels(gradient); }

    void update(std::span<const Buffer> gradients) override {
        const device::Rescaling rescaling{
            options_.scaler != nullptr ? options_.scaler->on_device() : nullptr,
            options_.clipper != nullptr ? options_.clipper->on_device() : nullptr};
        check(device::begin_step(rule_, scalars(), rescaling, stream_), "beginning an optimizer's step");
        device::ParameterBatch batch;
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            if (gradients[i].data == nullptr) continue;  // an empty part's step still counts
            batch.arrays[batch.count++] = array_of(i, gradients[i]);
            if (batch.count == batch.kMost) step(batch, rescaling);
        }
        step(batch, rescaling);
    }

    /// Launches the batch's step, and empties the batch.
    void step(device::ParameterBatch& batch, const device::Rescaling& rescaling) const {
        if (batch.count == 0) return;
        std::uint64_t largest = 0;
        for (unsigned i = 0; i < batch.count; ++i) largest = std::max(largest, batch.arrays[i].count);
        if (rule_ == Rule::AdamW)
            check(device::begin_parameters(batch, scalars(), rescaling, stream_),
                  "correcting AdamW's averages");
        check(
            device::step(rule_, batch, scalars(), options_.zero_gradients, gpu_->grid_for(largest), stream_),
            "launching an optimizer's step");
        batch.count = 0;
    }
    device::ParameterArray array_of(std::size_t i, const Buffer& gradient) const {
        const Buffer copy = copy_of(i);
        return {.value = value(i),
                .gradient = gradient.data,
                .copy = copy.data,
                .states = {slot(0, i), slot(1, i)},
                .correction = correction(i),
                .count = gradient.count,
                .gradient_type = *element_type(gradient.dtype),
                // The kernel ignores the type when there is no copy.
                .copy_type = copy.data != nullptr ? *element_type(copy.dtype) : device::ElementType::BF16};
    }

    void check_parameters() const {
        for (const Tensor& parameter : parameters()) {
            const Buffer& memory = parameter.memory;
            if (has_kernels(memory.dtype) && memory.device == parameters().front().memory.device) continue;
            throw InvalidInput(
                fmt::format("{}: parameter '{}' is {}; only float32, bfloat16 and float16, all on one CUDA "
                            "device, is updated",
                            name(), parameter.name, describe(parameter)));
        }
    }
    void check_copies() const {
        if (options_.copies.empty()) return;
        if (options_.copies.size() != parameters().size())
            throw InvalidInput(fmt::format("{}: {} copies for {} parameters", name(), options_.copies.size(),
                                           parameters().size()));
        for (std::size_t i = 0; i < options_.copies.size(); ++i) {
            const Buffer& wanted = options_.copies[i];
            if (wanted.data == nullptr) continue;
            const Buffer& memory = parameters()[i].memory;
            const bool is_low = wanted.dtype == DType::BF16 || wanted.dtype == DType::F16;
            if (is_low && wanted.count == memory.count && wanted.device == memory.device && !has_master(i))
                continue;
            throw InvalidInput(fmt::format("{}: a copy of {} elements of {} does not fit parameter '{}' ({})",
                                           name(), wanted.count, name_of(wanted.dtype), parameters()[i].name,
                                           describe(parameters()[i])));
        }
    }
    /// Fills masters_ in the parameters' order; empty ones for float32.
    void make_masters() {
        for (std::size_t i = 0; i < parameters().size(); ++i) {
            const Buffer& memory = parameters()[i].memory;
            masters_.emplace_back(gpu_, has_master(i) ? memory.count * sizeof(float) : 0);
            if (!has_master(i)) continue;
            const Buffer master{masters_[i].get(), memory.count, DType::F32, memory.device};
            scale_cast(*gpu_, memory, master, 1, stream_);
        }
    }

    bool has_master(std::size_t i) const { return parameters()[i].memory.dtype != DType::F32; }
    float* value(std::size_t i) const {
        return has_master(i) ? masters_[i].as<float>() : static_cast<float*>(parameters()[i].memory.data);
    }
    /// The copy that is written beside the value: the parameter itself when the value is a master.
    Buffer copy_of(std::size_t i) const {
        if (has_master(i)) return parameters()[i].memory;
        return options_.copies.empty() ? Buffer{} : options_.copies[i];
    }
    float* slot(std::size_t which, std::size_t i) const {
        return which < slot_names_.size() ? slots_[which * parameters().size() + i].as<float>() : nullptr;
    }
    device::Correction* correction(std::size_t i) const {
        return rule_ == Rule::AdamW ? corrections_.as<device::Correction>() + i : nullptr;
    }
    device::StepScalars* scalars() const { return scalars_.as<device::StepScalars>(); }
    Tensor state_tensor(std::string_view kind, std::size_t i, float* values) const {
        const Tensor& parameter = parameters()[i];
        return {fmt::format("{}.{}", kind, parameter.name),
                parameter.shape,
                {values, parameter.memory.count, DType::F32, parameter.memory.device},
                parameter.part_begin};
    }

    Rule rule_;
    DeviceStepOptions options_;
    Stream stream_;
    std::shared_ptr<const Gpu> gpu_;
    DeviceMemory scalars_;
    std::vector<std::string_view> slot_names_;
    std::vector<DeviceMemory> slots_;  ///< slot-major
    std::vector<DeviceMemory> masters_;
    DeviceMemory corrections_;  ///< one per parameter; empty for SGD
};

}  // namespace

std::unique_ptr<Optimizer> make_device_sgd(std::vector<Tensor> parameters, SgdOptions options) {
    std::vector<std::string_view> slots;
    if (options.momentum > 0) slots.emplace_back("momentum");
    return std::make_unique<DeviceOptimizer>(Rule::Sgd, std::move(parameters), device::sgd_scalars(options),
                                             std::move(slots), std::move(options.device));
}

std::unique_ptr<Optimizer> make_device_adamw(std::vector<Tensor> parameters, AdamWOptions options) {
    return std::make_unique<DeviceOptimizer>(
        Rule::AdamW, std::move(parameters), device::adamw_scalars(options),
        std::vector<std::string_view>{"exp_avg", "exp_avg_sq"}, std::move(options.device));
}

}  // namespace ddp::cuda
