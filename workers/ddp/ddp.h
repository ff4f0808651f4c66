#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/reducer.h"
#include "ddp/tensor.h"

namespace ddp {

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
class DistributedDataParallel {
  public:
    /// Collective. Throws MismatchError on all ranks, naming the parameter and both shapes, when a rank's
    /// parameters differ from rank 0's in number, name, type or shape.
    DistributedDataParallel(ProcessGroup& group, std::vector<Tensor> parameters, DdpOptions options = {});

    [[nodiscard]] std::span<const Tensor> parameters() const { return parameters_; }

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

    /// Collective. The SHA-256 (as hexadecimal) of all parameters' bytes, equal on all ranks.
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

}  // namespace ddp
