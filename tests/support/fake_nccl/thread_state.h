#pragma once

#include <memory>
#include <thread>
#include <vector>

/// CUDA's state of each thread.
namespace fake {

class Capture;

/// cudaStreamCaptureMode. A Global capture forbids unsafe calls to all threads, except to those that are in
/// another mode themselves.
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

struct ThreadState {
    int device = 0;
    bool has_context = false;  ///< set by cudaSetDevice
    int last_error = 0;        ///< the result of cudaGetLastError
    long blocking_calls = 0, launches = 0, copies = 0;
    CaptureMode capture_mode = CaptureMode::Global;
    std::vector<std::shared_ptr<Capture>> captures;  ///< begun by this thread and not ended
};
ThreadState& this_thread();

/// Stores an error as the thread's last one ("not ready" too) and returns `code`. Every entry point of the
/// runtime returns through it.
int keep_error(int code);
/// The permanent error of a lost device, which every call returns; 0: none.
int lost_device();
void lose_device(int code);

/// Called by unsafe calls: invalidates the captures that forbid the call to this thread. 0: no such capture.
int refuse_unsafe();
void begin_capture(const std::shared_ptr<Capture>& capture, CaptureMode mode);
void end_capture(const std::shared_ptr<Capture>& capture);

}  // namespace fake
