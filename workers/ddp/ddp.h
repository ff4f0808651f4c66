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
};

/// Finishes a reduction that was started: waits for it and puts the result into the bucket.
using FinishReduction = std::function<void()>;
/// Replaces the averaging all-reduce: starts the reduction of a bucket and returns what finishes it. It is
/// called for the same buckets in the same order on all ranks, and has to average itself.
using CommunicationHook = std::function<FinishReduction(ProcessGroup&, const GradientBucket&)>;

/// A hook that sends float32 gradients as bfloat16: half the bytes. In host memory sums are in float32, with
/// one rounding at the end; on a device they are as the backend sums. Buckets of other types are averaged as
/// they are.
CommunicationHook bf16_compression();

class GradientMemory;

struct ReducerOptions {
    BucketLimits limits;
    /// Some parameters may get no gradient in some steps (costs one small all-reduce per step). Without it a
    /// missing gradient is an error.
    bool find_unused_parameters = false;
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
    /// All of them; unused ones (see is_used) without memory, as Optimizer::step takes them.
    [[nodiscard]] std::vector<Buffer> gradients() const;
    void zero_gradients();

    /// Gradient i is complete on this rank; it must not be written again before finish().
    /// Throws Error when it was marked twice in one step, and what the group throws.
    void mark_ready(std::size_t parameter);

    /// Waits for all reductions: every gradient is then the average over all ranks. Does nothing while
    /// accumulating. Throws Error naming the parameters that got no gradient.
    void finish();

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
        std::size_t missing = 0;  ///< gradients that are not ready
        FinishReduction finish;   ///< of a hook
        Work work;                ///< without one
    };

    void require_parameter(std::size_t parameter) const;
    void lay_out(BucketPlan plan);
    void start_complete_buckets();
    void start(std::size_t bucket);
    void settle_missing();
    void agree_on_used();
    std::vector<std::size_t> arrival_on_rank_zero();
    void rebuild();
    void begin_step();

    ProcessGroup& group_;
    std::vector<Tensor> parameters_;
    ReducerOptions options_;
    CommunicationHook hook_;
    std::unique_ptr<GradientMemory> memory_;
    std::vector<GradientSpec> specs_;
    std::span<std::byte> arena_;
    BucketPlan plan_;
    std::vector<Bucket> buckets_;
    std::vector<std::size_t> offset_of_;  ///< of each gradient in the arena
    std::vector<std::size_t> bucket_of_;
    std::vector<std::size_t> arrival_;  ///< this step's order
    std::vector<bool> ready_;
    std::vector<std::int32_t> locally_used_;  ///< since the last reduced step, accumulation included
    std::vector<std::int32_t> globally_used_;
    std::size_t next_ = 0;  ///< first bucket that has not started
    bool accumulating_ = false;
    bool rebuilt_ = false;
    ReducerStatistics statistics_;
};

struct DdpOptions {
    ReducerOptions reducer;
    /// Overwrite everyone's parameters with rank 0's at construction.
    bool broadcast_parameters = true;
};

/// Data-parallel training of one model: every rank holds all parameters and sees other samples; gradients are
/// averaged while the backward pass runs. Knows no model: parameters are named memory.
///
///     ddp::DistributedDataParallel model(*group, parameters);
///     for each batch:
///         ... backward: write model.gradient(i), then model.mark_ready(i), last layer first ...
///         model.finish();
///         optimizer->step(model.gradients());
///
/// Parameters are where the group's buffers are: for those on a CUDA device see Reducer and docs/gpu.md.
/// Not thread-safe. The group and the parameters' memory are borrowed.
class DistributedDataParallel : public Stateful {
  public:
    /// Collective. Throws MismatchError on all ranks, naming the parameter and both shapes, when a rank's
    /// parameters differ from rank 0's in number, name, type or shape.
    DistributedDataParallel(ProcessGroup& group, std::vector<Tensor> parameters, DdpOptions options = {});

    [[nodiscard]] std::span<const Tensor> parameters() const { return parameters_; }
    /// For a checkpoint: the parameters.
    [[nodiscard]] std::vector<Tensor> state() const override { return parameters_; }

    /// See Reducer: the pointer must be asked for again in every step.
    [[nodiscard]] Buffer gradient(std::size_t parameter) const { return reducer_->gradient(parameter); }
    template <class T>
    [[nodiscard]] std::span<T> gradient_as(std::size_t parameter) const;
    [[nodiscard]] std::vector<Buffer> gradients() const { return reducer_->gradients(); }
    void zero_gradients() { reducer_->zero_gradients(); }
    void mark_ready(std::size_t parameter) { reducer_->mark_ready(parameter); }
    void finish() { reducer_->finish(); }

    /// While the guard lives nothing is reduced; gradients are to be added up. The next step reduces the sum,
    /// divided by the number of ranks (not of accumulated passes).
    class [[nodiscard]] NoSync {
      public:
        explicit NoSync(Reducer& reducer) : reducer_(reducer), before_(reducer.accumulating()) {
            reducer_.set_accumulating(true);
        }
        ~NoSync() { reducer_.set_accumulating(before_); }
        NoSync(const NoSync&) = delete;
        NoSync& operator=(const NoSync&) = delete;

      private:
        Reducer& reducer_;
        bool before_;
    };
    NoSync no_sync() { return NoSync(*reducer_); }

    void set_hook(CommunicationHook hook) { reducer_->set_hook(std::move(hook)); }
    [[nodiscard]] bool is_used(std::size_t parameter) const { return reducer_->is_used(parameter); }
    [[nodiscard]] const BucketPlan& plan() const { return reducer_->plan(); }
    [[nodiscard]] const ReducerStatistics& statistics() const { return reducer_->statistics(); }

    /// Collective. The SHA-256 (as hexadecimal) of all parameters' bytes, one parameter after the other: what
    /// sha256sum says of a safetensors file without its header. Equal on all ranks.
    /// Throws MismatchError naming the ranks whose parameters differ from rank 0's.
    std::string verify_equal_parameters();

  private:
    ProcessGroup& group_;
    std::vector<Tensor> parameters_;
    std::unique_ptr<Reducer> reducer_;
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
