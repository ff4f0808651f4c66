#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ddp/bucket_plan.h"
#include "ddp/process_group.h"
#include "ddp/tensor.h"

namespace ddp {

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
    /// are laid out anew (contents move along), which happens at most once.
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

    /// Before the first step. An empty hook restores the default.
    void set_hook(CommunicationHook hook) { hook_ = std::move(hook); }

    /// Whether any rank had a gradient for it in the last finished step; always true without
    /// find_unused_parameters. The gradient of an unused parameter reads as zeros.
    [[nodiscard]] bool is_used(std::size_t parameter) const { return globally_used_[parameter] != 0; }

    [[nodiscard]] const BucketPlan& plan() const { return plan_; }
    [[nodiscard]] const ReducerStatistics& statistics() const { return statistics_; }

  private:
    struct Bucket {
        Buffer buffer;
        std::size_t missing = 0;  ///< gradients that are not ready
        FinishReduction finish;   ///< of a hook
        Work work;                ///< without one
    };

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

}  // namespace ddp
