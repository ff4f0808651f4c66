#pragma once

// The standard library says which ABI it is; LibTorch's headers come after the check.
#include <string>
#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI == 0
#error \
    "libddp has the C++11 ABI of std::string, and this program is compiled for the old one: \
take a LibTorch built with the C++11 ABI, and compile with -D_GLIBCXX_USE_CXX11_ABI=1"
#endif

#include <torch/csrc/autograd/engine.h>
#include <torch/data/samplers/base.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/context.h"
#include "ddp/model.h"
#include "ddp/optimizer.h"
#include "ddp/process_group.h"
#include "ddp/recovery.h"
#include "ddp/sampler.h"
#include "ddp/types.h"

/// LibTorch (1.13 to 2.15, on CPUs) over libddp: docs/libtorch.md. Only programs that include this header
/// need LibTorch.
namespace ddp::pytorch {
namespace detail {

inline DType dtype_of(const std::string& name, const torch::Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case torch::kFloat: return DType::F32;
        case torch::kDouble: return DType::F64;
        case torch::kBFloat16: return DType::BF16;
        case torch::kHalf: return DType::F16;
        case torch::kInt: return DType::I32;
        case torch::kLong: return DType::I64;
        case torch::kByte: return DType::U8;
        case torch::kChar: return DType::I8;
        case torch::kBool: return DType::Bool;
        default: break;
    }
    throw InvalidInput("'" + name + "' is a tensor of " + c10::toString(tensor.scalar_type()) +
                       ", a type that libddp does not have");
}

/// The memory of a parameter or buffer. Throws InvalidInput for one that libddp cannot use as it is.
inline Tensor described(const std::string& name, const torch::Tensor& tensor) {
    if (!tensor.device().is_cpu())
        throw InvalidInput(
            "'" + name + "' is on " + tensor.device().str() +
            ": the LibTorch adapter is for CPUs; move the module there, module->to(torch::kCPU)");
    if (tensor.layout() != torch::kStrided)
        throw InvalidInput("'" + name + "' is sparse: only dense parameters and buffers can be trained");
    if (!tensor.is_contiguous())
        throw InvalidInput("'" + name + "' is not contiguous: call " + name + ".set_data(" + name +
                           ".contiguous()) before the module is wrapped");
    return {name,
            tensor.sizes().vec(),
            {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()), dtype_of(name, tensor), {}}};
}

/// A tensor of a module, with the memory that it has to keep.
struct Place {
    std::string name;
    torch::Tensor tensor;
    const void* memory = nullptr;
    torch::ScalarType type = torch::kFloat;
    bool requires_grad = false;
    [[nodiscard]] bool holds() const { return tensor.data_ptr() == memory && tensor.scalar_type() == type; }
    /// True for one that a program trains itself, and whose gradient no rank would average.
    [[nodiscard]] bool is_unfrozen() const {
        return !requires_grad && tensor.is_leaf() && tensor.requires_grad();
    }
};

/// The tensors of a module: one that several layers share is listed once, under its first name.
struct ModuleTensors {
    std::vector<Place> trained, others;
    std::vector<TensorSpec> specs;
    std::vector<Tensor> buffers, frozen;

    explicit ModuleTensors(const torch::nn::Module* module) {
        if (module == nullptr) throw InvalidInput("there is no module to train: the holder is empty");
        std::set<const void*> seen;
        std::vector<Tensor> parameters;
        for (const auto& item : module->named_parameters()) {
            if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
            const bool trains = item.value().requires_grad();
            (trains ? parameters : frozen).push_back(described(item.key(), item.value()));
            (trains ? trained : others).push_back(place_of(item.key(), item.value()));
        }
        check_parameters(parameters);
        for (const Tensor& one : parameters) specs.push_back({one.name, one.shape, one.memory.dtype});
        for (const auto& item : module->named_buffers()) {
            if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
            buffers.push_back(described(item.key(), item.value()));
            others.push_back(place_of(item.key(), item.value()));
        }
    }
    static Place place_of(const std::string& name, const torch::Tensor& tensor) {
        return {name, tensor, tensor.data_ptr(), tensor.scalar_type(), tensor.requires_grad()};
    }
    [[nodiscard]] ModelOptions with_buffers(ModelOptions options) const {
        if (options.shard > Shard::Optimizer)
            throw InvalidInput(std::string("Shard::") +
                               (options.shard == Shard::Gradients ? "Gradients" : "Parameters") +
                               ": LibTorch keeps whole gradients and weights; use Shard::Optimizer");
        if (options.overlaps_gather || !options.buffers.empty())
            throw InvalidInput("overlaps_gather and buffers are not for a LibTorch module: leave them out");
        options.buffers = buffers;
        options.accumulates = true;
        return options;
    }
};

/// The base is made from the module's tensors, which thus come before it.
struct HasModuleTensors {
    ModuleTensors tensors_;
};

/// All of DistributedDataParallel that does not depend on the module's type.
class Wrapped : private HasModuleTensors, public Model {
  public:
    /// The parameters that are trained, for an optimizer of torch::optim; one that layers share is there
    /// once.
    [[nodiscard]] std::vector<torch::Tensor> torch_parameters() const {
        std::vector<torch::Tensor> all;
        for (const Place& one : tensors_.trained) all.push_back(one.tensor);
        return all;
    }
    /// As Model::attach.
    void attach(ProcessGroup& group, bool broadcast = true) override {
        forget_gradients();
        if (!is_adopted_) {
            Model::attach(group, false);
            adopt(group.rank() == 0 || !shares_weights_);
            if (broadcast || !outlives_group_) broadcast_all();
        } else {
            Model::attach(group, broadcast);
            if (broadcast) broadcast_frozen();
        }
        view_gradients();
    }
    /// Keeps parameters as Committed, and buffers as Own: the backward pass calls recovery.prepare() where
    /// there are some. A model without buffers can be kept as any other. Borrows the recovery.
    void keep_in(Recovery& recovery, const std::string& name = "model") {
        std::vector<Tensor> weights{parameters().begin(), parameters().end()};
        weights.insert(weights.end(), tensors_.frozen.begin(), tensors_.frozen.end());
        recovery.keep(name, std::move(weights));
        if (tensors_.buffers.empty()) return;
        recovery.keep(name + " buffers", tensors_.buffers, Recovery::Kind::Own);
        recovery_ = &recovery;
    }
    /// Forgets the gradients, which costs nothing: the next backward pass overwrites them. The same as
    /// zero_grad() of a torch::optim optimizer of LibTorch 2, and faster than that of 1.13.
    void zero_grad() {
        for (const Place& one : tensors_.trained) one.tensor.mutable_grad().reset();
    }
    /// For a checkpoint, by the names of Python's state_dict: a tensor that layers share has its first name.
    [[nodiscard]] std::vector<Tensor> state() const override {
        std::vector<Tensor> all = Model::state();
        all.insert(all.end(), tensors_.frozen.begin(), tensors_.frozen.end());
        return all;
    }

    Wrapped(const Wrapped&) = delete;
    Wrapped& operator=(const Wrapped&) = delete;

  protected:
    Wrapped(const torch::nn::Module* module, const ModelOptions& options)
        : HasModuleTensors{ModuleTensors(module)},
          Model(tensors_.specs, tensors_.with_buffers(options)),
          shares_weights_(options.share_weights),
          outlives_group_(options.shard == Shard::None) {
        if (outlives_group_) adopt(true);
        hook_gradients();
    }
    Wrapped(ProcessGroup& group, const torch::nn::Module* module, const ModelOptions& options)
        : HasModuleTensors{ModuleTensors(module)},
          Model(group, tensors_.specs, tensors_.with_buffers(options)),
          shares_weights_(options.share_weights),
          outlives_group_(options.shard == Shard::None) {
        verify_same_tensors(group, tensors_.frozen);
        adopt(group.rank() == 0 || !shares_weights_);
        broadcast_all();
        hook_gradients();
        view_gradients();
    }
    /// The module gets memory of its own again.
    ~Wrapped() override {
        self_.reset();
        forget_gradients();
        if (!is_adopted_) return;
        const torch::NoGradGuard plain;
        for (const Place& one : tensors_.trained) {
            // The group's memory may be gone.
            const bool lives = outlives_group_ || has_group();
            if (one.holds())
                one.tensor.set_data(lives ? one.tensor.detach().clone()
                                          : torch::empty({0}, one.tensor.options()));
        }
    }

    void prepare_forward() {
        for (const auto* places : {&tensors_.trained, &tensors_.others}) {
            for (const Place& one : *places) {
                if (!one.holds())
                    throw Error(
                        "'" + one.name +
                        "' has other memory or another type than when the module was wrapped: call to() and "
                        "set_data() before that");
                if (one.is_unfrozen())
                    throw Error("'" + one.name +
                                "' requires a gradient now, and did not when the module was wrapped: its "
                                "gradient would not be averaged; unfreeze it before that, or wrap the module "
                                "again");
            }
        }
        is_in_backward_ = false;  // the last backward pass may have thrown
        begin_forward();
    }
    /// Makes the backward pass from `output` end with the averages. The hooks of the parameters do it too,
    /// but one inside a nested backward pass (recomputed activations) would mean the nested one.
    template <class Output>
    void watch(const Output& output) {
        if constexpr (std::is_same_v<Output, torch::Tensor>) {
            if (output.requires_grad() && !output.is_leaf())
                output.register_hook([self = std::weak_ptr(self_)](const torch::Tensor&) {
                    if (const auto wrapped = self.lock()) (*wrapped)->begin_backward();
                });
        } else if constexpr (requires { std::tuple_size<Output>::value; }) {
            std::apply([this](const auto&... each) { (watch(each), ...); }, output);
        } else if constexpr (requires { watch(*output.begin()); }) {
            for (const auto& each : output) watch(each);
        }
    }

  private:
    using Accumulator =
        std::decay_t<decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::Tensor&>()))>;

    /// Called by the node of the autograd graph that has added to a parameter's .grad.
    class GradientHook final : public torch::autograd::FunctionPostHook {
      public:
        GradientHook(std::weak_ptr<Wrapped*> self, std::size_t parameter)
            : self_(std::move(self)), parameter_(parameter) {}
        torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                  const torch::autograd::variable_list& gradients) override {
            if (const auto wrapped = self_.lock()) (*wrapped)->take_gradient(parameter_, gradients);
            return outputs;
        }

      private:
        std::weak_ptr<Wrapped*> self_;  ///< a graph may outlive the model
        std::size_t parameter_;
    };

    [[nodiscard]] torch::Tensor over(const Buffer& memory, const torch::Tensor& like) const {
        return torch::from_blob(memory.data, like.sizes(), like.options().requires_grad(false));
    }
    /// Moves the parameters into the model's memory; `fill`: with their values.
    void adopt(bool fill) {
        const torch::NoGradGuard plain;
        const std::span<const Tensor> weights = parameters();
        for (std::size_t i = 0; i < weights.size(); ++i) {
            Place& place = tensors_.trained[i];
            const torch::Tensor view = over(weights[i].memory, place.tensor);
            if (fill) view.copy_(place.tensor);
            place.tensor.set_data(view);
            place.memory = view.data_ptr();
        }
        is_adopted_ = true;
    }
    void broadcast_all() {
        broadcast_weights();
        broadcast_frozen();
    }
    void broadcast_frozen() {
        for (const Tensor& one : tensors_.frozen) group().broadcast(one.memory, 0).wait();
    }
    void hook_gradients() {
        for (std::size_t i = 0; i < tensors_.trained.size(); ++i) {
            accumulators_.push_back(torch::autograd::impl::grad_accumulator(tensors_.trained[i].tensor));
            accumulators_.back()->add_post_hook(std::make_unique<GradientHook>(self_, i));
        }
    }
    void view_gradients() {
        views_.clear();
        for (std::size_t i = 0; i < tensors_.trained.size(); ++i)
            views_.push_back(over(gradient(i), tensors_.trained[i].tensor));
    }
    /// Their memory goes with the group.
    void forget_gradients() {
        zero_grad();
        views_.clear();
        is_in_backward_ = false;
        taken_ = 0;
    }

    void begin_backward() {
        if (std::exchange(is_in_backward_, true)) return;
        if (recovery_ != nullptr && !is_accumulating()) recovery_->prepare();
        torch::autograd::Engine::get_default_engine().queue_callback([self = std::weak_ptr(self_)] {
            if (const auto wrapped = self.lock()) (*wrapped)->end_backward();
        });
    }
    void take_gradient(std::size_t i, const torch::autograd::variable_list& gradients) {
        if (views_.empty()) throw Error("the model has no group yet: call attach() first");
        begin_backward();
        if (!gradients.empty() && gradients[0].defined() && gradients[0].layout() != torch::kStrided)
            throw InvalidInput(
                "the gradient of '" + tensors_.trained[i].name +
                "' is sparse: only dense ones can be averaged; make the layer with sparse(false)");
        torch::Tensor& grad = tensors_.trained[i].tensor.mutable_grad();
        ++taken_;
        if (!grad.defined() || grad.data_ptr() != views_[i].data_ptr()) {
            // LibTorch has put its own tensor there, or none for a gradient that it knows to be zero.
            const torch::NoGradGuard plain;
            if (grad.defined()) views_[i].copy_(grad);
            else views_[i].zero_();
            grad = views_[i];
        }
        mark_ready(i);
    }
    void end_backward() {
        is_in_backward_ = false;
        if (std::exchange(taken_, 0) == 0 || views_.empty()) return;
        finish();
        if (is_accumulating()) return;
        // Of a sharded model no rank has whole averages, with which an optimizer of torch::optim would step.
        if (shard() != Shard::None) return zero_grad();
        for (std::size_t i = 0; i < views_.size(); ++i) {
            torch::Tensor& grad = tensors_.trained[i].tensor.mutable_grad();
            if (!grad.defined() && is_used(i)) grad = views_[i];
        }
    }

    const bool shares_weights_, outlives_group_;
    bool is_adopted_ = false;           ///< the parameters are in the model's memory
    std::vector<torch::Tensor> views_;  ///< of the gradients in the buckets; empty without a group
    std::vector<Accumulator> accumulators_;
    bool is_in_backward_ = false;   ///< end_backward() will be called
    Recovery* recovery_ = nullptr;  ///< that wants to know when buffers are final for a unit
    std::size_t taken_ = 0;         ///< gradients in this backward pass
    std::shared_ptr<Wrapped*> self_ = std::make_shared<Wrapped*>(this);  ///< null once this is destroyed
};

}  // namespace detail

/// torch.nn.parallel.DistributedDataParallel for a module of LibTorch: loss.backward() returns averaged
/// gradients, in parameters' .grad as always. It is a ddp::Model, whose other calls apply: no_sync,
/// Shard::Optimizer with make_adamw(model, ...), clip_grad_norm, Join, request_stop, checkpoints, Recovery.
///
///     ddp::pytorch::DistributedDataParallel model(*group, net);   // net: a holder, or a shared_ptr
///     torch::optim::SGD optimizer(net->parameters(), 0.1);
///     for (auto& batch : *loader) {
///         optimizer.zero_grad();
///         loss_of(model(batch.data), batch.target).backward();
///         optimizer.step();
///     }
///
/// Parameters and buffers stay the module's own tensors; parameters move into flat memory. Frozen ones
/// (requires_grad false) and buffers are sent from rank 0 at construction, buffers again in each forward().
/// Gradients are views of the buckets. finish() and mark_ready() are called by the backward pass, whose call
/// throws their errors, with their types. The group outlives a model with Shard::Optimizer.
///
/// InvalidInput for a tensor that is sparse, not contiguous, or not on the CPU, and for two parameters that
/// are different tensors over the same memory.
template <class Module>
class DistributedDataParallel final : public detail::Wrapped {
  public:
    /// Collective. Of the options, `buffers`, `device`, `accumulates` and `overlaps_gather` are not for
    /// modules; `shard` is None or Optimizer.
    DistributedDataParallel(ProcessGroup& group, std::shared_ptr<Module> module,
                            const ModelOptions& options = {})
        : Wrapped(group, module.get(), options), module_(std::move(module)) {}
    DistributedDataParallel(ProcessGroup& group, const torch::nn::ModuleHolder<Module>& module,
                            const ModelOptions& options = {})
        : DistributedDataParallel(group, module.is_empty() ? nullptr : module.ptr(), options) {}
    /// Without a group until attach().
    explicit DistributedDataParallel(std::shared_ptr<Module> module, const ModelOptions& options = {})
        : Wrapped(module.get(), options), module_(std::move(module)) {}
    explicit DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module,
                                     const ModelOptions& options = {})
        : DistributedDataParallel(module.is_empty() ? nullptr : module.ptr(), options) {}

    /// The module's forward(), after begin_forward(). Called on all ranks when the module has buffers; one
    /// rank alone can call module().
    template <class... Arguments>
    auto forward(Arguments&&... arguments) {
        prepare_forward();
        auto output = module_->forward(std::forward<Arguments>(arguments)...);
        watch(output);
        return output;
    }
    template <class... Arguments>
    auto operator()(Arguments&&... arguments) {
        return forward(std::forward<Arguments>(arguments)...);
    }
    [[nodiscard]] Module& module() const { return *module_; }
    Module* operator->() const { return module_.get(); }

  private:
    std::shared_ptr<Module> module_;
};

template <class Module>
DistributedDataParallel(ProcessGroup&, const torch::nn::ModuleHolder<Module>&)
    -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&) -> DistributedDataParallel<Module>;

/// An optimizer of torch::optim (SGD, Adam or AdamW) as a ddp::Optimizer, for Training, Recovery and
/// ScheduledRate. Its state has the names of Python's: "exp_avg.fc1.weight", "momentum_buffer.fc1.weight".
///
///     ddp::pytorch::Optimizer optimizer(model, adamw);
///     ... optimizer.step();   // adamw.step()
///
/// Both are borrowed; for a model that is not sharded.
class Optimizer final : public ddp::Optimizer {
  public:
    /// Throws InvalidInput for another optimizer, SGD with dampening, and parameters that are not the
    /// model's.
    Optimizer(const detail::Wrapped& model, torch::optim::Optimizer& optimizer)
        : ddp::Optimizer({model.parameters().begin(), model.parameters().end()}, rates_of(optimizer)),
          optimizer_(optimizer),
          tensors_(model.torch_parameters()) {
        if (model.shard() != Shard::None)
            throw InvalidInput(
                "an optimizer of torch::optim steps whole weights: leave Shard::None, or use "
                "ddp::make_adamw(model, ...)");
        static_cast<void>(state());
    }
    void step() override {
        optimizer_.step();
        ++steps_;
    }
    [[nodiscard]] std::string_view name() const override {
        if (dynamic_cast<torch::optim::SGD*>(&optimizer_) != nullptr) return "torch.SGD";
        return dynamic_cast<torch::optim::Adam*>(&optimizer_) != nullptr ? "torch.Adam" : "torch.AdamW";
    }
    [[nodiscard]] std::vector<Tensor> state() const override {
        std::vector<Tensor> all;
        std::set<const void*> seen;
        for (const auto& group : optimizer_.param_groups()) {
            for (const torch::Tensor& parameter : group.params()) {
                append(group, parameter, all);
                if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
                    throw InvalidInput("the optimizer lists '" + name_of(parameter) +
                                       "', which layers share, twice, and would step it twice: make it over "
                                       "model.torch_parameters()");
            }
        }
        all.push_back({std::string(kStepsName), {}, {&steps_, 1, DType::I64, {}}});
        return all;
    }
    [[nodiscard]] std::uint64_t steps() const override { return static_cast<std::uint64_t>(steps_); }
    [[nodiscard]] std::string settings() const override {
        std::ostringstream text;
        text.precision(std::numeric_limits<double>::max_digits10);
        const auto add_adam = [&text](const auto& options) {
            text << std::get<0>(options.betas()) << ' ' << std::get<1>(options.betas()) << ' '
                 << options.eps() << ' ' << options.weight_decay() << ' ' << options.amsgrad() << "; ";
        };
        for (const auto& group : optimizer_.param_groups()) {
            const torch::optim::OptimizerOptions& all = group.options();
            if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&all))
                text << sgd->momentum() << ' ' << sgd->weight_decay() << ' ' << sgd->nesterov() << "; ";
            if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&all)) add_adam(*adam);
            if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&all)) add_adam(*adamw);
        }
        return text.str();
    }

  protected:
    [[nodiscard]] bool takes_gradient(DType gradient, DType parameter) const override {
        return gradient == parameter;
    }
    void update(std::span<const Buffer>) override {
        throw Error(std::string(name()) + " takes gradients from the module: call step()");
    }
    void learning_rate_changed(std::size_t group) override {
        optimizer_.param_groups()[group].options().set_lr(learning_rate(group));
    }

  private:
    /// The optimizer's own map from parameters to their state: by address, which LibTorch 1.13 spells as
    /// text.
    using States = std::decay_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;
    template <class Key>
    static Key key_of(const torch::Tensor& parameter) {
        if constexpr (std::is_pointer_v<Key>) {
            return parameter.unsafeGetTensorImpl();
        } else {
            std::ostringstream text;
            text << parameter.unsafeGetTensorImpl();
            return text.str();
        }
    }
    /// Makes the state that LibTorch would make in the first step, so that it can be loaded before that.
    template <class State>
    State& state_of(const torch::Tensor& parameter) const {
        auto& state = optimizer_.state()[key_of<typename States::key_type>(parameter)];
        if (!state) state = std::make_unique<State>();
        return static_cast<State&>(*state);
    }
    static std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
        std::vector<double> rates;
        for (auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
        return rates;
    }
    [[nodiscard]] const std::string& name_of(const torch::Tensor& parameter) const {
        const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                        [&](const torch::Tensor& one) { return one.is_same(parameter); });
        if (found == tensors_.end())
            throw InvalidInput(
                "the optimizer has a parameter that is not one of the model's trained ones: make it "
                "over model.torch_parameters()");
        return parameters()[static_cast<std::size_t>(found - tensors_.begin())].name;
    }
    void append(const torch::optim::OptimizerParamGroup& group, const torch::Tensor& parameter,
                std::vector<Tensor>& all) const {
        const std::string& name = name_of(parameter);
        const auto add = [&](const char* prefix, torch::Tensor& tensor) {
            if (!tensor.defined()) tensor = torch::zeros_like(parameter);
            all.push_back(detail::described(prefix + ("." + name), tensor));
        };
        const auto add_moments = [&](auto& state, bool amsgrad) {
            add("exp_avg", state.exp_avg());
            add("exp_avg_sq", state.exp_avg_sq());
            if (amsgrad) add("max_exp_avg_sq", state.max_exp_avg_sq());
            all.push_back({std::string(kStepPrefix) + name, {}, {&state.step(), 1, DType::I64, {}}});
        };
        if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&group.options())) {
            if (sgd->momentum() == 0) return;
            if (sgd->dampening() != 0)
                throw InvalidInput("torch::optim::SGD with dampening cannot be kept: its first step differs");
            add("momentum_buffer", state_of<torch::optim::SGDParamState>(parameter).momentum_buffer());
        } else if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&group.options())) {
            add_moments(state_of<torch::optim::AdamParamState>(parameter), adam->amsgrad());
        } else if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&group.options())) {
            add_moments(state_of<torch::optim::AdamWParamState>(parameter), adamw->amsgrad());
        } else {
            throw InvalidInput(
                "the state of this torch::optim optimizer is not known: use SGD, Adam or AdamW");
        }
    }

    torch::optim::Optimizer& optimizer_;
    std::vector<torch::Tensor> tensors_;  ///< the model's, in the order of parameters()
    mutable std::int64_t steps_ = 0;
};

/// ddp::DistributedSampler for torch::data::make_data_loader, which keeps a copy; copies share one position.
/// A loader begins at this position, and each further time it is iterated it begins the next epoch, in
/// another order.
///
///     ddp::pytorch::DistributedSampler sampler(*dataset.size(), *group, {.seed = 1});
///     auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 64);
///     for (; sampler.epoch() < epochs; sampler.next_epoch())
///         for (auto& batch : *loader) ...
class DistributedSampler final : public torch::data::samplers::Sampler<> {
    using Base = torch::data::samplers::Sampler<>;
    template <class Size>
    static Size argument_of(void (Base::*)(Size));

  public:
    // std::optional, and LibTorch's own before 2.6
    using OptionalSize = decltype(argument_of(&Base::reset));
    using OptionalBatch = decltype(std::declval<Base&>().next(1));

    DistributedSampler(std::size_t samples, const ProcessGroup& group, SamplerOptions options = {})
        : DistributedSampler(samples, group.size(), group.rank(), options) {}
    DistributedSampler(std::size_t samples, int world_size, int rank, SamplerOptions options = {})
        : position_(std::make_shared<ddp::DistributedSampler>(samples, world_size, rank, options)) {}

    /// The position of training, for Training and Recovery. It advances by epochs; a program that resumes
    /// within one calls position().advance(batch) after each step.
    [[nodiscard]] ddp::DistributedSampler& position() const { return *position_; }
    [[nodiscard]] std::uint64_t epoch() const { return position_->epoch(); }
    void set_epoch(std::uint64_t epoch) { position_->set_epoch(epoch); }
    void next_epoch() { position_->next_epoch(); }
    /// The number of samples per rank from the position to the end of the epoch.
    [[nodiscard]] std::size_t size() const { return position_->size(); }

    /// Called by the loader when an iteration begins. Throws InvalidInput for a size: it is given once, at
    /// construction.
    void reset(OptionalSize new_size = {}) override {
        if (new_size)
            throw InvalidInput("a DistributedSampler has the size of its construction: make another");
        if (has_begun_ && begun_ == position_->epoch()) position_->next_epoch();
        has_begun_ = true;
        begun_ = position_->epoch();
        indices_ = position_->indices();
        next_ = 0;
    }
    OptionalBatch next(std::size_t batch_size) override {
        const std::size_t end = std::min(indices_.size(), next_ + batch_size);
        if (next_ == end) return {};
        const auto first = indices_.begin();
        const std::vector<std::size_t> batch(first + static_cast<std::ptrdiff_t>(std::exchange(next_, end)),
                                             first + static_cast<std::ptrdiff_t>(end));
        return batch;
    }
    void save(torch::serialize::OutputArchive& archive) const override {
        const SamplerState state = position_->state();
        archive.write("epoch", torch::IValue(static_cast<std::int64_t>(state.epoch)));
        archive.write("consumed", torch::IValue(static_cast<std::int64_t>(state.consumed)));
    }
    void load(torch::serialize::InputArchive& archive) override {
        torch::IValue epoch, consumed;
        archive.read("epoch", epoch);
        archive.read("consumed", consumed);
        position_->restore(
            {static_cast<std::uint64_t>(epoch.toInt()), static_cast<std::uint64_t>(consumed.toInt())});
        has_begun_ = false;
    }

  private:
    std::shared_ptr<ddp::DistributedSampler> position_;
    std::vector<std::size_t> indices_;  ///< of this iteration
    std::size_t next_ = 0;              ///< the first of them that no batch has
    bool has_begun_ = false;
    std::uint64_t begun_ = 0;  ///< the epoch of this iteration
};

}  // namespace ddp::pytorch
