#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>

#include "ddp/process_group.h"

namespace ddp {

/// The shared end of a Work: a result that arrives once. Thread-safe.
struct Work::State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr failure;
    /// On a GPU backend: makes the current stream wait. Set before the handle is handed out, then constant.
    std::function<void()> hold_back;
    /// Recorded in a CUDA graph: it happens at every launch, and is never done as such. Constant likewise.
    bool captured = false;

    void finish(std::exception_ptr with) {
        {
            const std::lock_guard lock(mutex);
            done = true;
            failure = std::move(with);
        }
        changed.notify_all();
    }
};

}  // namespace ddp
