#pragma once

#include <memory>
#include <thread>
#include <vector>

/// What CUDA keeps for each thread of a process.
namespace fake {

class Capture;

struct ThreadState {
    int device = 0;
    bool has_context = false;  ///< the driver's launches need one; cudaSetDevice and cuCtxSetCurrent make it
    int last_error = 0;        ///< for cudaGetLastError
    long blocking_calls = 0, launches = 0, copies = 0;
    std::vector<std::shared_ptr<Capture>> captures;  ///< those that this thread began and has not ended
};
ThreadState& this_thread();

/// What an entry point of the runtime returns: every error becomes the thread's last one, a mere "not ready"
/// too.
int told(int code);
/// What went wrong with the device for good: every call says so again. 0: nothing.
int lost_device();
void lose_device(int code);

/// For calls that a thread may not make between beginning a capture and ending it: it is spoilt then. 0: none
/// goes on.
int refuse_unsafe();

}  // namespace fake
