#include "tests/support/fake_nccl/thread_state.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include "tests/support/fake_nccl/fake_capture.h"
#include "tests/support/fake_nccl/fake_cuda.h"

namespace fake {

namespace {

std::atomic<int> lost{0};

struct GlobalCaptures {
    std::mutex mutex;
    std::vector<std::shared_ptr<Capture>> captures;
};
GlobalCaptures& global_captures() {
    static auto* const all = new GlobalCaptures;
    return *all;
}

}  // namespace

// A thread_local would do, but ThreadSanitizer reports a race when a loaded module's variables are freed at
// the end of a thread.
ThreadState& this_thread() {
    static const pthread_key_t key = [] {
        pthread_key_t made;
        ::pthread_key_create(&made, [](void* state) { delete static_cast<ThreadState*>(state); });
        return made;
    }();
    auto* state = static_cast<ThreadState*>(::pthread_getspecific(key));
    if (state == nullptr) ::pthread_setspecific(key, state = new ThreadState);
    return *state;
}

int keep_error(int code) {
    if (code == 0) code = lost;
    if (code != 0) this_thread().last_error = code;
    return code;
}

int lost_device() { return lost; }
void lose_device(int code) { lost = code; }

int refuse_unsafe() {
    if (this_thread().capture_mode == CaptureMode::Relaxed) return 0;
    std::vector<std::shared_ptr<Capture>> spoilt = this_thread().captures;
    if (this_thread().capture_mode == CaptureMode::Global) {
        const std::lock_guard lock(global_captures().mutex);
        const auto& all = global_captures().captures;
        spoilt.insert(spoilt.end(), all.begin(), all.end());
    }
    for (const auto& capture : spoilt) capture->invalidate(kCaptureInvalidated);
    return spoilt.empty() ? 0 : kCaptureUnsupported;
}

void begin_capture(const std::shared_ptr<Capture>& capture, CaptureMode mode) {
    if (mode != CaptureMode::Relaxed) this_thread().captures.push_back(capture);
    const std::lock_guard lock(global_captures().mutex);
    if (mode == CaptureMode::Global) global_captures().captures.push_back(capture);
}

void end_capture(const std::shared_ptr<Capture>& capture) {
    std::erase(this_thread().captures, capture);
    const std::lock_guard lock(global_captures().mutex);
    std::erase(global_captures().captures, capture);
}

int current_device() { return this_thread().device; }
void set_current_device(int device) {
    this_thread().device = device;
    this_thread().has_context = true;
}

}  // namespace fake
