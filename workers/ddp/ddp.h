#pragma once

#include <atomic>
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

/// What the plan has to know about one gradient.
struct GradientSpec {
    std::size_t bytes = 0;
    DType dtype = DType::F32;
    Device device = {};
};

/// A bucket is closed by the gradient that brings it to its limit, so it may exceed it by that gradient.
/// The first bucket of each (dtype, device) is small so that the first reduction starts early.
struct BucketLimits {
    std::size_t first_bytes = std::size_t{1} << 20;
    std::size_t cap_bytes = std::size_t{25} << 20;
    bool operator==(const BucketLimits&) const = default;
};

/// Buckets in the order in which they are reduced; each lists the indices of its gradients in memory order.
/// Every gradient is in exactly one bucket; one bucket holds one dtype and one device.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// The plan before anything is known about the order of arrival: PyTorch's, that is, filled in the order of
/// the parameters and then reversed, because a backward pass reaches the last layer first. (The small bucket
/// therefore holds the first layers, whose gradients come last and are waited for.)
BucketPlan plan_buckets(std::span<const GradientSpec> gradients, const BucketLimits& limits);

/// The plan for an order of arrival that was seen, first to last. `arrival` is a permutation of all indices
/// (a bug of the caller otherwise).
BucketPlan plan_buckets(std::span<const GradientSpec> gradients, std::span<const std::size_t> arrival,
                        const BucketLimits& limits);

/// One bucket of gradients that is complete on this rank.
struct GradientBucket {
    std::size_t index = 0;  ///< position in the plan; the plan changes once, after the first step
    bool is_last = false;
    Buffer buffer;  ///< all its gradients, each padded with zeros to 64 bytes
    std::span<const std::size_t> parameters;
    std::span<const Tensor> gradients;  ///< of these parameters, with their names and shapes, in the buffer
};

/// Finishes a reduction that was started: waits for it and puts the result into the bucket.
using FinishReduction = std::function<void()>;
/// Replaces the averaging all-reduce: starts the reduction of a bucket and returns what finishes it. It is
/// called for the same buckets in the same order on all ranks, and has to average itself.
using CommunicationHook = std::function<FinishReduction(ProcessGroup&, const GradientBucket&)>;

/// Hooks that send float32 gradients as bfloat16 or float16: half the bytes. In host memory sums are in
/// float32, with one rounding at the end; on a device they are as the backend sums. Buckets of other types
/// are averaged as they are. Values beyond float16's 65504 become infinite there: bfloat16 has float32's
/// range.
[[nodiscard]] CommunicationHook bf16_compression();
[[nodiscard]] CommunicationHook fp16_compression();

/// See PyTorch's PowerSGDState.
struct PowerSgdOptions {
    std::size_t rank = 1;             ///< of what is sent in place of a gradient
    std::uint64_t start_step = 1000;  ///< steps before it that average all of the gradients
    double min_compression_rate =
        2;  ///< a gradient that shrinks less is averaged as it is, as those with one dimension
    bool error_feedback = true;  ///< what a step does not send is added to the next one's gradient
    bool warm_start = true;      ///< begin with the last step's factor
    std::uint64_t seed = 0;      ///< of the first one; the same on all ranks
};
/// A hook that sends each gradient [n, ...] of float32 as two factors of that rank, (n + m) * rank numbers
/// for n * m (Vogels et al., 2019): for slow networks. Lossy, and the same bits on all ranks. In host memory;
/// on a device the step throws InvalidInput. Throws InvalidInput for options that make no sense.
[[nodiscard]] CommunicationHook power_sgd(PowerSgdOptions options = {});

/// The same, with what it goes on from as a part of a checkpoint: factors, errors and the count of steps.
///
///     ddp::PowerSgd compression(parameters);
///     model.set_hook(compression.hook());
///     const ddp::Training training{model, *optimizer, sampler, {{"power_sgd", &compression}}};
///
/// Saving gives every rank the average of all ranks' errors, of which the same is sent later: a run that goes
/// on after a save and one that resumes from it have the same bits, and the number of ranks may change.
class PowerSgd final : public Stateful {
  public:
    /// `parameters`: those of the model, in its order. Only their names, types and shapes are used.
    explicit PowerSgd(std::span<const Tensor> parameters, PowerSgdOptions options = {});
    /// Shares the state; may outlive this.
    [[nodiscard]] CommunicationHook hook() const;
    [[nodiscard]] std::vector<Tensor> state() const override;
    void prepare_to_save(ProcessGroup& group) override;

  private:
    struct Impl;
    std::shared_ptr<Impl> impl_;
};

class GradientMemory;

struct ReducerOptions {
    BucketLimits limits = {};
    /// Some parameters may get no gradient in some steps (costs one small all-reduce per step). Without it a
    /// missing gradient is an error.
    bool find_unused_parameters = false;
    /// The same parameters get a gradient in every step (on each rank its own ones): unused ones are looked
    /// for in the first step only. A step that differs is an error that names the parameter.
    bool static_graph = false;
    /// Lay the buckets out anew after the first step, in the order in which rank 0 saw gradients arrive.
    bool rebuild = true;
};

struct ReducerStatistics {
    std::uint64_t steps = 0;  ///< reduced, not counting accumulation
    std::uint64_t buckets = 0;
    std::uint64_t bytes = 0;     ///< of gradients handed to the group
    double blocked_seconds = 0;  ///< time the training thread spent in starting and awaiting reductions
};

/// Averages gradients over all ranks while the backward pass still runs.
///
/// Gradients live in buckets in memory that the group reduces without copying: write gradient i to
/// gradient(i), then call mark_ready(i). A bucket starts as soon as all its gradients are there and all
/// buckets before it have started: the same order on every rank, whatever the order of arrival. finish() ends
/// the step. Not thread-safe; the group is borrowed and used by the calling thread.
///
/// On a CUDA device gradients are written by what the group's stream was given, and mark_ready means that the
/// writing of gradient i was given to it. Nothing waits inside a step, except for finish() with
/// find_unused_parameters; the first finish() waits too (rebuild). From the second step on, without
/// find_unused_parameters, a step can be captured in a CUDA graph.
class Reducer {
  public:
    /// Collective (allocates shared memory). Throws InvalidInput for a parameter whose type or device cannot
    /// be averaged.
    Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options);
    ~Reducer();

    /// Where gradient i lives. Zero at first. Ask again after finish(): the pointer changes when the buckets
    /// are laid out anew (contents move along), which happens at most once. This and all calls below throw
    /// InvalidInput for a parameter that is none.
    [[nodiscard]] Buffer gradient(std::size_t parameter) const;
    /// All of them; unused ones (see is_used) without memory, as Optimizer::step takes them. Throws Error
    /// between the first mark_ready() of a step and its finish().
    [[nodiscard]] std::vector<Buffer> gradients() const;
    void zero_gradients();

    /// Gradient i is complete on this rank; it must not be written again before finish().
    /// Throws Error when it was marked twice in one step, is no part of the static graph, or another thread
    /// is in here, and what the group throws.
    void mark_ready(std::size_t parameter);

    /// Waits for all reductions: every gradient is then the average over all ranks. Does nothing while
    /// accumulating. Throws Error naming the parameters that got no gradient.
    void finish();

    /// Takes part in a step of the others with gradients that are zero, and as finish() ends with the
    /// averages.
    void shadow_step();
    /// The averages of the steps from now on are over so many ranks (all, at first): the others have no
    /// samples left.
    void set_active_ranks(int ranks) { active_ranks_ = ranks; }

    /// While accumulating, mark_ready and finish reduce nothing; gradients are to be added (+=). The next
    /// step reduces the sum.
    void set_accumulating(bool accumulating) { accumulating_ = accumulating; }
    [[nodiscard]] bool accumulating() const { return accumulating_; }

    /// Before the first step. An empty hook restores the default. Throws Error once a gradient was marked
    /// ready: ranks that change the hook in different steps would not find each other.
    void set_hook(CommunicationHook hook);

    /// Whether any rank had a gradient for it in the last finished step; always true without
    /// find_unused_parameters. The gradient of an unused parameter reads as zeros.
    [[nodiscard]] bool is_used(std::size_t parameter) const;

    [[nodiscard]] const BucketPlan& plan() const { return plan_; }
    [[nodiscard]] const ReducerStatistics& statistics() const { return statistics_; }

  private:
    struct Bucket {
        Buffer buffer;
        std::vector<Tensor> gradients;
        std::size_t missing = 0;  ///< gradients that are not ready
        FinishReduction finish;   ///< of a hook
        Work work;                ///< without one
    };

    void require_parameter(std::size_t parameter) const;
    void lay_out(BucketPlan plan);
    void start_complete_buckets();
    void start(std::size_t bucket);
    void settle_missing();
    void require_static_graph() const;
    [[noreturn]] void throw_missing(std::span<const std::size_t> missing) const;
    void complete_step();
    void agree_on_used();
    [[nodiscard]] bool looks_for_unused() const {
        return options_.static_graph ? statistics_.steps == 0 : options_.find_unused_parameters;
    }
    std::vector<std::size_t> first_order_of_arrival();
    void rebuild();
    void begin_step();

    BorrowedGroup group_;
    std::vector<Tensor> parameters_;
    ReducerOptions options_;
    CommunicationHook hook_;
    std::unique_ptr<GradientMemory> memory_;
    std::vector<GradientSpec> specs_;
    std::span<std::byte> arena_;  ///< the group's memory, which ends with it
    BucketPlan plan_;
    std::vector<Bucket> buckets_;
    std::vector<std::size_t> offset_of_;  ///< of each gradient in the arena
    std::vector<std::size_t> bucket_of_;
    std::vector<std::size_t> arrival_;  ///< this step's order
    std::vector<bool> ready_;
    std::vector<std::int32_t> locally_used_;  ///< since the last reduced step, accumulation included
    std::vector<std::int32_t> globally_used_;
    std::vector<bool>
        static_graph_;  ///< what was ready on this rank in its first own step; empty before, and without it
    int active_ranks_;
    std::size_t next_ = 0;  ///< first bucket that has not started
    bool accumulating_ = false;
    bool rebuilt_ = false;
    std::atomic<bool> is_marking_ = false;
    ReducerStatistics statistics_;
};

struct DdpOptions {
    ReducerOptions reducer = {};
    /// Overwrite everyone's parameters and buffers with rank 0's at construction.
    bool broadcast_parameters = true;
    /// What a model keeps beside its parameters, and no gradient moves: running means of normalisations,
    /// counters. Any types.
    std::vector<Tensor> buffers = {};
    /// begin_forward() overwrites everyone's buffers with rank 0's.
    bool broadcast_buffers = true;
    /// finish() compares all parameters (verify_equal_parameters) after every so many steps, but not inside a
    /// Join, whose ranks may have no step left; 0: never. A comparison costs about a millisecond for every
    /// megabyte.
    std::uint64_t verify_every = 0;
};

struct JoinOptions {
    /// Averages divide by the ranks of the group, also when some have no samples left: each sample counts the
    /// same. Otherwise by those that still have some.
    bool divide_by_initial_world_size = true;
    /// As soon as one rank has no samples left all ranks throw Error, which names it.
    bool throw_on_early_termination = false;
};

class TensorBroadcast;
class Join;

/// Data-parallel training of one model: every rank holds all parameters and sees other samples; gradients are
/// averaged while the backward pass runs. Knows no model: parameters are named memory.
///
///     ddp::DistributedDataParallel model(*group, parameters);
///     for each batch:
///         model.begin_forward();   // with buffers, or inside a Join
///         ... backward: write model.gradient(i), then model.mark_ready(i), last layer first ...
///         model.finish();
///         optimizer->step(model.gradients());
///
/// Gradients stay as they are until they are written again: where a backward pass adds (+=), begin each step
/// with zero_gradients().
///
/// Parameters are where the group's buffers are: for those on a CUDA device see Reducer and docs/gpu.md.
/// Not thread-safe. The group and the parameters' memory are borrowed; once the group has been destroyed all
/// calls but the destructor throw Error.
class DistributedDataParallel : public Stateful {
  public:
    /// Collective. Throws MismatchError on all ranks, naming the parameter and both shapes, when a rank's
    /// parameters differ from rank 0's in number, name, type or shape.
    DistributedDataParallel(ProcessGroup& group, std::vector<Tensor> parameters, DdpOptions options = {});

    ~DistributedDataParallel() override;

    [[nodiscard]] std::span<const Tensor> parameters() const { return parameters_; }
    /// For a checkpoint: the parameters, then the buffers.
    [[nodiscard]] std::vector<Tensor> state() const override;

    /// See Reducer: the pointer must be asked for again in every step.
    [[nodiscard]] Buffer gradient(std::size_t parameter) const { return reducer_->gradient(parameter); }
    template <class T>
    [[nodiscard]] std::span<T> gradient_as(std::size_t parameter) const;
    [[nodiscard]] std::vector<Buffer> gradients() const { return reducer_->gradients(); }
    void zero_gradients() { reducer_->zero_gradients(); }
    /// Throws as Reducer::mark_ready, and Error inside a Join without begin_forward().
    void mark_ready(std::size_t parameter);
    /// Throws as Reducer::finish, and with verify_every as verify_equal_parameters.
    void finish();

    /// Before a forward pass, on all ranks: overwrites the buffers with rank 0's, unless the pass before was
    /// in no_sync (as PyTorch). Not needed without buffers, but inside a Join. Throws what the group throws,
    /// and what a Join says.
    void begin_forward();
    /// Collective, at any time: the same, unconditionally.
    void broadcast_buffers(int root = 0);

    /// While the guard lives nothing is reduced; gradients are to be added up. The next step reduces the sum,
    /// divided by the number of ranks (not of accumulated passes).
    ///
    ///     const auto accumulating = model.no_sync(part + 1 < parts);
    class [[nodiscard]] NoSync {
      public:
        NoSync(Reducer& reducer, bool accumulate) : reducer_(&reducer), before_(reducer.accumulating()) {
            reducer.set_accumulating(before_ || accumulate);
        }
        ~NoSync() {
            if (reducer_ != nullptr) reducer_->set_accumulating(before_);
        }
        NoSync(NoSync&& other) noexcept
            : reducer_(std::exchange(other.reducer_, nullptr)), before_(other.before_) {}
        NoSync& operator=(NoSync&&) = delete;

      private:
        Reducer* reducer_;
        bool before_;
    };
    NoSync no_sync(bool accumulate = true) { return {*reducer_, accumulate}; }

    void set_hook(CommunicationHook hook) { reducer_->set_hook(std::move(hook)); }
    [[nodiscard]] bool is_used(std::size_t parameter) const { return reducer_->is_used(parameter); }
    [[nodiscard]] const BucketPlan& plan() const { return reducer_->plan(); }
    [[nodiscard]] const ReducerStatistics& statistics() const { return reducer_->statistics(); }

    /// Collective. The SHA-256 (as hexadecimal) of all parameters' bytes, one parameter after the other: what
    /// sha256sum says of a safetensors file without its header. Equal on all ranks.
    /// Throws MismatchError naming the ranks whose parameters differ from rank 0's, and the first that does.
    std::string verify_equal_parameters();

  private:
    friend class Join;

    BorrowedGroup group_;
    std::vector<Tensor> parameters_;
    std::vector<Tensor> buffers_;
    std::unique_ptr<Reducer> reducer_;
    std::unique_ptr<TensorBroadcast> buffer_broadcast_;  ///< null: there are none
    const bool broadcasts_buffers_;
    const std::uint64_t verify_every_;
    bool last_pass_synchronised_ = true;
    Join* join_ = nullptr;  ///< the one that is open
};

/// For ranks with different numbers of batches (torch.distributed.algorithms.Join). A rank that has no more
/// goes on to take part in the others' collectives, with gradients that are zero, until nobody has any.
///
///     ddp::Join join(model);
///     for each batch that this rank has:
///         model.begin_forward(); ... model.finish(); optimizer->step(model.gradients());
///     join.finish([&] { optimizer->step(model.gradients()); });
///
/// Costs one small all-gather in each begin_forward(). One at a time; the model is borrowed.
class Join {
  public:
    /// On all ranks.
    explicit Join(DistributedDataParallel& model, JoinOptions options = {});
    ~Join();
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

    /// Once this rank has no more batches: returns when no rank has any. `after_step` is called after each
    /// step of the others, whose averages are then in model.gradients(): with the optimizer's step there its
    /// state (momentum, steps) stays the same on all ranks. At the end parameters and buffers are those of
    /// the last rank that had batches, as in PyTorch, where they are all that is the same.
    void finish(const std::function<void()>& after_step = {});

  private:
    friend class DistributedDataParallel;
    /// Who still has batches.
    struct Roll {
        int active = 0;
        int last = 0;  ///< the highest rank of them
        bool reduces = false;
    };
    Roll call_roll(bool have_batches);
    void begin_forward();
    void begin_pass(const Roll& roll);

    DistributedDataParallel& model_;
    const JoinOptions options_;
    Roll roll_;
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

/// Collective. Throws MismatchError on all ranks unless all describe the same tensors in the same order.
void verify_same_tensors(ProcessGroup& group, std::span<const Tensor> tensors);

/// Something that has to be the same on all ranks: an option, the size of a file, the hash of its content.
struct NamedValue {
    std::string name;
    std::string value;
};

/// Collective, blocking: all ranks compare the same names in the same order. Ranks that were started with
/// other options train on side by side, and what comes of it is neither's: compare before the first step.
///
///     ddp::verify_equal(*group, "--lr", learning_rate);
///     ddp::verify_equal(*group, {{"--seed", seed_text}, {"data", file_hash}});   // one exchange for all
///
/// Throws MismatchError, the same on all ranks, naming the first that differs with both values and their
/// ranks:
/// "--lr is 0.1 on rank 2, 0.02 on rank 0".
void verify_equal(ProcessGroup& group, std::span<const NamedValue> values);
void verify_equal(ProcessGroup& group, std::initializer_list<NamedValue> values);
void verify_equal(ProcessGroup& group, std::string_view name, std::string_view value);
/// Numbers are compared to the last bit, but NaN with NaN.
template <class T>
requires std::integral<T> || std::floating_point<T>
void verify_equal(ProcessGroup& group, std::string_view name, T value) {
    if constexpr (std::same_as<T, bool>) {
        verify_equal(group, name, std::string_view(value ? "true" : "false"));
    } else {
        char text[64];  // the shortest that is read back as the same number: at most 24 characters, long
                        // double 30
        const std::to_chars_result written = std::to_chars(text, text + sizeof text, value);
        verify_equal(group, name, std::string_view(text, static_cast<std::size_t>(written.ptr - text)));
    }
}

}  // namespace ddp
