#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "ddp/worker/fork.h"

namespace ddp {

/// Threads that read batches 0, 1, 2, ... ahead of one caller, who takes them in that order, in `slots`
/// slots: batch b goes into slot b % slots, once the caller has asked for batch b - slots + 1.
///
/// The threads share the samples of each batch: a thread takes a run of them, long at first and one sample at
/// the end of a batch. So slow samples keep all threads busy, and quick ones do not cost a lock each.
class ReadAhead {
  public:
    struct Run {
        std::size_t batch, begin, end;  ///< samples begin .. end - 1 of the batch
    };
    struct Reading {
        std::size_t batches = 0, slots = 1, threads = 1;
        std::function<std::size_t(std::size_t batch)> size_of;
        /// Called by several threads at once, with different samples.
        std::function<void(const Run&)> read;
        /// Completes a batch when all its samples are read; by several threads at once for different batches.
        std::function<void(std::size_t batch)> complete;
    };
    /// After an exception of `read` or `complete` the threads read no later batches.
    explicit ReadAhead(Reading reading);
    /// Waits for the runs that are being read.
    ~ReadAhead() { stop(); }
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    /// Gives the earlier batches back and waits for this one. Throws the exception of its first sample that
    /// failed, after the batches before it are delivered. Throws Error in a forked child.
    void take(std::size_t batch);

  private:
    struct Slot {
        std::size_t batch = SIZE_MAX;  ///< that it holds
        std::size_t unread = 0;        ///< samples
        std::exception_ptr failure;    ///< of the first sample that failed
        std::size_t failed_at = 0;     ///< that sample's run
        bool done = false;
    };
    Slot& slot_of(std::size_t batch) { return slots_[batch % slots_.size()]; }
    void work();
    std::optional<Run> next_run(std::unique_lock<std::mutex>& lock);
    void note_failure(const Run& run, std::exception_ptr failure);
    void complete(const Run& last, std::unique_lock<std::mutex>& lock);
    void stop();

    const Reading reading_;
    std::mutex mutex_;
    std::condition_variable may_read_, is_read_;
    std::vector<Slot> slots_;
    std::size_t batch_ = 0, taken_ = 0;  ///< the next run: its batch, and the samples of it that threads took
    std::size_t allowed_;                ///< batches before this one have a slot
    std::size_t end_;                    ///< batches before this one are worth reading
    bool stopping_ = false;
    const std::uint32_t made_in_ = fork_count();
    std::vector<std::thread> threads_;
};

}  // namespace ddp
