#include "ddp/optimizer.h"

#include <fmt/core.h>

#include <cmath>
#include <utility>

namespace ddp {
namespace {

void require(bool holds, std::string_view optimizer, std::string_view what) {
    if (!holds) throw InvalidInput(fmt::format("{}: {}", optimizer, what));
}

class Sgd final : public Optimizer {
  public:
    Sgd(std::vector<Tensor> parameters, SgdOptions options)
        : Optimizer(std::move(parameters), options.learning_rate,
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

class AdamW final : public Optimizer {
  public:
    AdamW(std::vector<Tensor> parameters, AdamWOptions options)
        : Optimizer(std::move(parameters), options.learning_rate, {"exp_avg", "exp_avg_sq"}),
          options_(options) {}
    std::string_view name() const override { return "adamw"; }

  private:
    void update(std::size_t parameter, std::span<float> values, std::span<const float> gradient) override {
        const auto t = static_cast<double>(steps());
        const double correction1 = 1 - std::pow(options_.beta1, t);
        const double correction2 = 1 - std::pow(options_.beta2, t);
        const auto keep = static_cast<float>(1 - learning_rate() * options_.weight_decay);
        const auto rate = static_cast<float>(learning_rate() / correction1);
        const auto root = static_cast<float>(1 / std::sqrt(correction2));
        const auto epsilon = static_cast<float>(options_.epsilon);
        const auto b1 = static_cast<float>(options_.beta1), b2 = static_cast<float>(options_.beta2);
        const auto a1 = static_cast<float>(1 - options_.beta1), a2 = static_cast<float>(1 - options_.beta2);
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

    AdamWOptions options_;
};

}  // namespace

Optimizer::Optimizer(std::vector<Tensor> parameters, double learning_rate,
                     std::vector<std::string_view> slots)
    : parameters_(std::move(parameters)), learning_rate_(learning_rate), slot_names_(std::move(slots)) {
    check_tensors(parameters_);
    for (const Tensor& parameter : parameters_) {
        if (parameter.memory.dtype != DType::F32 || parameter.memory.device != Device{})
            throw InvalidInput(
                fmt::format("optimizer: parameter '{}' is {}; only float32 in host memory is updated",
                            parameter.name, describe(parameter)));
    }
    for (std::size_t s = 0; s < slot_names_.size(); ++s)
        for (const Tensor& parameter : parameters_) slots_.emplace_back(parameter.memory.count, 0.0F);
}

std::span<float> Optimizer::slot(std::size_t which, std::size_t parameter) {
    return slots_[which * parameters_.size() + parameter];
}

void Optimizer::step(std::span<const Buffer> gradients) {
    if (gradients.size() != parameters_.size())
        throw InvalidInput(
            fmt::format("optimizer: {} gradients for {} parameters", gradients.size(), parameters_.size()));
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        const Buffer& memory = parameters_[i].memory;
        if (gradients[i].data != nullptr &&
            (gradients[i].count != memory.count || gradients[i].dtype != memory.dtype))
            throw InvalidInput(
                fmt::format("optimizer: the gradient of '{}' has {} elements of {}, the parameter is {}",
                            parameters_[i].name, gradients[i].count, name_of(gradients[i].dtype),
                            describe(parameters_[i])));
    }
    ++steps_;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        if (gradients[i].data == nullptr) continue;
        const std::size_t count = gradients[i].count;
        update(i, {static_cast<float*>(parameters_[i].memory.data), count},
               {static_cast<const float*>(gradients[i].data), count});
    }
}

std::vector<Tensor> Optimizer::state() const {
    std::vector<Tensor> tensors;
    for (std::size_t s = 0; s < slot_names_.size(); ++s) {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            tensors.push_back(tensor_of(fmt::format("{}.{}", slot_names_[s], parameters_[i].name),
                                        std::span(slots_[s * parameters_.size() + i]), parameters_[i].shape));
        }
    }
    return tensors;
}

std::unique_ptr<Optimizer> make_sgd(std::vector<Tensor> parameters, SgdOptions options) {
    require(options.learning_rate >= 0, "sgd", "the learning rate is negative");
    require(options.momentum >= 0, "sgd", "the momentum is negative");
    require(options.weight_decay >= 0, "sgd", "the weight decay is negative");
    require(!options.nesterov || options.momentum > 0, "sgd", "nesterov needs a momentum");
    return std::make_unique<Sgd>(std::move(parameters), options);
}

std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options) {
    require(options.learning_rate >= 0, "adamw", "the learning rate is negative");
    require(options.beta1 >= 0 && options.beta1 < 1, "adamw", "beta1 is not in [0, 1)");
    require(options.beta2 >= 0 && options.beta2 < 1, "adamw", "beta2 is not in [0, 1)");
    require(options.epsilon >= 0, "adamw", "epsilon is negative");
    require(options.weight_decay >= 0, "adamw", "the weight decay is negative");
    return std::make_unique<AdamW>(std::move(parameters), options);
}

}  // namespace ddp
