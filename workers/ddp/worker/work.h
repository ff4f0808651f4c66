#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "ddp/process_group.h"
#include "ddp/worker/fork.h"

namespace ddp {

/// The shared state of a Work: a result that arrives once. Thread-safe.
struct Work::State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr failure;
    /// For GPU backends: makes the current stream wait. Constant once the handle was returned.
    std::function<void()> block_stream;
    /// For GPU backends: asks the device whether the collective has ended, and finishes this state if so.
    /// Constant likewise.
    std::function<void()> poll;
    /// Recorded in a CUDA graph: it runs at every launch, and never completes by itself. Constant likewise.
    bool captured = false;

    const std::uint32_t made_in = fork_count();

    [[nodiscard]] bool is_done() {
        const std::lock_guard lock(mutex);
        return done;
    }
    void finish(std::exception_ptr with) {
        {
            const std::lock_guard lock(mutex);
            done = true;
            failure = std::move(with);
        }
        changed.notify_all();
    }
};

/// Starts a thread of libddp, with a name of 15 letters at most. It blocks all signals: SIGTERM must
/// interrupt the program's threads, not a collective.
std::thread start_own_thread(const char* name, std::function<void()> run);

/// Runs tasks in order on a thread of its own. The destructor runs the queued tasks first.
class ProgressThread {
  public:
    ProgressThread();
    ~ProgressThread();
    ProgressThread(const ProgressThread&) = delete;
    ProgressThread& operator=(const ProgressThread&) = delete;

    /// Tasks must not throw.
    void post(std::function<void()> task);

  private:
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace ddp
