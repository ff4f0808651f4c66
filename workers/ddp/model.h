#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/optimizer.h"

namespace ddp {

/// A parameter of a Model. List parameters in the order of their use in a forward pass.
struct TensorSpec {
    std::string name;
    std::vector<std::int64_t> shape;
    DType dtype = DType::F32;
    /// The layer, counted from 0 in the order of use: the weights of a unit are gathered and released
    /// together, and each bucket holds parameters of one unit.
    std::size_t unit = 0;
};

/// The parts of training that are divided among the ranks instead of repeated on each. Everything above an
/// enumerator is included in it. On the CPU backends weights have the same bits with all of them.
enum class Shard : std::uint8_t {
    None,       ///< every rank holds weights, gradients and the optimizer's state
    Optimizer,  ///< each rank holds the state of its part, and steps that part
    Gradients,  ///< averages of gradients are kept for this part only, and buckets share memory
    Parameters  ///< weights too
};
/// "none", "optimizer" and so on.
const char* name_of(Shard shard);

struct ModelOptions {
    Shard shard = Shard::None;
    /// The ranks of a node share one copy of the weights: each steps its part of it, and none gathers. Fill
    /// weights on rank 0 only. For CPU backends on one node, and any Shard except None.
    bool share_weights = false;
    /// Gradients of several passes add up (no_sync). Under Shard::Gradients whole gradients are then kept, as
    /// they are with find_unused_parameters and static_graph.
    bool accumulates = false;
    /// Optimizer::step() returns while the stepped weights are still gathered: call gather(unit) before each
    /// use of a unit's weights. Otherwise step() waits.
    bool overlaps_gather = false;
    BucketLimits limits = {};
    /// Of a model that is declared without a group; otherwise the group's.
    Device device = {};
    // See ReducerOptions and DdpOptions.
    bool find_unused_parameters = false;
    bool static_graph = false;
    std::vector<Tensor> buffers = {};
    bool broadcast_buffers = true;
    std::uint64_t verify_every = 0;
};

/// Bytes on one rank.
struct MemoryUse {
    std::size_t weights = 0;
    std::size_t gradients = 0;
    std::size_t optimizer = 0;  ///< states of the optimizers made over the model
};

/// DistributedDataParallel that owns weights and gradients: flat memory per bucket, zero at first, 64-byte
/// aligned, at addresses that never change.
///
///     ddp::Model model(*group, {{"weight", {64, 13}}, {"bias", {64}}}, {.shard = ddp::Shard::Optimizer});
///     if (group->rank() == 0) fill(model.weights<float>(0), model.weights<float>(1));
///     const auto optimizer = ddp::make_adamw(model, {});  // all ranks have rank 0's weights from here on
///     for each batch:
///         ... backward: write model.gradient_as<float>(i), then model.mark_ready(i), last one first ...
///         model.finish();
///         ddp::clip_grad_norm(model, 1.0);
///         optimizer->step();
///
/// Under Shard::Gradients buckets share memory in time, where that saves any: write gradients (do not add to
/// them) in the reverse of the declared order. The order within the next two incomplete buckets is free;
/// mark_ready() throws Error, naming the parameter, for a gradient that comes earlier.
///
/// With Shard::None a model outlives its group: weights and optimizers stay valid, and
/// attach() connects them to the next group.
class Model : public DistributedDataParallel {
  public:
    /// Collective. Throws MismatchError on all ranks when parameters or options differ between them, and
    /// InvalidInput for a parameter that cannot be trained.
    Model(ProcessGroup& group, std::vector<TensorSpec> parameters, ModelOptions options = {});
    /// Without a group until attach(). Weights have memory already with Shard::None, so they can be filled,
    /// and optimizers made unless parameters have 16 bits. Throws InvalidInput likewise.
    explicit Model(std::vector<TensorSpec> parameters, ModelOptions options = {});
    ~Model() override;

    /// Collective: gives the model a group, the first or the next one, which may differ in size. The last
    /// one's end, or failure within a step, leaves weights and optimizers as they are; gradients are zero
    /// then, may be at other addresses, and hooks must be set again. `broadcast`: weights and buffers become
    /// those of rank 0; otherwise they are equal on all ranks already. Weights that have memory only from
    /// here on are broadcast by the first optimizer. Throws as the constructor does, and InvalidInput for the
    /// second group of a model whose memory belongs to its group.
    virtual void attach(ProcessGroup& group, bool broadcast = true);
    /// False before the first group and once it has ended.
    using DistributedDataParallel::has_group;

    [[nodiscard]] Shard shard() const;
    /// The whole weights of parameter i; their address never changes. Throws InvalidInput for another type or
    /// parameter.
    template <class T>
    [[nodiscard]] std::span<T> weights(std::size_t parameter) const;
    /// Collective, before the first step: overwrites weights and buffers with those of `root`. The first
    /// optimizer over the model does it with rank 0's, so fill weights before. Throws Error where weights
    /// were divided already (Shard::Parameters).
    void broadcast_weights(int root = 0);
    /// Collective: broadcast_weights(), unless all ranks have the same weights already.
    void broadcast_weights_once();
    /// Called before each use of a unit's weights, forward and backward, with overlaps_gather and under
    /// Shard::Parameters (on all ranks in the same order); elsewhere it does nothing. Returns once the
    /// weights of this unit are those of the last step. Throws InvalidInput for a unit without parameters.
    void gather(std::size_t unit);
    /// Called after the use: under Shard::Parameters the weights of other ranks' parts are freed.
    void release(std::size_t unit);
    [[nodiscard]] MemoryUse memory() const;

    /// For a checkpoint: the parameters, or this rank's parts of them, then the buffers.
    [[nodiscard]] std::vector<Tensor> state() const override;
    /// Collective where the model is sharded: gathers the weights.
    void state_loaded() override;

  private:
    friend class Optimizer;
    friend std::unique_ptr<Optimizer> make_sgd(Model& model, SgdOptions options);
    friend std::unique_ptr<Optimizer> make_adamw(Model& model, AdamWOptions options);
    friend double clip_grad_norm(Model& model, double max_norm, NonFiniteNorm non_finite);
    struct Flat;

    void connect(ProcessGroup& group);
    [[nodiscard]] const Buffer& weights_of(std::size_t parameter, DType type) const;
    template <class Options>
    std::unique_ptr<Optimizer> optimizer_over(Options options);
    void step(Optimizer& optimizer);
    void scatter_parameters(int root);
    void parts_changed();
    void start_gather(std::size_t bucket);
    void wait_gather(std::size_t bucket);
    void free_whole(std::size_t bucket);
    [[nodiscard]] double norm_of_averages() const;
    [[nodiscard]] std::string first_not_finite() const;
    void wait_for_parameters() override;
    void broadcast_parameters(int root) override;
    void check_join(bool steps) const override;

    std::unique_ptr<Flat> flat_;
};

/// Collective. Optimizers of the weights on this rank, or of its parts; make one after the weights are
/// filled. Each step is `optimizer->step()`, collective where the model is sharded. The model is borrowed.
/// Throw InvalidInput as those over borrowed parameters do.
std::unique_ptr<Optimizer> make_sgd(Model& model, SgdOptions options);
std::unique_ptr<Optimizer> make_adamw(Model& model, AdamWOptions options);

/// As for borrowed gradients; collective where the model is sharded. The norm has the same bits for every
/// Shard and number of ranks, if gradients have; clip_grad_norm(model.gradients(), ...) adds in another
/// order, and its norm may differ in the last bit.
double clip_grad_norm(Model& model, double max_norm, NonFiniteNorm non_finite = NonFiniteNorm::Throw);

template <class T>
std::span<T> Model::weights(std::size_t parameter) const {
    const Buffer& memory = weights_of(parameter, dtype_of<T>());
    return {static_cast<T*>(memory.data), memory.count};
}

}  // namespace ddp
