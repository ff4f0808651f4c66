#include "ddp/work.h"

namespace ddp {

void Work::wait() {
    if (!state_ || !state_->hold_back) return synchronize();
    {
        const std::lock_guard lock(state_->mutex);
        if (state_->failure) std::rethrow_exception(state_->failure);
        if (state_->done) return;
    }
    state_->hold_back();
}

// No deadline of its own: the collective behind it has one, and always ends.
void Work::synchronize() {
    if (!state_) return;
    std::unique_lock lock(state_->mutex);
    if (state_->captured && !state_->failure)
        throw Error(
            "a collective that is captured in a CUDA graph cannot be waited for on the host: wait for the "
            "graph");
    state_->changed.wait(lock, [this] { return state_->done; });
    if (state_->failure) std::rethrow_exception(state_->failure);
}

bool Work::done() const {
    if (!state_) return true;
    const std::lock_guard lock(state_->mutex);
    return state_->done;
}

}  // namespace ddp
