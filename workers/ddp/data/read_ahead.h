#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "ddp/worker/fork.h"

namespace ddp {

/// A thread that makes batches 0, 1, 2, ... ahead of one caller, who takes them in that order, in `slots`
/// slots: batch b goes into slot b % slots, once the caller has asked for batch b - slots + 1.
class ReadAhead {
  public:
    /// The thread calls `make`; an exception ends the thread.
    ReadAhead(std::size_t batches, std::size_t slots, std::function<void(std::size_t batch)> make);
    /// Waits for the batch that is being made.
    ~ReadAhead();
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    /// Gives the earlier batches back and waits for this one. Throws the exception of `make` for it, after
    /// the batches before it are delivered. Throws Error in a forked child.
    void take(std::size_t batch);

  private:
    void run();
    bool wait_for_slot(std::size_t batch);
    void publish(std::size_t made, std::exception_ptr failure);

    const std::size_t batches_, slots_;
    const std::function<void(std::size_t)> make_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t made_ = 0;
    std::size_t given_back_ = 0;
    bool stopping_ = false;
    std::exception_ptr failure_;
    const std::uint32_t made_in_ = fork_count();
    std::thread thread_;
};

}  // namespace ddp
