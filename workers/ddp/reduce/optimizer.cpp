#include "ddp/optimizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/device_optimizer.h"
#include "ddp/reduce/model_optimizer.h"
#include "ddp/worker/private_memory.h"
#include "ddp/worker/slices.h"

namespace ddp {
namespace {

void require(bool holds, std::string_view optimizer, std::string_view what) {
    if (!holds) throw InvalidInput(fmt::format("{}: {}", optimizer, what));
}

/// For rates, decays and the like: throws if negative, NaN or infinite.
void require_amount(double value, std::string_view optimizer, std::string_view what) {
    require(value >= 0, optimizer, fmt::format("{} is {}", what, value < 0 ? "negative" : "not a number"));
    require(std::isfinite(value), optimizer, fmt::format("{} is infinite", what));
}

bool are_on_device(std::span<const Tensor> parameters) {
    return !parameters.empty() && parameters.front().memory.device.kind == Device::Kind::Cuda;
}

/// Empty for host memory.
std::string at(const Device& device) {
    return device.kind == Device::Kind::Cpu ? "" : fmt::format(" on CUDA device {}", device.index);
}

/// Elements per block where gradient, parameter and state differ in type: a block stays in the nearest cache.
constexpr std::size_t kBlock = 2048;

/// The elements from `at`: converted to float32 in `scratch`, or float32 in place.
const float* as_floats(const Buffer& from, std::size_t at, std::span<float> scratch) {
    if (from.dtype == DType::F32) return static_cast<const float*>(from.data) + at;
    const std::byte* const first = static_cast<const std::byte*>(from.data) + at * size_of(from.dtype);
    device::to_floats(*cuda::element_type(from.dtype), first, scratch.data(), scratch.size());
    return scratch.data();
}

/// `Rule` derives from it, and has step_by(parameter, elements), begin_step() and begin_parameter(parameter).
template <class Rule>
class HostOptimizer : public Optimizer {
  public:
    std::vector<Tensor> state() const override {
        std::vector<Tensor> tensors;
        for (std::size_t s = 0; s < slot_names_.size(); ++s) {
            for (std::size_t i = 0; i < parameters().size(); ++i)
                tensors.push_back(state_tensor(slot_names_[s], i, slot(s, i)));
        }
        for (std::size_t i = 0; i < parameters().size(); ++i) {
            if (has_master(i)) tensors.push_back(state_tensor("master", i, master(i)));
        }
        tensors.push_back({std::string(kStepsName), {}, {&steps_, 1, DType::I64, {}}});
        return tensors;
    }
    std::uint64_t steps() const override { return steps_; }

  protected:
    /// Neighbouring elements of one parameter, with their gradients and states.
    template <class T>
    struct Elements {
        T* value;
        const T* gradient;
        std::array<T*, 2> slots;
        std::size_t count;
    };

    /// `slots` names the states of each parameter, two at most (float32, float64 for float64 parameters; zero
    /// at the start).
    HostOptimizer(std::vector<Tensor> all, double learning_rate, std::vector<std::string_view> slots,
                  const StateMemory& memory)
        : Optimizer(std::move(all), {&learning_rate, 1}), slot_names_(std::move(slots)) {
        for (const Tensor& parameter : parameters()) {
            if (parameter.memory.device != Device{} || !is_floating(parameter.memory.dtype))
                throw InvalidInput(fmt::format(
                    "optimizer: parameter '{}' is {}{}; only float32, bfloat16 and float16 in host memory or "
                    "all on one CUDA device, and float64 in host memory, is updated",
                    parameter.name, describe(parameter), at(parameter.memory.device)));
        }
        std::size_t slot_bytes = 0, master_bytes = 0;
        bool any_master = false;
        for (std::size_t i = 0; i < parameters().size(); ++i) {
            const std::size_t bytes = round_up(parameters()[i].memory.count * size_of(state_type(i)), 64);
            slot_offsets_.push_back(std::exchange(slot_bytes, slot_bytes + bytes));
            master_offsets_.push_back(master_bytes);
            master_bytes += has_master(i) ? bytes : 0;
            any_master |= has_master(i);
        }
        for (std::size_t s = 0; s < slot_names_.size(); ++s) slots_.push_back(memory(slot_bytes));
        if (any_master) masters_ = memory(master_bytes);
        for (std::size_t i = 0; i < parameters().size(); ++i) {
            if (has_master(i)) copy_master(i);
        }
    }
    void begin_step() {}
    void begin_parameter(std::size_t /*parameter*/) {}

  private:
    Rule& rule() { return static_cast<Rule&>(*this); }
    static bool is_floating(DType type) { return type == DType::F64 || is_float_of_32_bits_or_less(type); }
    static bool is_float_of_32_bits_or_less(DType type) {
        return type == DType::F32 || type == DType::BF16 || type == DType::F16;
    }
    [[nodiscard]] DType state_type(std::size_t i) const {
        return parameters()[i].memory.dtype == DType::F64 ? DType::F64 : DType::F32;
    }
    [[nodiscard]] bool has_master(std::size_t i) const { return size_of(parameters()[i].memory.dtype) == 2; }
    [[nodiscard]] std::byte* slot(std::size_t which, std::size_t parameter) const {
        return which < slot_names_.size() ? slots_[which].get() + slot_offsets_[parameter] : nullptr;
    }
    [[nodiscard]] std::byte* master(std::size_t i) const { return masters_.get() + master_offsets_[i]; }
    [[nodiscard]] Tensor state_tensor(std::string_view kind, std::size_t i, std::byte* memory) const {
        const Tensor& parameter = parameters()[i];
        return {fmt::format("{}.{}", kind, parameter.name),
                parameter.shape,
                {memory, parameter.memory.count, state_type(i), {}},
                parameter.part_begin};
    }
    void copy_master(std::size_t i) {
        const Buffer& memory = parameters()[i].memory;
        as_floats(memory, 0, {reinterpret_cast<float*>(master(i)), memory.count});
    }

    bool takes_gradient(DType gradient, DType parameter) const override {
        return gradient == parameter ||
               (is_float_of_32_bits_or_less(gradient) && is_float_of_32_bits_or_less(parameter));
    }
    void update(std::span<const Buffer> gradients) override {
        ++steps_;
        rule().begin_step();
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            if (gradients[i].data == nullptr) continue;
            rule().begin_parameter(i);
            const Buffer& memory = parameters()[i].memory;
            if (memory.dtype == DType::F64) step_in_place<double>(i, gradients[i]);
            else if (memory.dtype == DType::F32 && gradients[i].dtype == DType::F32)
                step_in_place<float>(i, gradients[i]);
            else step_in_blocks(i, gradients[i]);
        }
    }
    /// The `count` elements from `at`; `gradient` points to the first of them.
    template <class T>
    Elements<T> elements(std::size_t i, void* values, const T* gradient, std::size_t at,
                         std::size_t count) const {
        const auto state = [&](std::size_t which) {
            std::byte* const memory = slot(which, i);
            return memory != nullptr ? reinterpret_cast<T*>(memory) + at : nullptr;
        };
        return {static_cast<T*>(values) + at, gradient, {state(0), state(1)}, count};
    }
    template <class T>
    void step_in_place(std::size_t i, const Buffer& gradient) {
        const Buffer& memory = parameters()[i].memory;
        rule().step_by(i, elements(i, memory.data, static_cast<const T*>(gradient.data), 0, memory.count));
    }
    void step_in_blocks(std::size_t i, const Buffer& gradient) {
        const Buffer& memory = parameters()[i].memory;
        void* const values = has_master(i) ? master(i) : memory.data;
        std::array<float, kBlock> scratch;
        for (std::size_t at = 0; at < memory.count; at += kBlock) {
            const std::size_t count = std::min(kBlock, memory.count - at);
            const Elements<float> block =
                elements(i, values, as_floats(gradient, at, std::span(scratch).first(count)), at, count);
            rule().step_by(i, block);
            if (has_master(i))
                device::round_floats(block.value, *cuda::element_type(memory.dtype),
                                     static_cast<std::byte*>(memory.data) + at * size_of(memory.dtype),
                                     count);
        }
    }

    std::vector<std::string_view> slot_names_;
    std::vector<std::shared_ptr<std::byte>> slots_;  ///< of all parameters
    std::shared_ptr<std::byte> masters_;             ///< float32 masters of 16-bit parameters
    std::vector<std::size_t> slot_offsets_, master_offsets_;
    mutable std::uint64_t steps_ = 0;
};

class Sgd final : public HostOptimizer<Sgd> {
  public:
    Sgd(std::vector<Tensor> parameters, const SgdOptions& options, const StateMemory& memory)
        : HostOptimizer(std::move(parameters), options.learning_rate,
                        options.momentum > 0 ? std::vector<std::string_view>{"momentum"}
                                             : std::vector<std::string_view>{},
                        memory),
          decay_(options.weight_decay),
          momentum_(options.momentum),
          nesterov_(options.nesterov) {}
    std::string_view name() const override { return "sgd"; }

    template <class T>
    void step_by(std::size_t /*parameter*/, const Elements<T>& elements) const {
        const auto rate = static_cast<T>(learning_rate()), decay = static_cast<T>(decay_);
        T* __restrict__ p = elements.value;
        const T* __restrict__ g = elements.gradient;
        if (momentum_ == 0) {
            for (std::size_t i = 0; i < elements.count; ++i) p[i] -= rate * (g[i] + decay * p[i]);
            return;
        }
        const auto momentum = static_cast<T>(momentum_);
        // Nesterov's step adds the gradient to the momentum's part of the velocity; a plain step is the
        // velocity.
        const T of_gradient = nesterov_ ? 1 : 0;
        const T of_velocity = nesterov_ ? momentum : 1;
        T* __restrict__ v = elements.slots[0];
        for (std::size_t i = 0; i < elements.count; ++i) {
            const T d = g[i] + decay * p[i];
            v[i] = momentum * v[i] + d;
            p[i] -= rate * (of_gradient * d + of_velocity * v[i]);
        }
    }

  private:
    double decay_, momentum_;
    bool nesterov_;
};

class AdamW final : public HostOptimizer<AdamW> {
  public:
    AdamW(std::vector<Tensor> parameters, const AdamWOptions& options, const StateMemory& memory)
        : HostOptimizer(std::move(parameters), options.learning_rate, {"exp_avg", "exp_avg_sq"}, memory),
          epsilon_(options.epsilon),
          factors_(device::adamw_scalars(options)),
          corrections_(this->parameters().size()) {}
    std::string_view name() const override { return "adamw"; }
    std::vector<Tensor> state() const override {
        std::vector<Tensor> tensors = HostOptimizer::state();
        device::append_step_counts(tensors, parameters(), corrections_.data());
        return tensors;
    }

    // The device uses the same functions: the factors are equal to the bit.
    void begin_step() { factors_.learning_rate = learning_rate(); }
    void begin_parameter(std::size_t parameter) { ++corrections_[parameter].step; }
    template <class T>
    void step_by(std::size_t parameter, const Elements<T>& elements) const {
        const std::uint64_t step = corrections_[parameter].step;
        const auto keep = static_cast<T>(device::decay_factor(factors_));
        const auto rate = static_cast<T>(device::corrected_rate(factors_, step));
        const auto root = static_cast<T>(device::correction_root(factors_, step));
        const auto epsilon = static_cast<T>(epsilon_);
        const auto b1 = static_cast<T>(factors_.beta1), a1 = static_cast<T>(1 - factors_.beta1);
        const auto b2 = static_cast<T>(factors_.beta2), a2 = static_cast<T>(1 - factors_.beta2);
        T* __restrict__ p = elements.value;
        T* __restrict__ m = elements.slots[0];
        T* __restrict__ v = elements.slots[1];
        const T* __restrict__ g = elements.gradient;
        for (std::size_t i = 0; i < elements.count; ++i) {
            m[i] = b1 * m[i] + a1 * g[i];
            v[i] = b2 * v[i] + a2 * g[i] * g[i];
            p[i] = keep * p[i] - rate * m[i] / (std::sqrt(v[i]) * root + epsilon);
        }
    }

  private:
    double epsilon_;
    device::StepScalars factors_;
    mutable std::vector<device::Correction> corrections_;  ///< one per parameter
};

/// One optimizer per group, behind one interface.
class Grouped final : public Optimizer {
  public:
    struct Part {
        std::unique_ptr<Optimizer> optimizer;
        std::vector<std::size_t> parameters;
    };
    Grouped(std::vector<Tensor> all, std::vector<Part> parts)
        : Optimizer(std::move(all), rates_of(parts)), parts_(std::move(parts)) {}

    std::string_view name() const override { return parts_.back().optimizer->name(); }
    std::vector<Tensor> state() const override {
        std::vector<Tensor> tensors;
        for (const Part& part : parts_) {
            for (Tensor& tensor : part.optimizer->state()) {
                if (&part == &parts_.back() || tensor.name != kStepsName)
                    tensors.push_back(std::move(tensor));
            }
        }
        return tensors;
    }
    // All groups are stepped together, so one count serves all. The last group has parameters, and counts on
    // their device.
    std::uint64_t steps() const override { return parts_.back().optimizer->steps(); }

  private:
    static std::vector<double> rates_of(const std::vector<Part>& parts) {
        std::vector<double> rates;
        for (const Part& part : parts) rates.push_back(part.optimizer->learning_rate());
        return rates;
    }
    // Each group's optimizer checks its own gradients.
    bool takes_gradient(DType, DType) const override { return true; }
    void update(std::span<const Buffer> gradients) override {
        std::vector<Buffer> of_part;
        for (const Part& part : parts_) {
            of_part.clear();
            for (const std::size_t i : part.parameters) of_part.push_back(gradients[i]);
            part.optimizer->step(of_part);
        }
    }
    void learning_rate_changed(std::size_t group) override {
        parts_[group].optimizer->set_learning_rate(learning_rate(group));
    }

    std::vector<Part> parts_;
};

/// The indices of the parameters of each group: group 0, then those of the options. Throws InvalidInput for a
/// name that is not a parameter, or is in two groups.
std::vector<std::vector<std::size_t>> divide(std::span<const Tensor> parameters,
                                             std::span<const ParameterGroup> groups,
                                             std::string_view optimizer) {
    std::vector<std::size_t> group_of(parameters.size(), 0);
    for (std::size_t g = 0; g < groups.size(); ++g) {
        require(!groups[g].parameters.empty(), optimizer,
                fmt::format("parameter group {} names no parameter", g + 1));
        for (const std::string& name : groups[g].parameters) {
            const auto found = std::find_if(parameters.begin(), parameters.end(),
                                            [&](const Tensor& p) { return p.name == name; });
            require(found != parameters.end(), optimizer,
                    fmt::format("parameter group {} names '{}', which is not a parameter", g + 1, name));
            std::size_t& group = group_of[static_cast<std::size_t>(found - parameters.begin())];
            require(group == 0, optimizer,
                    fmt::format("parameter '{}' is in group {} and in group {}", name, group, g + 1));
            group = g + 1;
        }
    }
    std::vector<std::vector<std::size_t>> divided(groups.size() + 1);
    for (std::size_t i = 0; i < parameters.size(); ++i) divided[group_of[i]].push_back(i);
    return divided;
}

/// The options of group g, with its own settings and its parameters' copies.
template <class Options>
Options options_of_group(const Options& all, std::size_t g, std::span<const std::size_t> parameters) {
    Options own = all;
    own.groups.clear();
    if (g > 0) {
        own.learning_rate = all.groups[g - 1].learning_rate.value_or(all.learning_rate);
        own.weight_decay = all.groups[g - 1].weight_decay.value_or(all.weight_decay);
    }
    if (all.device.copies.empty()) return own;
    own.device.copies.clear();
    for (const std::size_t i : parameters) own.device.copies.push_back(all.device.copies[i]);
    return own;
}

template <class Options>
std::unique_ptr<Optimizer> make_grouped(std::vector<Tensor> parameters, const Options& options,
                                        std::string_view name, const StateMemory& memory) {
    const std::size_t copies = options.device.copies.size();
    require(copies == 0 || copies == parameters.size(), name,
            fmt::format("{} copies for {} parameters", copies, parameters.size()));
    const std::vector<std::vector<std::size_t>> divided = divide(parameters, options.groups, name);
    std::vector<Grouped::Part> parts;
    for (std::size_t g = 0; g < divided.size(); ++g) {
        std::vector<Tensor> of_group;
        for (const std::size_t i : divided[g]) of_group.push_back(parameters[i]);
        parts.push_back(
            {make_optimizer(std::move(of_group), options_of_group(options, g, divided[g]), memory),
             divided[g]});
    }
    return std::make_unique<Grouped>(std::move(parameters), std::move(parts));
}

}  // namespace

Optimizer::Optimizer(std::vector<Tensor> parameters, std::span<const double> learning_rates)
    : parameters_(std::move(parameters)) {
    check_parameters(parameters_);
    for (const double rate : learning_rates) rates_.push_back({rate, rate});
}

const Optimizer::Rate& Optimizer::rate_of(std::size_t group) const {
    require(
        group < rates_.size(), name(),
        fmt::format("there is no parameter group {}; there are {}, counted from 0", group, rates_.size()));
    return rates_[group];
}

void Optimizer::set_learning_rate(double rate, std::size_t group) {
    require_amount(rate, name(), "the learning rate");
    if (rate == rate_of(group).now) return;
    rates_[group].now = rate;
    learning_rate_changed(group);
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

std::unique_ptr<Optimizer> make_optimizer(std::vector<Tensor> parameters, SgdOptions options,
                                          const StateMemory& memory) {
    require_amount(options.learning_rate, "sgd", "the learning rate");
    require_amount(options.momentum, "sgd", "the momentum");
    require_amount(options.weight_decay, "sgd", "the weight decay");
    require(!options.nesterov || options.momentum > 0, "sgd", "nesterov needs a momentum");
    if (!options.groups.empty()) return make_grouped(std::move(parameters), options, "sgd", memory);
    if (are_on_device(parameters)) return cuda::make_device_sgd(std::move(parameters), options);
    return std::make_unique<Sgd>(std::move(parameters), options, memory);
}

std::unique_ptr<Optimizer> make_optimizer(std::vector<Tensor> parameters, AdamWOptions options,
                                          const StateMemory& memory) {
    require_amount(options.learning_rate, "adamw", "the learning rate");
    require(options.beta1 >= 0 && options.beta1 < 1, "adamw", "beta1 is not in [0, 1)");
    require(options.beta2 >= 0 && options.beta2 < 1, "adamw", "beta2 is not in [0, 1)");
    require_amount(options.epsilon, "adamw", "epsilon");
    require_amount(options.weight_decay, "adamw", "the weight decay");
    if (!options.groups.empty()) return make_grouped(std::move(parameters), options, "adamw", memory);
    if (are_on_device(parameters)) return cuda::make_device_adamw(std::move(parameters), options);
    return std::make_unique<AdamW>(std::move(parameters), options, memory);
}

std::unique_ptr<Optimizer> make_sgd(std::vector<Tensor> parameters, SgdOptions options) {
    return make_optimizer(std::move(parameters), std::move(options), private_memory);
}

std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options) {
    return make_optimizer(std::move(parameters), std::move(options), private_memory);
}

}  // namespace ddp
