#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

/// Streams over host memory: each runs what it is given, in order, on a thread of its own.
namespace fake {

/// cudaError_t, as far as the fake answers with it.
inline constexpr int kInvalidValue = 1, kMemoryAllocation = 2, kInvalidConfiguration = 9, kNoDevice = 100,
                     kInvalidDevice = 101, kInvalidHandle = 400, kNotReady = 600,
                     kHostMemoryAlreadyRegistered = 712, kHostMemoryNotRegistered = 713, kNotSupported = 801,
                     kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureUnmatched = 903,
                     kCaptureUnjoined = 904, kCaptureIsolation = 905, kCapturedEvent = 907,
                     kCaptureWrongThread = 908;

class Capture;

class Stream {
  public:
    /// On the calling thread's device.
    static std::shared_ptr<Stream> start();
    /// Runs it behind everything before it; while the stream is captured, only records it.
    void post(std::function<void()> task);
    /// Also while it is captured.
    void post_now(std::function<void()> task);
    /// Ends the thread once the queue is empty; returns at once, as cudaStreamDestroy does.
    void close();
    [[nodiscard]] bool is_closed() const;
    std::thread::id maker;
    int device = 0;
    std::atomic<int> error{0};  ///< what events recorded from now on answer; 0 none

    [[nodiscard]] std::shared_ptr<Capture> capture() const;
    void set_capture(std::shared_ptr<Capture> capture);

  private:
    void run();
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    std::shared_ptr<Capture> capture_;
    bool closed_ = false;
};

/// The stream behind a cudaStream_t; null is the default stream of the calling thread's device.
std::shared_ptr<Stream> stream_of(void* handle);
/// Every stream there is now.
std::vector<std::shared_ptr<Stream>> all_streams();
/// Waits until it has run everything that it was given so far. What went wrong on it.
int drain(Stream& stream);

/// The calling thread's device.
int current_device();
void set_current_device(int device);
int device_count();
/// Runs a kernel on that cudaStream_t; cudaError_t.
int launch(void* stream, unsigned blocks, const char* kernel, std::function<void()> run);

/// Memory that counts as a device's (by cudaMalloc; by ncclMemAlloc), or as page-locked (by cudaHostAlloc; by
/// cudaHostRegister): copies to and from any other block the caller.
enum class Memory { Device, Nccl, Pinned, Registered };
void* allocate(std::size_t bytes, Memory kind);
void release(void* address);
/// Once every stream has done what it was given so far: cudaFree waits for the device, this does not. False:
/// that is no address of an allocation of this kind.
bool release_when_idle(void* address, Memory kind);
/// Page-locks memory of somebody else's; cudaError_t.
int lock_pages(void* address, std::size_t bytes);
int unlock_pages(void* address);
/// None: it is the host's, and a copy waits for it.
std::optional<Memory> kind_of(const void* address);

}  // namespace fake
