#include "ddp/optimizer.h"

#include <fmt/core.h>

#include <cmath>
#include <string>
#include <utility>

#include "ddp/cuda/device_optimizer.h"

namespace ddp {
namespace {

void require(bool holds, std::string_view optimizer, std::string_view what) {
    if (!holds) throw InvalidInput(fmt::format("{}: {}", optimizer, what));
}

/// Of rates, decays and the like. NaN is neither.
void require_amount(double value, std::string_view optimizer, std::string_view what) {
    require(value >= 0, optimizer, fmt::format("{} is {}", what, value < 0 ? "negative" : "not a number"));
    require(std::isfinite(value), optimizer, fmt::format("{} is infinite", what));
}

bool are_on_device(std::span<const Tensor> parameters) {
    return !parameters.empty() && parameters.front().memory.device.kind == Device::Kind::Cuda;
}

/// "" for host memory.
std::string at(const Device& device) {
    return device.kind == Device::Kind::Cpu ? "" : fmt::format(" on CUDA device {}", device.index);
}

/// Parameters in host memory.
class HostOptimizer : public Optimizer {
  public:
    std::vector<Tensor> state() const override {
        std::vector<Tensor> tensors;
        for (std::size_t s = 0; s < slot_names_.size(); ++s) {
            for (std::size_t i = 0; i < parameters().size(); ++i) {
                tensors.push_back(tensor_of(fmt::format("{}.{}", slot_names_[s], parameters()[i].name),
                                            std::span(slots_[s * parameters().size() + i]),
                                            parameters()[i].shape));
            }
        }
        tensors.push_back({std::string(kStepsName), {}, {&steps_, 1, DType::I64, {}}});
        return tensors;
    }
    std::uint64_t steps() const override { return steps_; }

  protected:
    /// `slots` names the states each parameter has (float32, zero at the start).
    HostOptimizer(std::vector<Tensor> all, double learning_rate, std::vector<std::string_view> slots)
        : Optimizer(std::move(all), learning_rate), slot_names_(std::move(slots)) {
        for (const Tensor& parameter : parameters()) {
            if (parameter.memory.dtype != DType::F32 || parameter.memory.device != Device{})
                throw InvalidInput(
                    fmt::format("optimizer: parameter '{}' is {}; only float32 in host memory, or float32, "
                                "bfloat16 and float16 on one CUDA device, is updated",
                                parameter.name, describe(parameter)));
        }
        for (std::size_t s = 0; s < slot_names_.size(); ++s)
            for (const Tensor& parameter : parameters()) slots_.emplace_back(parameter.memory.count, 0.0F);
    }
    std::span<float> slot(std::size_t which, std::size_t parameter) {
        return slots_[which * parameters().size() + parameter];
    }
    virtual void begin_step() {}
    virtual void update(std::size_t parameter, std::span<float> values, std::span<const float> gradient) = 0;

  private:
    bool takes_gradient(DType gradient, DType parameter) const override { return gradient == parameter; }
    void update(std::span<const Buffer> gradients) override {
        ++steps_;
        begin_step();
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            if (gradients[i].data == nullptr) continue;
            const std::size_t count = gradients[i].count;
            update(i, {static_cast<float*>(parameters()[i].memory.data), count},
                   {static_cast<const float*>(gradients[i].data), count});
        }
    }

    std::vector<std::string_view> slot_names_;
    mutable std::vector<std::vector<float>> slots_;  ///< slot-major
    mutable std::uint64_t steps_ = 0;
};

class Sgd final : public HostOptimizer {
  public:
    Sgd(std::vector<Tensor> parameters, SgdOptions options)
        : HostOptimizer(std::move(parameters), options.learning_rate,
                        options.momentum > 0 ? std::vector<std::string_view>{"momentum"}
                                             : std::vector<std::string_view>{}),
          options_(options) {}
    std::string_view name() const override { return "sgd"; }

  private:
    void update(std::size_t parameter, std::span<float> values, std::span<const float> gradient) override {
        if (options_.momentum > 0) with_momentum(values, gradient, slot(0, parameter));
        else plain(values, gradient);
    }

    void plain(std::span<float> values, std::span<const float> gradient) const {
        const auto rate = static_cast<float>(learning_rate());
        const auto decay = static_cast<float>(options_.weight_decay);
        float* __restrict__ p = values.data();
        const float* __restrict__ g = gradient.data();
        for (std::size_t i = 0; i < values.size(); ++i) p[i] -= rate * (g[i] + decay * p[i]);
    }

    void with_momentum(std::span<float> values, std::span<const float> gradient,
                       std::span<float> velocity) const {
        const auto rate = static_cast<float>(learning_rate());
        const auto decay = static_cast<float>(options_.weight_decay);
        const auto momentum = static_cast<float>(options_.momentum);
        // Nesterov: the step looks ahead along the velocity; plain momentum: the step is the velocity.
        const float of_gradient = options_.nesterov ? 1.0F : 0.0F;
        const float of_velocity = options_.nesterov ? momentum : 1.0F;
        float* __restrict__ p = values.data();
        float* __restrict__ v = velocity.data();
        const float* __restrict__ g = gradient.data();
        for (std::size_t i = 0; i < values.size(); ++i) {
            const float d = g[i] + decay * p[i];
            v[i] = momentum * v[i] + d;
            p[i] -= rate * (of_gradient * d + of_velocity * v[i]);
        }
    }

    SgdOptions options_;
};

class AdamW final : public HostOptimizer {
  public:
    AdamW(std::vector<Tensor> parameters, AdamWOptions options)
        : HostOptimizer(std::move(parameters), options.learning_rate, {"exp_avg", "exp_avg_sq"}),
          factors_(device::adamw_scalars(options)),
          corrections_(this->parameters().size()) {}
    std::string_view name() const override { return "adamw"; }
    std::vector<Tensor> state() const override {
        std::vector<Tensor> tensors = HostOptimizer::state();
        device::append_step_counts(tensors, parameters(), corrections_.data());
        return tensors;
    }

  private:
    // The same functions as on a device: the same factors, to the bit.
    void begin_step() override {
        factors_.learning_rate = learning_rate();
        device::set_adamw_factors(factors_);
    }

    void update(std::size_t parameter, std::span<float> values, std::span<const float> gradient) override {
        device::Correction& correction = corrections_[parameter];
        device::open_step(correction, factors_);
        const float keep = factors_.keep, rate = correction.rate, root = correction.root;
        const float epsilon = factors_.epsilon;
        const float b1 = factors_.b1, b2 = factors_.b2, a1 = factors_.a1, a2 = factors_.a2;
        float* __restrict__ p = values.data();
        float* __restrict__ m = slot(0, parameter).data();
        float* __restrict__ v = slot(1, parameter).data();
        const float* __restrict__ g = gradient.data();
        for (std::size_t i = 0; i < values.size(); ++i) {
            m[i] = b1 * m[i] + a1 * g[i];
            v[i] = b2 * v[i] + a2 * g[i] * g[i];
            p[i] = keep * p[i] - rate * m[i] / (std::sqrt(v[i]) * root + epsilon);
        }
    }

    device::StepScalars factors_;
    mutable std::vector<device::Correction> corrections_;  ///< one for each parameter
};

}  // namespace

Optimizer::Optimizer(std::vector<Tensor> parameters, double learning_rate)
    : parameters_(std::move(parameters)), learning_rate_(learning_rate) {
    check_tensors(parameters_);
}

void Optimizer::set_learning_rate(double rate) {
    require_amount(rate, name(), "the learning rate");
    learning_rate_ = rate;
}

void Optimizer::step(std::span<const Buffer> gradients) {
    if (gradients.size() != parameters_.size())
        throw InvalidInput(
            fmt::format("optimizer: {} gradients for {} parameters", gradients.size(), parameters_.size()));
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        const Buffer& memory = parameters_[i].memory;
        const Buffer& gradient = gradients[i];
        if (gradient.data == nullptr) continue;
        if (gradient.count != memory.count || !takes_gradient(gradient.dtype, memory.dtype) ||
            gradient.device != memory.device)
            throw InvalidInput(
                fmt::format("optimizer: the gradient of '{}' has {} elements of {}{}, the parameter is {}{}",
                            parameters_[i].name, gradient.count, name_of(gradient.dtype), at(gradient.device),
                            describe(parameters_[i]), at(memory.device)));
    }
    update(gradients);
}

std::unique_ptr<Optimizer> make_sgd(std::vector<Tensor> parameters, SgdOptions options) {
    require_amount(options.learning_rate, "sgd", "the learning rate");
    require_amount(options.momentum, "sgd", "the momentum");
    require_amount(options.weight_decay, "sgd", "the weight decay");
    require(!options.nesterov || options.momentum > 0, "sgd", "nesterov needs a momentum");
    if (are_on_device(parameters)) return cuda::make_device_sgd(std::move(parameters), options);
    return std::make_unique<Sgd>(std::move(parameters), options);
}

std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options) {
    require_amount(options.learning_rate, "adamw", "the learning rate");
    require(options.beta1 >= 0 && options.beta1 < 1, "adamw", "beta1 is not in [0, 1)");
    require(options.beta2 >= 0 && options.beta2 < 1, "adamw", "beta2 is not in [0, 1)");
    require_amount(options.epsilon, "adamw", "epsilon");
    require_amount(options.weight_decay, "adamw", "the weight decay");
    if (are_on_device(parameters)) return cuda::make_device_adamw(std::move(parameters), options);
    return std::make_unique<AdamW>(std::move(parameters), options);
}

}  // namespace ddp
