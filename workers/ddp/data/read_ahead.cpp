#include "ddp/data/read_ahead.h"

#include <utility>

namespace ddp {

ReadAhead::ReadAhead(std::size_t batches, std::size_t slots, std::function<void(std::size_t)> make)
    : batches_(batches), slots_(slots), make_(std::move(make)) {
    thread_ = std::thread([this] { run(); });
}

ReadAhead::~ReadAhead() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void ReadAhead::take(std::size_t batch) {
    require_same_process(made_in_, "next() of a loader that reads ahead");
    std::unique_lock lock(mutex_);
    given_back_ = batch;
    changed_.notify_all();
    changed_.wait(lock, [&] { return made_ > batch || failure_; });
    if (made_ <= batch) std::rethrow_exception(failure_);
}

void ReadAhead::run() {
    for (std::size_t batch = 0; batch < batches_; ++batch) {
        if (!wait_for_slot(batch)) return;
        try {
            make_(batch);
        } catch (...) {
            publish(batch, std::current_exception());
            return;
        }
        publish(batch + 1, nullptr);
    }
}

bool ReadAhead::wait_for_slot(std::size_t batch) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || batch < given_back_ + slots_; });
    return !stopping_;
}

void ReadAhead::publish(std::size_t made, std::exception_ptr failure) {
    {
        const std::lock_guard lock(mutex_);
        made_ = made;
        failure_ = std::move(failure);
    }
    changed_.notify_all();
}

}  // namespace ddp
