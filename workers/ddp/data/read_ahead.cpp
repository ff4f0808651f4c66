#include "ddp/data/read_ahead.h"

#include <algorithm>
#include <utility>

#include "ddp/worker/work.h"

namespace ddp {

namespace {

template <class Step>
std::exception_ptr failure_of(const Step& step) {
    try {
        step();
        return nullptr;
    } catch (...) {
        return std::current_exception();
    }
}

}  // namespace

ReadAhead::ReadAhead(Reading reading)
    : reading_(std::move(reading)),
      slots_(reading_.slots),
      allowed_(std::min(reading_.slots, reading_.batches)),
      end_(reading_.batches) {
    try {
        for (std::size_t t = 0; t < reading_.threads; ++t)
            threads_.push_back(start_own_thread("ddp-loader", [this] { work(); }));
    } catch (...) {
        stop();
        throw;
    }
}

void ReadAhead::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    may_read_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

// Notifications come after the unlock: a thread that wakes needs the mutex.
void ReadAhead::take(std::size_t batch) {
    require_same_process(made_in_, "next() of a loader that reads ahead");
    std::unique_lock lock(mutex_);
    if (const std::size_t allowed = std::min(batch + slots_.size(), reading_.batches); allowed > allowed_) {
        allowed_ = allowed;
        lock.unlock();
        may_read_.notify_all();
        lock.lock();
    }
    Slot& slot = slot_of(batch);
    is_read_.wait(lock, [&] { return slot.batch == batch && slot.done; });
    if (slot.failure) std::rethrow_exception(slot.failure);
}

void ReadAhead::work() {
    std::unique_lock lock(mutex_);
    while (const std::optional<Run> run = next_run(lock)) {
        lock.unlock();
        std::exception_ptr failure = failure_of([&] { reading_.read(*run); });
        lock.lock();
        if (failure) note_failure(*run, std::move(failure));
        Slot& slot = slot_of(run->batch);
        slot.unread -= run->end - run->begin;
        if (slot.unread > 0) continue;
        if (!slot.failure) complete(*run, lock);
        slot.done = true;
        lock.unlock();
        is_read_.notify_one();
        lock.lock();
    }
}

void ReadAhead::complete(const Run& last, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    std::exception_ptr failure = failure_of([&] { reading_.complete(last.batch); });
    lock.lock();
    if (failure) note_failure(last, std::move(failure));
}

std::optional<ReadAhead::Run> ReadAhead::next_run(std::unique_lock<std::mutex>& lock) {
    may_read_.wait(lock, [this] { return stopping_ || batch_ >= end_ || batch_ < allowed_; });
    if (stopping_ || batch_ >= end_) return std::nullopt;
    const std::size_t size = reading_.size_of(batch_), left = size - taken_;
    if (taken_ == 0) slot_of(batch_) = {.batch = batch_, .unread = size, .failure = {}};
    const std::size_t count =
        reading_.threads == 1 ? left : std::max<std::size_t>(1, left / (2 * reading_.threads));
    const Run run{batch_, taken_, taken_ + count};
    taken_ += count;
    if (taken_ == size) ++batch_, taken_ = 0;
    return run;
}

// Runs are taken in order: no earlier sample of this batch, and of those before it, is left to be taken.
void ReadAhead::note_failure(const Run& run, std::exception_ptr failure) {
    Slot& slot = slot_of(run.batch);
    if (!slot.failure || run.begin < slot.failed_at)
        slot.failure = std::move(failure), slot.failed_at = run.begin;
    if (batch_ == run.batch) {
        slot.unread -= reading_.size_of(batch_) - taken_;
        ++batch_, taken_ = 0;
    }
    end_ = std::min(end_, run.batch + 1);
    may_read_.notify_all();
}

}  // namespace ddp
