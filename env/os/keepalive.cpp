#include "env/os/keepalive.h"

#include "env/io/background_call.h"

namespace ddprun::os {

Result<std::unique_ptr<Keepalive>> Keepalive::start(Limits limits, std::function<void()> beat) {
    std::unique_ptr<Keepalive> keepalive(new Keepalive(limits, std::move(beat)));
    keepalive->turn_.lock();
    Result<std::thread> thread =
        start_thread("start a thread for heartbeats", [raw = keepalive.get()] { raw->run(); });
    if (!thread) return thread.error();
    keepalive->thread_ = *std::move(thread);
    return keepalive;
}

Keepalive::~Keepalive() {
    turn_.unlock();
    if (!thread_.joinable()) return;
    {
        const std::lock_guard held(sleep_);
        has_ended_ = true;
    }
    wake_.notify_one();
    thread_.join();
}

void Keepalive::run() {
    std::unique_lock held(sleep_);
    while (!wake_.wait_for(held, limits_.interval, [this] { return has_ended_; })) {
        if (!turn_.try_lock()) continue;  // the loop's thread is at work
        const bool lives = MonotonicClock::now() - began_ < limits_.longest;
        if (lives) beat_();
        turn_.unlock();
    }
}

BlockingCall::BlockingCall(Keepalive* keepalive) : keepalive_(keepalive) {
    if (keepalive_ == nullptr || keepalive_->depth_++ > 0) return;
    keepalive_->began_ = MonotonicClock::now();
    keepalive_->turn_.unlock();
}

BlockingCall::~BlockingCall() {
    if (keepalive_ == nullptr || --keepalive_->depth_ > 0) return;
    keepalive_->turn_.lock();
}

}  // namespace ddprun::os
