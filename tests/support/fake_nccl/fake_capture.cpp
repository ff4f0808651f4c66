#include "tests/support/fake_nccl/fake_capture.h"

#include <algorithm>
#include <utility>

namespace fake {

Capture::Capture(std::shared_ptr<Stream> origin) { members_.push_back(std::move(origin)); }

void Capture::record(const Stream& stream, std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    clocks_[&stream][&stream] = tasks_.size();
}

Capture::Clock Capture::clock_of(const Stream& stream) {
    const std::lock_guard lock(mutex_);
    return clocks_[&stream];
}

void Capture::join(const std::shared_ptr<Stream>& stream, const Clock& event,
                   const std::shared_ptr<Capture>& self) {
    const std::lock_guard lock(mutex_);
    if (std::find(members_.begin(), members_.end(), stream) == members_.end()) {
        members_.push_back(stream);
        stream->set_capture(self);
    }
    for (const auto& [other, reached] : event) {
        std::size_t& known = clocks_[stream.get()][other];
        known = std::max(known, reached);
    }
}

void Capture::invalidate(int code) {
    const std::lock_guard lock(mutex_);
    invalid_ = code;
}

int Capture::end(const Stream& ending, Tasks& tasks) {
    const std::lock_guard lock(mutex_);
    if (beginner_ != std::this_thread::get_id()) return kCaptureWrongThread;
    if (&ending != members_.front().get()) return kCaptureUnmatched;
    for (const auto& member : members_) member->set_capture(nullptr);
    Clock& known = clocks_[&ending];
    for (const auto& member : members_) {
        if (known[member.get()] < clocks_[member.get()][member.get()]) invalid_ = kCaptureUnjoined;
    }
    members_.clear();
    tasks = std::move(tasks_);
    return invalid_;
}

}  // namespace fake
