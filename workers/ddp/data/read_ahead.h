#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/worker/fork.h"
#include "ddp/worker/work.h"

namespace ddp {

/// A thread that makes batches 0, 1, 2, ... ahead of one caller, who takes them in that order, in `slots`
/// slots: batch b goes into slot b % slots, once the caller has asked for batch b - slots + 1.
class ReadAhead {
  public:
    /// The thread calls `make`, and makes no more batches after an exception.
    ReadAhead(std::size_t batches, std::size_t slots, std::function<void(std::size_t batch)> make)
        : batches_(batches), make_(std::move(make)), results_(slots) {
        for (std::size_t batch = 0; batch < std::min(slots, batches); ++batch) post(batch);
    }
    /// Waits for the batch that is being made.
    ~ReadAhead() { stopping_ = true; }
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    /// Gives the earlier batches back and waits for this one. Throws the exception of `make` for it, after
    /// the batches before it are delivered. Throws Error in a forked child.
    void take(std::size_t batch) {
        require_same_process(made_in_, "next() of a loader that reads ahead");
        const std::size_t next = batch + results_.size() - 1;
        if (batch > 0 && next < batches_) post(next);
        Work(results_[batch % results_.size()]).synchronize();
    }

  private:
    void post(std::size_t batch) {
        auto& result = results_[batch % results_.size()] = std::make_shared<Work::State>();
        thread_.post([this, batch, result] {
            try {
                if (!failure_ && !stopping_) make_(batch);
            } catch (...) {
                failure_ = std::current_exception();
            }
            result->finish(failure_);
        });
    }

    const std::size_t batches_;
    const std::function<void(std::size_t)> make_;
    std::vector<std::shared_ptr<Work::State>> results_;  ///< by slot
    std::atomic<bool> stopping_ = false;
    std::exception_ptr failure_;  ///< for the thread only
    const std::uint32_t made_in_ = fork_count();
    ProgressThread thread_;  // destroyed first
};

}  // namespace ddp
