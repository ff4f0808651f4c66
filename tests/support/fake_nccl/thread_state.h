#pragma once

#include <memory>
#include <thread>
#include <vector>

/// What CUDA keeps for each thread of a process.
namespace fake {

class Capture;

/// cudaStreamCaptureMode. A capture in the global one forbids unsafe calls to all threads, except to those
/// that are in another one themselves.
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

struct ThreadState {
    int device = 0;
    bool has_context = false;  ///< cudaSetDevice makes it
    int last_error = 0;        ///< for cudaGetLastError
    long blocking_calls = 0, launches = 0, copies = 0;
    CaptureMode capture_mode = CaptureMode::Global;
    std::vector<std::shared_ptr<Capture>> captures;  ///< those that this thread began and has not ended
};
ThreadState& this_thread();

/// What an entry point of the runtime returns: every error becomes the thread's last one, a mere "not ready"
/// too.
int told(int code);
/// What went wrong with the device for good: every call says so again. 0: nothing.
int lost_device();
void lose_device(int code);

/// For unsafe calls: captures that forbid them to this thread are spoilt. 0: there is none.
int refuse_unsafe();
void begin_capture(const std::shared_ptr<Capture>& capture, CaptureMode mode);
void end_capture(const std::shared_ptr<Capture>& capture);

}  // namespace fake
