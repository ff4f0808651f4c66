#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>

#include "ddp/process_group.h"

namespace ddp {

/// The shared end of a Work: a result that arrives once. Thread-safe.
struct Work::State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr failure;

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
