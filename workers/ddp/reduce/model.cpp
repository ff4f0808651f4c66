#include "ddp/model.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "ddp/cuda/memory.h"
#include "ddp/reduce/flat_layout.h"
#include "ddp/reduce/loops.h"
#include "ddp/reduce/model_optimizer.h"
#include "ddp/reduce/reducer.h"
#include "ddp/reduce/tensor_broadcast.h"
#include "ddp/worker/private_memory.h"
#include "ddp/worker/slices.h"

namespace ddp {

/// The flat memory of a model.
struct Model::Flat {
    std::vector<TensorSpec> specs;
    ModelOptions options;
    int ranks = 1;  ///< that each have a slice of every bucket; 1: every rank has all
    enum class Weights : std::uint8_t {
        Copies,   ///< whole on every rank
        Shared,   ///< one copy for all ranks
        OnDemand  ///< this rank's slices are kept apart; units are gathered for their use
    } kind = Weights::Copies;
    FlatLayout layout;
    std::vector<std::size_t> unit_of;  ///< of each bucket
    std::shared_ptr<std::byte> owned;  ///< null where the weights belong to the group
    std::byte* weights = nullptr;      ///< null before the first group, where that gives the memory
    std::vector<Buffer> slices;        ///< this rank's weights of each bucket
    std::vector<bool> is_whole;        ///< buckets whose weights are gathered, or on their way; for OnDemand
    std::size_t last_unit = 0;         ///< that was gathered
    std::size_t whole_bytes = 0, most_whole_bytes = 0;
    std::vector<Tensor> parameters;
    std::vector<Tensor> parts;     ///< those of this rank; the parameters with one rank
    std::vector<Buffer> averages;  ///< gradients of the parts
    std::vector<Buffer> given;     ///< of the used ones, for the optimizer
    std::vector<Work> gathers;     ///< of each bucket's weights
    std::size_t optimizer_bytes = 0;
    bool is_broadcast = false;

    Flat(std::vector<TensorSpec> all, ModelOptions settings);
    void lay_out();
    void allocate(ProcessGroup* group);
    [[nodiscard]] bool outlives_group() const { return options.shard == Shard::None; }
    [[nodiscard]] bool is_sharded() const { return ranks > 1; }
    [[nodiscard]] Extent slice(std::size_t bucket, int rank) const {
        return layout.slice(bucket, is_sharded() ? rank : 0, ranks);
    }
    [[nodiscard]] Buffer at(std::byte* address, std::size_t bytes, std::size_t bucket) const {
        const DType type = layout.types[bucket];
        return {address, bytes / size_of(type), type, parameters.front().memory.device};
    }
    [[nodiscard]] Buffer whole(std::size_t bucket) const {
        return at(weights + layout.buckets[bucket].begin, layout.buckets[bucket].bytes, bucket);
    }
    /// The part of a tensor in memory that holds this rank's slice of its bucket.
    [[nodiscard]] Buffer part_in(const Buffer& memory, std::size_t tensor, int rank) const {
        const Extent all = slice(layout.bucket_of[tensor], rank);
        const Extent own = intersection(layout.tensors[tensor], all);
        auto* const begin = static_cast<std::byte*>(memory.data);
        return at(begin + (own.bytes > 0 ? own.begin - all.begin : 0), own.bytes, layout.bucket_of[tensor]);
    }
    [[nodiscard]] std::vector<std::size_t> buckets_of(std::size_t unit) const;
};

namespace {

/// Parameters without memory yet.
std::vector<Tensor> described(std::span<const TensorSpec> specs, const Device& device) {
    constexpr std::size_t kMostBytes = std::size_t{1} << 48;  // of the address space; sums do not overflow
    std::size_t all_bytes = 0;
    std::vector<Tensor> tensors;
    for (const TensorSpec& spec : specs) {
        if (!is_reducible(spec.dtype, ReduceOp::Avg))
            throw InvalidInput(fmt::format("parameter '{}' is {}: only floating types can be trained",
                                           spec.name, describe(spec.dtype, spec.shape)));
        std::size_t count = 1;
        for (const std::int64_t extent : spec.shape) {
            if (extent < 0 || __builtin_mul_overflow(count, static_cast<std::size_t>(extent), &count))
                throw InvalidInput(fmt::format("parameter '{}': {} is not a shape of a tensor in memory",
                                               spec.name, describe(spec.dtype, spec.shape)));
        }
        if (count > kMostBytes / size_of(spec.dtype) ||
            (all_bytes += count * size_of(spec.dtype)) > kMostBytes)
            throw InvalidInput(fmt::format("parameter '{}': {} is larger than the address space", spec.name,
                                           describe(spec.dtype, spec.shape)));
        tensors.push_back({spec.name, spec.shape, {nullptr, count, spec.dtype, device}});
    }
    return tensors;
}

/// Collective.
void verify_same_model(ProcessGroup& group, std::span<const TensorSpec> specs, const ModelOptions& options) {
    std::vector<Tensor> names;
    std::string units;
    for (const TensorSpec& spec : specs) {
        names.push_back({spec.name, spec.shape, {nullptr, 0, spec.dtype, {}}});
        units += fmt::format("{}{}", units.empty() ? "" : " ", spec.unit);
    }
    verify_same_tensors(group, names);
    verify_equal(group,
                 {{"the model's shard", name_of(options.shard)},
                  {"the model's share_weights", fmt::format("{}", options.share_weights)},
                  {"the model's accumulates", fmt::format("{}", options.accumulates)},
                  {"the model's overlaps_gather", fmt::format("{}", options.overlaps_gather)},
                  {"the model's broadcast_buffers", fmt::format("{}", options.broadcast_buffers)},
                  {"the model's verify_every", fmt::format("{}", options.verify_every)},
                  {"the model's find_unused_parameters", fmt::format("{}", options.find_unused_parameters)},
                  {"the model's static_graph", fmt::format("{}", options.static_graph)},
                  {"the model's limits of buckets",
                   fmt::format("{}, {}", options.limits.first_bytes, options.limits.cap_bytes)},
                  {"the list of the parameters' units", units}});
}

std::vector<TensorSpec> same_on_all(ProcessGroup& group, std::vector<TensorSpec> specs,
                                    const ModelOptions& options) {
    verify_same_model(group, specs, options);
    return specs;
}

ModelOptions on_device(const Device& device, ModelOptions options) {
    options.device = device;
    return options;
}

bool is_16_bits(const Tensor& tensor) { return size_of(tensor.memory.dtype) == 2; }

std::unique_ptr<const ReductionPlan> reduction_of(const FlatLayout& layout, const ModelOptions& options,
                                                  int ranks, bool gathers_on_demand) {
    const bool may_lack_gradients = options.find_unused_parameters || options.static_graph;
    const bool may_share =
        ranks > 1 && options.shard >= Shard::Gradients && !options.accumulates && !may_lack_gradients;
    const std::size_t open = std::max<std::size_t>(2, most_open_buckets(layout));
    const std::size_t shared_bytes = in_slots(layout, open + ReductionPlan::kInFlight).bytes +
                                     layout.bytes / static_cast<std::size_t>(ranks);
    return std::make_unique<ReductionPlan>(
        ReductionPlan{.layout = layout,
                      .scatters = ranks > 1,
                      .open_buckets = may_share && shared_bytes < layout.bytes ? open : 0,
                      .starts_in_finish = gathers_on_demand && may_lack_gradients});
}

/// Zeroed.
std::shared_ptr<std::byte> device_memory(const Device& device, std::size_t bytes) {
    const auto memory = std::make_shared<cuda::DeviceMemory>(cuda::Gpu::of(device.index), bytes);
    memory->clear(nullptr);
    cuda::synchronize(nullptr);
    return {memory, memory->get()};
}

/// Address space for weights that come and go.
std::shared_ptr<std::byte> reserve(std::size_t bytes) {
    void* const memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        throw Error(fmt::format("the weights' {} bytes of address space: {}", bytes, std::strerror(errno)));
    return {static_cast<std::byte*>(memory), [bytes](std::byte* all) { ::munmap(all, bytes); }};
}

}  // namespace

const char* name_of(Shard shard) {
    switch (shard) {
        case Shard::None: return "none";
        case Shard::Optimizer: return "optimizer";
        case Shard::Gradients: return "gradients";
        case Shard::Parameters: return "parameters";
    }
    return "unknown shard";
}

Model::Flat::Flat(std::vector<TensorSpec> all, ModelOptions settings)
    : specs(std::move(all)), options(std::move(settings)), parameters(described(specs, options.device)) {
    if (options.shard > Shard::Parameters)
        throw InvalidInput(fmt::format("there is no Shard {}", static_cast<int>(options.shard)));
    if (options.share_weights && options.shard == Shard::None)
        throw InvalidInput(
            "share_weights: each rank steps its part of the weights, which needs another Shard than None");
    if (options.shard == Shard::Parameters && options.device != Device{})
        throw InvalidInput("Shard::Parameters is not available on a GPU: use Shard::Gradients");
    if (outlives_group()) allocate(nullptr);
}

void Model::Flat::lay_out() {
    std::vector<GradientSpec> gradients;
    for (std::size_t i = 0; i < specs.size(); ++i) {
        const Buffer& memory = parameters[i].memory;
        gradients.push_back({memory.bytes(), memory.dtype, memory.device, specs[i].unit});
    }
    layout = ddp::lay_out(
        gradients, plan_buckets(gradients, options.limits),
        is_sharded() ? static_cast<std::size_t>(ranks) * FlatLayout::kChunk : FlatLayout::kAlignment);
    for (const auto& tensors : layout.plan) unit_of.push_back(specs[tensors.front()].unit);
    gathers.resize(layout.buckets.size());
    is_whole.resize(layout.buckets.size());
}

/// Collective where memory belongs to the group; null where it does not.
void Model::Flat::allocate(ProcessGroup* group) {
    if (options.shard != Shard::None) ranks = group->size();
    lay_out();
    const int rank = is_sharded() ? group->rank() : 0;
    const std::size_t bytes = std::max(layout.bytes, FlatLayout::kChunk * static_cast<std::size_t>(ranks));
    std::byte* apart = nullptr;  // this rank's slices, where they are not in the whole weights
    if (is_sharded() && (options.share_weights || options.shard == Shard::Parameters)) {
        const std::span<std::byte> mine = group->allocate_shared(bytes / static_cast<std::size_t>(ranks));
        const std::span<std::byte> all = group->shared_by_all(mine);
        if (all.empty() && options.share_weights)
            throw InvalidInput(
                fmt::format("share_weights: the ranks share no memory over {}", group->describe()));
        kind = all.empty() ? Weights::OnDemand : Weights::Shared;
        if (all.empty()) owned = reserve(bytes), apart = mine.data();
        weights = all.empty() ? owned.get() : all.data();
    } else if (!outlives_group()) {
        weights = group->allocate_shared(bytes).data();
    } else {
        owned = options.device == Device{} ? private_memory(bytes) : device_memory(options.device, bytes);
        weights = owned.get();
    }
    for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
        const Extent own = slice(b, rank);
        slices.push_back(at(apart != nullptr ? apart : weights + own.begin, own.bytes, b));
        if (apart != nullptr) apart += own.bytes;
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].memory.data = weights + layout.tensors[i].begin;
        Tensor& part = parts.emplace_back(parameters[i]);
        if (!is_sharded()) continue;
        const Extent& all = layout.tensors[i];
        const Extent own = intersection(all, slice(layout.bucket_of[i], rank));
        part.part_begin = (own.begin - all.begin) / size_of(part.memory.dtype);
        part.memory = part_in(slices[layout.bucket_of[i]], i, rank);
    }
}

Model::Model(std::vector<TensorSpec> parameters, ModelOptions options)
    : DistributedDataParallel(DdpOptions{.reducer = {.limits = options.limits,
                                                     .find_unused_parameters = options.find_unused_parameters,
                                                     .static_graph = options.static_graph},
                                         .broadcast_parameters = false,
                                         .buffers = options.buffers,
                                         .broadcast_buffers = options.broadcast_buffers,
                                         .verify_every = options.verify_every}),
      flat_(std::make_unique<Flat>(std::move(parameters), std::move(options))) {
    set_parameters(flat_->parameters);
}

Model::Model(ProcessGroup& group, std::vector<TensorSpec> parameters, ModelOptions options)
    : Model(same_on_all(group, std::move(parameters), options), on_device(group.device(), options)) {
    connect(group);
}

Model::~Model() = default;

void Model::attach(ProcessGroup& group, bool broadcast) {
    if (flat_->weights != nullptr && !flat_->outlives_group()) throw InvalidInput(kShardedRefusal);
    verify_same_model(group, flat_->specs, flat_->options);
    connect(group);
    if (!flat_->outlives_group()) return;
    if (broadcast) broadcast_weights();
    flat_->is_broadcast = true;
}

void Model::connect(ProcessGroup& group) {
    if (flat_->options.shard != Shard::None) group.refuse_recovery(kShardedRefusal);
    if (flat_->weights == nullptr) flat_->allocate(&group);
    attach_group(
        group, flat_->parameters,
        reduction_of(flat_->layout, flat_->options, flat_->ranks, flat_->kind == Flat::Weights::OnDemand));
    flat_->averages.clear();
    for (std::size_t i = 0; i < flat_->parts.size(); ++i)
        flat_->averages.push_back(
            flat_->part_in(reducer().averaged(flat_->layout.bucket_of[i]), i, group.rank()));
    flat_->given.resize(flat_->averages.size());
}

Shard Model::shard() const { return flat_->options.shard; }

const Buffer& Model::weights_of(std::size_t parameter, DType type) const {
    if (!flat_->outlives_group()) static_cast<void>(gradient(parameter));  // throws without a group
    if (parameter >= flat_->parameters.size())
        throw InvalidInput(fmt::format("there is no parameter {}; the model has {}, counted from 0",
                                       parameter, flat_->parameters.size()));
    const Tensor& tensor = flat_->parameters[parameter];
    if (tensor.memory.dtype != type)
        throw InvalidInput(fmt::format("the weights of '{}' are {}, not {}", tensor.name,
                                       name_of(tensor.memory.dtype), name_of(type)));
    return tensor.memory;
}

MemoryUse Model::memory() const {
    const bool is_divided = flat_->kind != Flat::Weights::Copies;
    return {.weights = flat_->layout.bytes / static_cast<std::size_t>(is_divided ? flat_->ranks : 1) +
                       flat_->most_whole_bytes,
            .gradients = reducer().bytes(),
            .optimizer = flat_->optimizer_bytes};
}

std::vector<Tensor> Model::state() const {
    if (!flat_->is_sharded()) return DistributedDataParallel::state();
    std::vector<Tensor> all = DistributedDataParallel::state();
    std::copy(flat_->parts.begin(), flat_->parts.end(), all.begin());
    return all;
}

void Model::state_loaded() {
    flat_->is_broadcast = true;
    parts_changed();
    if (flat_->kind == Flat::Weights::Copies) wait_for_parameters();
}

void Model::broadcast_weights(int root) {
    if (flat_->kind == Flat::Weights::OnDemand && flat_->is_broadcast)
        throw Error(
            fmt::format("rank {}: broadcast_weights: no rank has whole weights any more", group().rank()));
    broadcast_parameters(root);
    broadcast_buffers(root);
    flat_->is_broadcast = true;
}

void Model::broadcast_weights_once() {
    if (!flat_->is_broadcast) broadcast_weights();
}

void Model::broadcast_parameters(int root) {
    if (flat_->kind == Flat::Weights::Shared) return group().barrier().wait();
    if (flat_->kind == Flat::Weights::OnDemand) return scatter_parameters(root);
    wait_for_parameters();
    std::vector<Tensor> buckets;
    for (std::size_t b = 0; b < flat_->layout.buckets.size(); ++b)
        buckets.push_back({"", {}, flat_->whole(b)});
    TensorBroadcast(group(), buckets).run(root);
}

void Model::check_join(bool steps) const {
    if (flat_->kind == Flat::Weights::OnDemand)
        throw InvalidInput(
            "Join: under Shard::Parameters ranks without batches would miss the gathers: use another Shard");
    if (flat_->is_sharded() && !steps)
        throw InvalidInput(
            "Join::finish: every rank steps its part of a sharded model: pass [&] { optimizer->step(); }");
}

/// The root's whole weights become the parts of all ranks.
void Model::scatter_parameters(int root) {
    if (flat_->is_broadcast) return;  // the parts are those of every rank since the first time
    for (std::size_t b = 0; b < flat_->layout.buckets.size(); ++b) {
        const Buffer whole = group().rank() == root ? flat_->whole(b) : Buffer{};
        group().scatter(flat_->slices[b], whole, root).wait();
        free_whole(b);
    }
}

/// Called on all ranks after their parts of the weights have changed.
void Model::parts_changed() {
    if (!flat_->is_sharded()) return;
    if (flat_->kind == Flat::Weights::Shared) return group().barrier().wait();
    // The next forward pass needs the first layers first, which lie in the last buckets.
    for (std::size_t b = flat_->layout.buckets.size(); b-- > 0;) {
        if (flat_->kind == Flat::Weights::OnDemand) free_whole(b);
        else start_gather(b);
    }
}

void Model::start_gather(std::size_t bucket) {
    if (flat_->is_whole[bucket]) return;
    flat_->gathers[bucket] = group().all_gather(flat_->whole(bucket), flat_->slices[bucket]);
    if (flat_->kind == Flat::Weights::Copies) return;
    flat_->is_whole[bucket] = true;
    flat_->whole_bytes += flat_->layout.buckets[bucket].bytes;
    flat_->most_whole_bytes = std::max(flat_->most_whole_bytes, flat_->whole_bytes);
}

void Model::wait_gather(std::size_t bucket) { std::exchange(flat_->gathers[bucket], {}).wait(); }

/// Gives the memory of a gathered bucket back: its whole pages, for a part of a page is another bucket's too.
void Model::free_whole(std::size_t bucket) {
    wait_gather(bucket);
    const Extent& memory = flat_->layout.buckets[bucket];
    if (flat_->is_whole[bucket]) flat_->whole_bytes -= memory.bytes;
    flat_->is_whole[bucket] = false;
    // The kernel would round the end of the range up.
    const auto page = static_cast<std::size_t>(::getpagesize());
    const std::size_t begin = round_up(memory.begin, page), end = memory.end() / page * page;
    if (begin < end) ::madvise(flat_->weights + begin, end - begin, MADV_DONTNEED);
}

void Model::wait_for_parameters() {
    for (std::size_t b = flat_->gathers.size(); b-- > 0;) {
        if (flat_->kind == Flat::Weights::OnDemand) start_gather(b);
        wait_gather(b);
    }
}

std::vector<std::size_t> Model::Flat::buckets_of(std::size_t unit) const {
    std::vector<std::size_t> buckets;
    for (std::size_t b = 0; b < unit_of.size(); ++b) {
        if (unit_of[b] == unit) buckets.push_back(b);
    }
    return buckets;
}

void Model::gather(std::size_t unit) {
    const std::vector<std::size_t> buckets = flat_->buckets_of(unit);
    if (buckets.empty())
        throw InvalidInput(
            fmt::format("rank {}: the model has no parameter of unit {}", group().rank(), unit));
    if (flat_->kind == Flat::Weights::OnDemand) {
        for (const std::size_t b : buckets) start_gather(b);
        // A forward pass goes up, a backward pass down; the last unit, and the first, are used twice in a
        // row.
        const std::size_t last = std::exchange(flat_->last_unit, unit);
        const std::size_t next = unit > last || unit == 0 ? unit + 1 : unit - 1;
        if (unit > 0 || last == 0) {
            for (const std::size_t b : flat_->buckets_of(next)) start_gather(b);
        }
    }
    for (const std::size_t b : buckets) wait_gather(b);
}

void Model::release(std::size_t unit) {
    if (flat_->kind != Flat::Weights::OnDemand) return;
    for (const std::size_t b : flat_->buckets_of(unit)) free_whole(b);
}

void Model::step(Optimizer& optimizer) {
    reducer().require_finished();
    for (std::size_t b = 0; b < flat_->gathers.size(); ++b) wait_gather(b);
    // Another rank may still read the weights of its backward pass.
    if (flat_->kind == Flat::Weights::Shared) group().barrier().wait();
    for (std::size_t i = 0; i < flat_->averages.size(); ++i)
        flat_->given[i] = is_used(i) ? flat_->averages[i] : Buffer{};
    optimizer.step(flat_->given);
    parts_changed();
    if (flat_->kind == Flat::Weights::Copies && !flat_->options.overlaps_gather) wait_for_parameters();
}

void Optimizer::step() {
    if (model_ == nullptr)
        throw Error(
            "optimizer: step() without gradients is for an optimizer over a Model: make_sgd(model, ...)");
    model_->step(*this);
}

namespace {

std::string text_of(const SgdOptions& options) {
    return fmt::format("momentum {}, weight_decay {}, nesterov {}", options.momentum, options.weight_decay,
                       options.nesterov);
}

std::string text_of(const AdamWOptions& options) {
    return fmt::format("beta1 {}, beta2 {}, epsilon {}, weight_decay {}", options.beta1, options.beta2,
                       options.epsilon, options.weight_decay);
}

std::string text_of(const ParameterGroup& group) {
    return fmt::format("; weight_decay {} for {}",
                       group.weight_decay ? fmt::format("{}", *group.weight_decay) : "as above",
                       fmt::join(group.parameters, ", "));
}

}  // namespace

template <class Options>
std::unique_ptr<Optimizer> Model::optimizer_over(Options options) {
    if (flat_->is_sharded() && (!options.device.copies.empty() || options.device.scaler != nullptr ||
                                options.device.clipper != nullptr))
        throw InvalidInput("a sharded model takes no copies, GradScaler or GradClipper: leave Shard::None");
    if (flat_->weights == nullptr || (!has_group() && std::ranges::any_of(flat_->parameters, is_16_bits)))
        throw Error(
            "the optimizer copies 16-bit weights, and takes memory from the group of a sharded model: attach the "
            "model first");
    if (has_group()) broadcast_weights_once();
    std::string settings = text_of(options);
    for (const ParameterGroup& group : options.groups) settings += text_of(group);
    const StateMemory shared = [this](std::size_t bytes) -> std::shared_ptr<std::byte> {
        // Parts differ in size, and the group's memory is of one size on all ranks.
        std::size_t most = FlatLayout::kAlignment;
        for (const std::string& text : group().all_gather_bytes(fmt::format("{}", bytes)))
            most = std::max(most, static_cast<std::size_t>(std::stoull(text)));
        return {std::shared_ptr<std::byte>(), group().allocate_shared(most).data()};
    };
    auto optimizer = ddp::make_optimizer(flat_->parts, std::move(options),
                                         flat_->is_sharded() ? shared : StateMemory(private_memory));
    for (const Tensor& state : optimizer->state()) flat_->optimizer_bytes += state.memory.bytes();
    optimizer->model_ = this;
    optimizer->settings_ = std::move(settings);
    return optimizer;
}

std::unique_ptr<Optimizer> make_sgd(Model& model, SgdOptions options) {
    return model.optimizer_over(std::move(options));
}

std::unique_ptr<Optimizer> make_adamw(Model& model, AdamWOptions options) {
    return model.optimizer_over(std::move(options));
}

/// The name of the first parameter whose average is not finite on some rank. Collective.
std::string Model::first_not_finite() const {
    std::size_t first = 0;
    while (first + 1 < flat_->averages.size() && std::isfinite(squares_of(flat_->averages[first]))) ++first;
    if (flat_->is_sharded()) {
        for (const std::string& other : group().all_gather_bytes(fmt::format("{}", first)))
            first = std::min(first, static_cast<std::size_t>(std::stoull(other)));
    }
    return flat_->parameters[first].name;
}

/// Each rank adds up the chunks of its slices; all add these sums in the order of the chunks in memory.
double Model::norm_of_averages() const {
    reducer().require_finished();
    const std::size_t buckets = flat_->layout.buckets.size();
    std::vector<double> own;
    for (std::size_t b = 0; b < buckets; ++b) append_squares(reducer().averaged(b), FlatLayout::kChunk, own);
    std::vector<double> all(own.size() * static_cast<std::size_t>(flat_->ranks));
    if (flat_->is_sharded()) group().all_gather(buffer_of(all), buffer_of(own)).wait();
    else all = own;
    double squares = 0;
    std::size_t at = 0;
    for (std::size_t b = 0; b < buckets; ++b) {
        const std::size_t chunks =
            (reducer().averaged(b).bytes() + FlatLayout::kChunk - 1) / FlatLayout::kChunk;
        for (std::size_t rank = 0; rank < static_cast<std::size_t>(flat_->ranks); ++rank) {
            for (std::size_t chunk = at; chunk < at + chunks; ++chunk)
                squares += all[rank * own.size() + chunk];
        }
        at += chunks;
    }
    return std::sqrt(squares);
}

double clip_grad_norm(Model& model, double max_norm, NonFiniteNorm non_finite) {
    const double norm = model.norm_of_averages();
    const double factor = clip_factor(norm, max_norm);
    if (!std::isfinite(norm)) {
        if (non_finite == NonFiniteNorm::Throw)
            throw Error(fmt::format(
                "clip_grad_norm: the norm of the gradients is {}, that of '{}' is the first that is not finite; lower "
                "the learning rate, or skip such steps (NonFiniteNorm::Leave)",
                norm, model.first_not_finite()));
        return norm;
    }
    for (std::size_t b = 0; factor != 1 && b < model.plan().size(); ++b)
        scale_elements(model.reducer().averaged(b), factor);
    return norm;
}

}  // namespace ddp
