#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

/// The facts about one gradient that the bucket plan uses.
struct GradientSpec {
    std::size_t bytes = 0;
    DType dtype = DType::F32;
    Device device = {};
    std::size_t unit = 0;
};

/// A bucket is closed by the gradient that reaches its limit, so it may exceed the limit by that gradient.
/// The first bucket of each (dtype, device) is small so that the first reduction starts early.
struct BucketLimits {
    std::size_t first_bytes = std::size_t{1} << 20;
    std::size_t cap_bytes = std::size_t{25} << 20;
    bool operator==(const BucketLimits&) const = default;
};

/// Buckets in the order in which they are reduced; each lists the indices of its gradients in memory order.
/// Every gradient is in exactly one bucket; one bucket holds one dtype, device and unit.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// The plan for gradients that arrive in the reverse of their order here, because a backward pass reaches the
/// last layer first. Buckets are in the order in which they become complete.
BucketPlan plan_buckets(std::span<const GradientSpec> gradients, const BucketLimits& limits);

/// One bucket of gradients that is complete on this rank.
struct GradientBucket {
    std::size_t index = 0;  ///< position in the plan
    bool is_last = false;
    Buffer buffer;  ///< all gradients of the bucket, each padded with zeros to 64 bytes
    std::span<const std::size_t> parameters;
    std::span<const Tensor>
        gradients;  ///< names, shapes and places in `buffer` of these parameters' gradients
};

/// Finishes a started reduction: waits for it and puts the result into the bucket.
using FinishReduction = std::function<void()>;
/// Replaces the averaging all-reduce: starts the reduction of a bucket and returns the function that finishes
/// it. It is called for the same buckets in the same order on all ranks, and must compute the average itself.
using CommunicationHook = std::function<FinishReduction(ProcessGroup&, const GradientBucket&)>;

/// Hooks that send float32 gradients as bfloat16 or float16: half the bytes. In host memory sums are in
/// float32, with one rounding at the end; on a device the backend decides. Buckets of other types are
/// averaged unchanged. Values beyond 65504 become infinite in float16; bfloat16 has float32's range.
[[nodiscard]] CommunicationHook bf16_compression();
[[nodiscard]] CommunicationHook fp16_compression();

/// Options of PyTorch's PowerSGDState.
struct PowerSgdOptions {
    std::size_t rank = 1;             ///< rank of the two factors that replace a gradient
    std::uint64_t start_step = 1000;  ///< steps that average whole gradients before compression begins
    double min_compression_rate =
        2;  ///< gradients that shrink less are averaged whole, as are those with one dimension
    bool error_feedback = true;  ///< add the error of a step to the next step's gradient
    bool warm_start = true;      ///< begin with the previous step's factor
    std::uint64_t seed = 0;      ///< seed of the first factor; the same on all ranks
};
/// A hook that sends each float32 gradient [n, m] as two factors of that rank, (n + m) * rank numbers instead
/// of n * m (Vogels et al., 2019), for slow networks. Lossy; the result has the same bits on all ranks. For
/// host memory: on a device the step throws InvalidInput. Throws InvalidInput for invalid options.
[[nodiscard]] CommunicationHook power_sgd(PowerSgdOptions options = {});

/// power_sgd with its state (factors, errors and the step count) as a part of a checkpoint.
///
///     ddp::PowerSgd compression(parameters);
///     model.set_hook(compression.hook());
///     const ddp::Training training{model, *optimizer, sampler, {{"power_sgd", &compression}}};
///
/// Saving gives every rank the average of all ranks' errors, which leaves the sum that is sent later
/// unchanged: a run that continues after a save and one that resumes from it have the same bits, and the
/// number of ranks may change.
class PowerSgd final : public Stateful {
  public:
    /// `parameters` are those of the model, in its order. Only their names, types and shapes are used.
    explicit PowerSgd(std::span<const Tensor> parameters, PowerSgdOptions options = {});
    /// The hook shares the state, and may outlive this object.
    [[nodiscard]] CommunicationHook hook() const;
    [[nodiscard]] std::vector<Tensor> state() const override;
    void prepare_to_save(ProcessGroup& group) override;

  private:
    struct Impl;
    std::shared_ptr<Impl> impl_;
};

class Reducer;
struct ReductionPlan;

struct ReducerOptions {
    BucketLimits limits = {};
    /// Allow steps in which some parameters get no gradient, for one small all-reduce per step. Otherwise a
    /// missing gradient is an error.
    bool find_unused_parameters = false;
    /// Promise that the same parameters get a gradient in every step (on each rank its own ones): only the
    /// first step looks for unused ones. A step that differs is an error that names the parameter.
    bool static_graph = false;
};

struct ReducerStatistics {
    std::uint64_t steps = 0;  ///< reduced steps; accumulated passes do not count
    std::uint64_t buckets = 0;
    std::uint64_t bytes = 0;     ///< bytes of gradients handed to the group
    double blocked_seconds = 0;  ///< time the training thread spent starting reductions and waiting for them
};

struct DdpOptions {
    ReducerOptions reducer = {};
    /// Overwrite all ranks' parameters and buffers with rank 0's at construction.
    bool broadcast_parameters = true;
    /// Tensors that a model keeps beside its parameters and no gradient changes: running means of
    /// normalisations, counters. Any types.
    std::vector<Tensor> buffers = {};
    /// Overwrite all ranks' buffers with rank 0's in begin_forward().
    bool broadcast_buffers = true;
    /// finish() calls verify_by_majority in every `verify_every`th step, but not inside a Join, whose ranks
    /// may have no step left; 0 means never.
    std::uint64_t verify_every = 0;
};

struct JoinOptions {
    /// Averages divide by the size of the group, also when some ranks have no samples left: each sample
    /// counts the same. Otherwise they divide by the number of ranks that still have samples.
    bool divide_by_initial_world_size = true;
    /// All ranks throw Error, which names the rank, as soon as one rank has no samples left.
    bool throw_on_early_termination = false;
};

class TensorBroadcast;
class Join;

/// Data-parallel training of one model: every rank holds all parameters and sees other samples; gradients are
/// averaged while the backward pass runs. The class knows no model: parameters are named memory.
///
///     ddp::DistributedDataParallel model(*group, parameters);
///     for each batch:
///         model.begin_forward();   // with buffers, or inside a Join
///         ... backward: write model.gradient(i), then model.mark_ready(i), last layer first ...
///         model.finish();
///         optimizer->step(model.gradients());
///
/// Gradients keep their values until they are written again: where a backward pass adds (+=), begin each step
/// with zero_gradients().
///
/// Parameters are on the group's device. On a CUDA device the group's stream writes the gradients, and
/// mark_ready(i) means that the work that writes gradient i is on that stream. Nothing blocks inside a step,
/// except finish() with find_unused_parameters; without them a step can be captured in a CUDA graph
/// (docs/gpu.md).
/// Not thread-safe. The group and
/// the parameters' memory are borrowed; after the group's end all calls except the destructor throw Error.
class DistributedDataParallel : public Stateful {
  public:
    /// Collective. Throws MismatchError on all ranks, naming the parameter and both shapes, when a rank's
    /// parameters differ from rank 0's in number, name, type or shape.
    DistributedDataParallel(ProcessGroup& group, std::vector<Tensor> parameters, DdpOptions options = {});

    ~DistributedDataParallel() override;

    [[nodiscard]] std::span<const Tensor> parameters() const { return parameters_; }
    /// For a checkpoint: the parameters, then the buffers.
    [[nodiscard]] std::vector<Tensor> state() const override;

    /// The memory of gradient i, zero at first; it never moves. This and all calls below throw InvalidInput
    /// for a parameter that does not exist.
    [[nodiscard]] Buffer gradient(std::size_t parameter) const;
    template <class T>
    [[nodiscard]] std::span<T> gradient_as(std::size_t parameter) const;
    /// All gradients, as Optimizer::step takes them; unused ones (see is_used) have no memory. Throws Error
    /// between the first mark_ready() of a step and its finish(), and where averages are sharded.
    [[nodiscard]] std::vector<Buffer> gradients() const;
    void zero_gradients();
    /// Marks gradient i complete on this rank; do not write it again before finish(). Buckets hold gradients
    /// in the reverse of the parameters' order; one starts when all its gradients are ready and all buckets
    /// before it have started: the same order on every rank, whatever the order of arrival. Throws Error when
    /// the gradient was marked twice in one step, is no part of the static graph, or another thread is in
    /// this call, and inside a Join without begin_forward(); also the group's errors.
    void mark_ready(std::size_t parameter);
    /// Marks the gradients that are not marked yet, the last one first: for a backward pass that completes
    /// them all at its end.
    void mark_all_ready();
    /// Waits for all reductions: every gradient is then the average over all ranks. Does nothing while
    /// accumulating. Throws Error naming the parameters that got no gradient, and with verify_every the
    /// errors of verify_by_majority.
    void finish();

    /// Called before a forward pass, on all ranks: overwrites the buffers with rank 0's, unless the previous
    /// pass was in no_sync (as in PyTorch). Required inside a Join; otherwise needed only with buffers.
    /// Throws the errors of the group and of Join.
    void begin_forward();
    /// Collective, at any time: overwrites the buffers with those of `root`.
    void broadcast_buffers(int root = 0);

    /// While the guard lives nothing is reduced; gradients must be added up. The next step reduces the sum,
    /// divided by the number of ranks (not of accumulated passes).
    ///
    ///     const auto accumulating = model.no_sync(part + 1 < parts);
    class [[nodiscard]] NoSync {
      public:
        NoSync(Reducer& reducer, bool accumulate);
        ~NoSync();
        NoSync(NoSync&& other) noexcept
            : reducer_(std::exchange(other.reducer_, nullptr)), before_(other.before_) {}
        NoSync& operator=(NoSync&&) = delete;

      private:
        Reducer* reducer_;
        bool before_;
    };
    /// Throws Error where gradients share memory (Shard::Gradients).
    NoSync no_sync(bool accumulate = true) { return {reducer(), accumulate}; }
    /// True while a NoSync lives.
    [[nodiscard]] bool is_accumulating() const;

    /// Lets all ranks stop after the same step where each learns at its own time that it should, by a signal
    /// for example. The request travels with the gradients of the next step that is reduced, so it costs no
    /// message; a request that comes when the last gradient is marked ready already travels with those of the
    /// step after.
    ///
    ///     if (lifeline.preemption_requested()) model.request_stop();
    ///     ... backward; model.finish(); optimizer->step(model.gradients()); ...
    ///     if (model.stop_requested()) { save(); break; }   // on all ranks in the same step
    ///
    /// Once true it stays true, until the next group. A rank that has finished its Join sees it too.
    void request_stop();
    [[nodiscard]] bool stop_requested() const;
    /// False with a hook, where gradients are sharded, and on a GPU; request_stop() and stop_requested()
    /// throw Error there. Lifeline::should_stop works everywhere under ddprun.
    [[nodiscard]] bool carries_stop() const;

    /// Sets the hook before the first step; an empty hook restores the default. Throws Error once a gradient
    /// was marked ready: all ranks must change the hook in the same step.
    void set_hook(CommunicationHook hook);
    /// Whether any rank had a gradient for this parameter in the last finished step; always true without
    /// find_unused_parameters. The gradient of an unused parameter reads as zeros.
    [[nodiscard]] bool is_used(std::size_t parameter) const;
    [[nodiscard]] const BucketPlan& plan() const;
    [[nodiscard]] const ReducerStatistics& statistics() const;

    /// Collective. The SHA-256 (in hexadecimal) of all parameters' bytes, one parameter after the other:
    /// equal to sha256sum of a safetensors file without its header. Equal on all ranks. Throws MismatchError
    /// naming the ranks whose parameters differ from rank 0's, and the first parameter that differs.
    std::string verify_equal_parameters();
    /// Collective. Compares a hash of 64 bits of the parameters, which costs one pass over their memory.
    /// Where more than half of the ranks agree and others differ, the latter throw MismatchError, which names
    /// these ranks, their hosts and the first parameter, and should end their processes. The former throw
    /// PeerLostError once they have ended: over a Recovery the ranks that differ are replaced, with the state
    /// of the others, and the unit is repeated. Where no more than half agree, all throw MismatchError.
    void verify_by_majority();

  protected:
    /// For a Model: has no group until attach_group(), which may be called again once that group is gone.
    explicit DistributedDataParallel(DdpOptions options);
    /// Collective. A null `plan` stands for that of the Reducer.
    void attach_group(ProcessGroup& group, std::vector<Tensor> parameters,
                      std::unique_ptr<const ReductionPlan> plan);
    void set_parameters(std::vector<Tensor> parameters) { parameters_ = std::move(parameters); }
    [[nodiscard]] bool has_group() const { return !group_.is_gone(); }
    [[nodiscard]] ProcessGroup& group() const { return *group_; }
    /// Throws Error before attach_group().
    [[nodiscard]] Reducer& reducer() const;
    /// Blocks while parameters are still being overwritten.
    virtual void wait_for_parameters() {}
    virtual void broadcast_parameters(int root);
    /// Throws InvalidInput where ranks without batches cannot follow those with some; `steps`: they call the
    /// optimizer after each step of the others.
    virtual void check_join(bool /*steps*/) const {}

  private:
    friend class Join;
    void require_open_pass() const;

    BorrowedGroup group_;
    std::vector<Tensor> parameters_;
    const DdpOptions options_;
    std::unique_ptr<Reducer> reducer_;                   ///< null before a group is attached
    std::unique_ptr<TensorBroadcast> buffer_broadcast_;  ///< null without buffers
    bool last_pass_synchronised_ = true;
    Join* join_ = nullptr;  ///< the open one, or null
};

/// Lets ranks have different numbers of batches (torch.distributed.algorithms.Join). A rank without more
/// batches takes part in the others' collectives with zero gradients, until no rank has any.
///
///     ddp::Join join(model);
///     for each batch that this rank has:
///         model.begin_forward(); ... model.finish(); optimizer->step(model.gradients());
///     join.finish([&] { optimizer->step(model.gradients()); });
///
/// Costs one small all-gather in each begin_forward(). One at a time; the model is borrowed.
class Join {
  public:
    /// Called on all ranks.
    explicit Join(DistributedDataParallel& model, JoinOptions options = {});
    ~Join();
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

    /// Call it when this rank has no more batches; returns when no rank has any. `after_step` is called after
    /// each step of the other ranks, whose averages are then in model.gradients(): an optimizer step there
    /// keeps its state (momentum, steps) equal on all ranks, and a sharded Model needs it. At the end
    /// parameters and buffers are those of the last rank that had batches; in PyTorch nothing else is equal
    /// then.
    void finish(const std::function<void()>& after_step = {});

  private:
    friend class DistributedDataParallel;
    /// The ranks that still have batches.
    struct JoinStatus {
        int active = 0;
        int last = 0;  ///< the highest such rank
        bool reduces = false;
    };
    JoinStatus exchange_status(bool have_batches);
    void begin_forward();
    void begin_pass(const JoinStatus& status);

    DistributedDataParallel& model_;
    const JoinOptions options_;
    JoinStatus status_;
    bool pass_is_open_ = false;
};

template <class T>
std::span<T> DistributedDataParallel::gradient_as(std::size_t parameter) const {
    const Buffer buffer = gradient(parameter);
    if (buffer.dtype != dtype_of<T>())
        throw InvalidInput("the gradient of '" + parameters_[parameter].name + "' is " +
                           name_of(buffer.dtype) + ", not " + name_of(dtype_of<T>()));
    return {static_cast<T*>(buffer.data), buffer.count};
}

/// Collective. Throws MismatchError on all ranks unless all of them describe the same tensors in the same
/// order.
void verify_same_tensors(ProcessGroup& group, std::span<const Tensor> tensors);

/// A value that must be the same on all ranks: an option, the size of a file, the hash of its content.
struct NamedValue {
    std::string name;
    std::string value;
};

/// Collective, blocking: all ranks compare the same names in the same order. Ranks that start with different
/// options train without an error, and their result matches none of the options: compare before the first
/// step.
///
///     ddp::verify_equal(*group, "--lr", learning_rate);
///     ddp::verify_equal(*group, {{"--seed", seed_text}, {"data", file_hash}});   // one exchange for all
///
/// Throws the same MismatchError on all ranks, naming the first value that differs, with both values and
/// their ranks: "--lr is 0.1 on rank 2, 0.02 on rank 0".
void verify_equal(ProcessGroup& group, std::span<const NamedValue> values);
void verify_equal(ProcessGroup& group, std::initializer_list<NamedValue> values);
void verify_equal(ProcessGroup& group, std::string_view name, std::string_view value);
/// Numbers are compared to the last bit; all NaNs are equal.
template <class T>
requires std::integral<T> || std::floating_point<T>
void verify_equal(ProcessGroup& group, std::string_view name, T value) {
    if constexpr (std::same_as<T, bool>) {
        verify_equal(group, name, std::string_view(value ? "true" : "false"));
    } else {
        char text[64];  // the shortest text that reads back as the same number has at most 30 characters
        const std::to_chars_result written = std::to_chars(text, text + sizeof text, value);
        verify_equal(group, name, std::string_view(text, static_cast<std::size_t>(written.ptr - text)));
    }
}

}  // namespace ddp
