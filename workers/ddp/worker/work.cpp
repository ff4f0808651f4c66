#include "ddp/worker/work.h"

#include <fmt/core.h>
#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <utility>

#include "env/io/background_call.h"

namespace ddp {

void Work::wait() {
    if (!state_ || !state_->block_stream) return synchronize();
    require_same_process(state_->made_in, "Work::wait");
    {
        const std::lock_guard lock(state_->mutex);
        if (state_->failure) std::rethrow_exception(state_->failure);
        if (state_->done) return;
    }
    state_->block_stream();
}

namespace {

/// The watchdog polls all collectives at intervals; a caller that waits for one polls it more often, and less
/// so the longer it takes. Returns when the collective has ended, or soon after another thread has seen that.
void poll_until_done(Work::State& state) {
    constexpr std::chrono::microseconds kYielding{300}, kPause{200};
    const auto begin = std::chrono::steady_clock::now();
    for (state.poll(); !state.is_done(); state.poll()) {
        if (std::chrono::steady_clock::now() - begin < kYielding) {
            ::sched_yield();
            continue;
        }
        std::unique_lock lock(state.mutex);
        state.changed.wait_for(lock, kPause, [&] { return state.done; });
    }
}

}  // namespace

// Needs no deadline: the collective has one, and always ends.
void Work::synchronize() {
    if (!state_) return;
    require_same_process(state_->made_in, "Work::wait");
    if (state_->poll && !state_->captured) poll_until_done(*state_);
    std::unique_lock lock(state_->mutex);
    if (state_->captured && !state_->failure)
        throw Error(
            "a collective that is captured in a CUDA graph cannot be waited for on the host: wait for the "
            "graph");
    state_->changed.wait(lock, [this] { return state_->done; });
    if (state_->failure) std::rethrow_exception(state_->failure);
}

bool Work::done() const { return !state_ || state_->is_done(); }

std::thread start_own_thread(const char* name, std::function<void()> run) {
    ddprun::Result<std::thread> thread =
        ddprun::start_thread(fmt::format("start the thread {}", name), std::move(run));
    if (!thread)
        throw Error(thread.error().what + " (ulimit -u, or pids.max of the cgroup, limits the threads)");
    ::pthread_setname_np(thread->native_handle(), name);
    return *std::move(thread);
}

ProgressThread::ProgressThread() : thread_(start_own_thread("ddp-progress", [this] { run(); })) {}

ProgressThread::~ProgressThread() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void ProgressThread::post(std::function<void()> task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
}

void ProgressThread::run() {
    for (;;) {
        std::function<void()> task;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            task = std::move(tasks_.front());
            tasks_.pop_front();
        }
        task();
    }
}

}  // namespace ddp
