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

/// Streams over host memory: each runs its tasks in order on its own thread.
namespace fake {

/// The values of cudaError_t that the fake returns.
inline constexpr int kInvalidValue = 1, kMemoryAllocation = 2, kInvalidConfiguration = 9, kNoDevice = 100,
                     kInvalidDevice = 101, kInvalidHandle = 400, kNotReady = 600,
                     kHostMemoryAlreadyRegistered = 712, kHostMemoryNotRegistered = 713, kNotSupported = 801,
                     kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureUnmatched = 903,
                     kCaptureUnjoined = 904, kCaptureIsolation = 905, kCapturedEvent = 907,
                     kCaptureWrongThread = 908;

class Capture;

class Stream {
  public:
    /// Starts a stream on the calling thread's device.
    static std::shared_ptr<Stream> start();
    /// Runs `task` after all earlier ones; while the stream is captured, only records it.
    void post(std::function<void()> task);
    /// Queues `task` even while the stream is captured.
    void post_now(std::function<void()> task);
    /// Ends the thread once the queue is empty; does not block, like cudaStreamDestroy.
    void close();
    [[nodiscard]] bool is_closed() const;
    std::thread::id maker;
    int device = 0;
    std::atomic<int> error{0};  ///< the result of events recorded from now on; 0: success

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

/// Returns the stream of a cudaStream_t; null is the default stream of the calling thread's device.
std::shared_ptr<Stream> stream_of(void* handle);
std::vector<std::shared_ptr<Stream>> all_streams();
/// Waits for all tasks posted so far. Returns the stream's error.
int drain(Stream& stream);

int current_device();
void set_current_device(int device);
int device_count();
/// Runs a kernel on a cudaStream_t. Returns a cudaError_t.
int launch(void* stream, unsigned blocks, const char* kernel, std::function<void()> run);

/// The kinds of memory: of a device (cudaMalloc, ncclMemAlloc), or page-locked (cudaHostAlloc,
/// cudaHostRegister). Copies to and from any other memory block the caller.
enum class Memory { Device, Nccl, Pinned, Registered };
void* allocate(std::size_t bytes, Memory kind);
void release(void* address);
/// Releases the memory once all streams have run their current tasks; unlike cudaFree, does not block. False:
/// no allocation of this kind has that address.
bool release_when_idle(void* address, Memory kind);
/// Page-locks existing memory. Returns a cudaError_t.
int lock_pages(void* address, std::size_t bytes);
int unlock_pages(void* address);
/// nullopt for other host memory, for which a copy blocks.
std::optional<Memory> kind_of(const void* address);

}  // namespace fake
