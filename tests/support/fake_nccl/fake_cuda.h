#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

/// Streams over host memory: each runs what it is given, in order, on a thread of its own.
namespace fake {

class Stream {
  public:
    static std::shared_ptr<Stream> start();
    void post(std::function<void()> task);
    /// Ends the thread once the queue is empty; returns at once, as cudaStreamDestroy does.
    void close();
    std::atomic<int> error{0};  ///< what events recorded from now on answer; 0 none

  private:
    void run();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool closed_ = false;
};

/// The stream behind a cudaStream_t; null is the default stream of the calling thread's device.
std::shared_ptr<Stream> stream_of(void* handle);

}  // namespace fake
