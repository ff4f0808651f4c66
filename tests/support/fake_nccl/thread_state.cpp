#include "tests/support/fake_nccl/thread_state.h"

#include <pthread.h>

#include <atomic>

#include "tests/support/fake_nccl/fake_capture.h"
#include "tests/support/fake_nccl/fake_cuda.h"

namespace fake {

namespace {

std::atomic<int> lost{0};

}  // namespace

// Not thread_local: ThreadSanitizer takes the freeing of a loaded module's variables at the end of a thread
// for a race.
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

int told(int code) {
    if (code == 0) code = lost;
    if (code != 0) this_thread().last_error = code;
    return code;
}

int lost_device() { return lost; }
void lose_device(int code) { lost = code; }

int refuse_unsafe() {
    for (const auto& capture : this_thread().captures) capture->invalidate(kCaptureInvalidated);
    return this_thread().captures.empty() ? 0 : kCaptureUnsupported;
}

int current_device() { return this_thread().device; }
void set_current_device(int device) {
    this_thread().device = device;
    this_thread().has_context = true;
}

void count_launch() { ++this_thread().launches; }

}  // namespace fake
