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

/// The shared end of a Work: a result that arrives once. Thread-safe.
struct Work::State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr failure;
    /// On a GPU backend: makes the current stream wait. Set before the handle is handed out, then constant.
    std::function<void()> hold_back;
    /// On a GPU backend: asks the device whether it has ended by now, and finishes this if so. Constant
    /// likewise.
    std::function<void()> look;
    /// Recorded in a CUDA graph: it happens at every launch, and is never done as such. Constant likewise.
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

/// A thread of libddp's own, under a name of 15 letters at most. The program's signals are for the program's
/// threads: SIGTERM must not interrupt a collective.
std::thread start_own_thread(const char* name, std::function<void()> run);

/// Runs tasks one after the other, in order, on a thread of its own. The destructor runs what is queued
/// first.
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
