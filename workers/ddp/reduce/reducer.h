#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/reduce/flat_layout.h"

namespace ddp {

class GradientMemory;

/// Averages gradients over all ranks while the backward pass still runs.
///
/// Gradients live in buckets in memory that the group reduces without copying: write gradient i to
/// gradient(i), then call mark_ready(i). A bucket starts when all its gradients are ready and all buckets
/// before it have started: the same order on every rank, whatever the order of arrival. Buckets hold
/// gradients in the reverse of the parameters' order: list parameters in the order of their use. finish()
/// ends the step. Not thread-safe; the group is borrowed and used by the calling thread.
///
/// On a CUDA device the group's stream writes the gradients, and mark_ready(i) means that the work that
/// writes gradient i is on that stream. Nothing blocks inside a step, except finish() with
/// find_unused_parameters; without them a step can be captured in a CUDA graph.
class Reducer {
  public:
    /// Collective (allocates shared memory). Throws InvalidInput for a parameter whose type or device cannot
    /// be averaged.
    Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options);
    /// For a Model; null stands for the plan of the constructor above.
    Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options,
            std::unique_ptr<const ReductionPlan> plan);
    ~Reducer();

    // The calls of DistributedDataParallel, which documents them.

    [[nodiscard]] Buffer gradient(std::size_t parameter) const;
    [[nodiscard]] std::vector<Buffer> gradients() const;
    void zero_gradients();
    void mark_ready(std::size_t parameter);
    void mark_all_ready();
    void finish();
    void set_hook(CommunicationHook hook);
    void request_stop();
    [[nodiscard]] bool stop_requested() const;
    [[nodiscard]] bool carries_stop() const;
    [[nodiscard]] bool is_used(std::size_t parameter) const;
    [[nodiscard]] const BucketPlan& plan() const;
    [[nodiscard]] const ReducerStatistics& statistics() const { return statistics_; }

    /// Takes part in a step of the other ranks with zero gradients; ends with the averages, as finish() does.
    void shadow_step();
    /// Throws Error between the first mark_ready() of a step and its finish().
    void require_finished() const;
    /// Sets how many ranks later averages divide by (all, at first): the others have no samples left.
    void set_active_ranks(int ranks) { active_ranks_ = ranks; }

    /// While accumulating, mark_ready and finish reduce nothing; add to gradients (+=). The next step reduces
    /// the sum.
    /// Throws Error where gradients share memory (Shard::Gradients).
    void set_accumulating(bool accumulating);
    [[nodiscard]] bool accumulating() const { return accumulating_; }

    /// The averages of a bucket that this rank has after finish(): the bucket, or this rank's slice of it.
    [[nodiscard]] const Buffer& averaged(std::size_t bucket) const { return buckets_[bucket].averaged; }
    /// Bytes of gradients and averages in this rank's memory.
    [[nodiscard]] std::size_t bytes() const { return arena_.size() + averages_.size(); }

  private:
    struct Bucket {
        Buffer buffer;
        Buffer averaged;
        std::vector<Tensor> gradients;
        std::size_t missing = 0;  ///< gradients that are not ready
        FinishReduction finish;   ///< set with a hook
        Work work;                ///< set without a hook
    };

    void require_parameter(std::size_t parameter) const;
    void allocate();
    /// Whether this gradient takes part in each step: not one that a static graph left out.
    [[nodiscard]] bool is_expected(std::size_t parameter) const {
        return static_graph_.empty() || static_graph_[parameter];
    }
    void start_complete_buckets();
    void start(std::size_t bucket);
    void zero_padding(std::size_t bucket);
    void finish_buckets(std::size_t end);
    void handle_missing();
    void require_static_graph() const;
    [[noreturn]] void throw_missing(std::span<const std::size_t> missing) const;
    void complete_step();
    void take_stop();
    void require_carried_stop() const;
    void reduce_used();
    [[nodiscard]] bool must_find_unused() const {
        return options_.static_graph ? statistics_.steps == 0 : options_.find_unused_parameters;
    }
    void begin_step();

    BorrowedGroup group_;
    std::vector<Tensor> parameters_;
    ReducerOptions options_;
    CommunicationHook hook_;
    std::unique_ptr<const ReductionPlan> reduction_;
    std::unique_ptr<GradientMemory> memory_;
    std::span<std::byte> arena_, averages_;  ///< owned by the group, freed with it
    std::vector<Extent> places_;             ///< of each gradient in the arena
    std::vector<Bucket> buckets_;
    std::vector<bool> ready_;
    std::vector<std::int32_t> locally_used_;  ///< since the last reduced step, accumulation included
    std::vector<std::int32_t> globally_used_;
    std::vector<bool> static_graph_;  ///< gradients ready on this rank in its first own step; empty before,
                                      ///< and without the option
    int active_ranks_;
    std::size_t marked_ = 0;    ///< gradients that are ready
    std::size_t next_ = 0;      ///< first bucket that has not started
    std::size_t finished_ = 0;  ///< buckets whose averages are there
    bool accumulating_ = false;
    bool asks_to_stop_ = false;    ///< this rank does
    bool stop_requested_ = false;  ///< a rank has asked in a finished step
    std::atomic<bool> is_marking_ = false;
    ReducerStatistics statistics_;
    std::int64_t step_began_ns_ = 0;  ///< for the trace
};

}  // namespace ddp
