#include "ddp/cuda/device_optimizer.h"

#include <fmt/core.h>

#include <string_view>
#include <utility>

#include "ddp/cuda/chunk_table.h"
#include "ddp/cuda/device_kernels.h"
#include "ddp/cuda/memory.h"
#include "ddp/grad_scaler.h"

namespace ddp::device {

StepScalars sgd_scalars(const SgdOptions& options) {
    StepScalars s{};
    s.inverse_scale = 1;
    s.learning_rate = options.learning_rate;
    s.decay = static_cast<float>(options.weight_decay);
    s.momentum = static_cast<float>(options.momentum);
    // Nesterov: the step looks ahead along the velocity; plain momentum: the step is the velocity.
    s.of_gradient = options.nesterov ? 1.0F : 0.0F;
    s.of_velocity = options.nesterov ? s.momentum : 1.0F;
    return s;
}

StepScalars adamw_scalars(const AdamWOptions& options) {
    StepScalars s{};
    s.inverse_scale = 1;
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

}  // namespace ddp::device

namespace ddp::cuda {
namespace {

using Rule = DeviceKernels::Rule;

class DeviceOptimizer final : public Optimizer {
  public:
    DeviceOptimizer(Rule rule, std::vector<Tensor> all, const device::StepScalars& scalars,
                    std::vector<std::string_view> slots, DeviceStepOptions options)
        : Optimizer(std::move(all), scalars.learning_rate),
          rule_(rule),
          options_(std::move(options)),
          stream_(static_cast<Stream>(options_.stream)),
          gpu_(Gpu::of(parameters().front().memory.device.index)),
          kernels_(DeviceKernels::of(gpu_)),
          scalars_(gpu_, sizeof scalars),
          chunk_elements_(good_chunk()),
          table_(gpu_, rule == Rule::Sgd ? "sgd" : "adamw", most_chunks()),
          slot_names_(std::move(slots)) {
        check_parameters();
        check_copies();
        copy(*gpu_, scalars_.get(), &scalars, sizeof scalars, stream_);
        for (std::size_t s = 0; s < slot_names_.size(); ++s) {
            for (const Tensor& parameter : parameters())
                slots_.emplace_back(gpu_, parameter.memory.count * sizeof(float)).clear(stream_);
        }
        make_masters();
        synchronize(*gpu_, stream_);
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
        return tensors;
    }
    std::uint64_t steps() const override {
        device::StepScalars now{};
        copy(*gpu_, &now, scalars_.get(), sizeof now, stream_);
        synchronize(*gpu_, stream_);
        return now.step;
    }
    void set_steps(std::uint64_t steps) override { kernels_.set_step(scalars(), steps, stream_); }
    void set_learning_rate(double rate) override {
        if (rate == learning_rate()) return;
        Optimizer::set_learning_rate(rate);
        kernels_.set_learning_rate(scalars(), rate, stream_);
    }

  private:
    bool takes_gradient(DType gradient, DType) const override { return has_kernels(gradient); }

    void update(std::span<const Buffer> gradients) override {
        const device::GradScale* const scale =
            options_.scaler != nullptr ? options_.scaler->on_device() : nullptr;
        // First, as it may refuse: a step that does not happen must not be counted.
        const auto chunks = table_.of(gradients, stream_, [&] { return chunks_with(gradients); });
        kernels_.begin_step(rule_, scalars(), scale, stream_);
        kernels_.step(rule_, scalars(), chunks, options_.zero_gradients, stream_);
    }

    std::vector<device::ParameterChunk> chunks_with(std::span<const Buffer> gradients) const {
        std::vector<device::ParameterChunk> chunks;
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            if (gradients[i].data == nullptr) continue;
            append_chunks(chunks,
                          {.value = value(i),
                           .gradient = gradients[i],
                           .copy = copy_of(i),
                           .states = {slot(0, i), slot(1, i)}},
                          chunk_elements_);
        }
        return chunks;
    }
    device::U32 good_chunk() const {
        std::uint64_t all = 0;
        for (const Tensor& parameter : parameters()) all += parameter.memory.count;
        return chunk_elements(all, gpu_->grid_for(all));
    }
    /// Of a step in which every parameter has a gradient.
    std::size_t most_chunks() const {
        std::size_t chunks = 0;
        for (const Tensor& parameter : parameters())
            chunks += (parameter.memory.count + chunk_elements_ - 1) / chunk_elements_;
        return chunks;
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
    /// In the parameters' order; empty for float32.
    void make_masters() {
        for (std::size_t i = 0; i < parameters().size(); ++i) {
            const Buffer& memory = parameters()[i].memory;
            masters_.emplace_back(gpu_, has_master(i) ? memory.count * sizeof(float) : 0);
            if (!has_master(i)) continue;
            const Buffer master{masters_[i].get(), memory.count, DType::F32, memory.device};
            kernels_.scale_cast(memory, master, 1, stream_);
        }
    }

    bool has_master(std::size_t i) const { return parameters()[i].memory.dtype != DType::F32; }
    float* value(std::size_t i) const {
        return has_master(i) ? masters_[i].as<float>() : static_cast<float*>(parameters()[i].memory.data);
    }
    /// What is written beside the value: the parameter itself where the value is a master.
    Buffer copy_of(std::size_t i) const {
        if (has_master(i)) return parameters()[i].memory;
        return options_.copies.empty() ? Buffer{} : options_.copies[i];
    }
    float* slot(std::size_t which, std::size_t i) const {
        return which < slot_names_.size() ? slots_[which * parameters().size() + i].as<float>() : nullptr;
    }
    device::StepScalars* scalars() const { return scalars_.as<device::StepScalars>(); }
    Tensor state_tensor(std::string_view kind, std::size_t i, float* values) const {
        const Tensor& parameter = parameters()[i];
        return {fmt::format("{}.{}", kind, parameter.name),
                parameter.shape,
                {values, parameter.memory.count, DType::F32, parameter.memory.device}};
    }

    Rule rule_;
    DeviceStepOptions options_;
    Stream stream_;
    std::shared_ptr<const Gpu> gpu_;
    const DeviceKernels& kernels_;
    DeviceMemory scalars_;
    device::U32 chunk_elements_;
    ChunkTable<device::ParameterChunk> table_;
    std::vector<std::string_view> slot_names_;
    std::vector<DeviceMemory> slots_;  ///< slot-major
    std::vector<DeviceMemory> masters_;
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
