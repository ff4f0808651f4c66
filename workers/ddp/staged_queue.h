#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "ddp/cuda_api.h"
#include "ddp/process_group.h"
#include "ddp/work.h"
#include "env/clock.h"

namespace ddp::staged {

/// Page-locked host memory, used again. Thread-safe.
class PinnedPool {
  public:
    explicit PinnedPool(std::shared_ptr<const cuda::Api> cuda) : cuda_(std::move(cuda)) {}
    ~PinnedPool();
    PinnedPool(const PinnedPool&) = delete;
    PinnedPool& operator=(const PinnedPool&) = delete;
    /// Goes back into the pool with its last owner. Throws Error with CUDA's reason.
    std::shared_ptr<std::byte> take(std::size_t bytes);

  private:
    std::shared_ptr<const cuda::Api> cuda_;
    std::mutex mutex_;
    std::multimap<std::size_t, std::byte*> free_;
};

/// A device buffer and its copy on the host, in one collective.
struct Part {
    Buffer device;
    Buffer host;
    bool goes_in = false;              ///< copied to the host before
    bool comes_out = false;            ///< copied back after
    std::shared_ptr<std::byte> keeps;  ///< the host memory; null when somebody else does
};

struct QueueParts {
    std::shared_ptr<const cuda::Api> cuda;
    int device = 0;
    cuda::Stream user_stream = nullptr;
    std::chrono::nanoseconds timeout{};
    std::function<void()> throw_if_lost;  ///< asked while the device is waited for
    /// Told of every failure: peers must not wait for what this rank will not do.
    std::function<void(std::exception_ptr)> give_up;
};

/// Runs collectives over host memory for buffers on a device, in order, on a thread of its own: waits for the
/// copy to the host, runs it, queues the copy back. One thread at a time starts them.
///
/// What a collective reads is what the user's stream has written before start(); what it writes the stream
/// sees after wait(), which blocks the host until the copy back is queued and no longer.
class Queue {
  public:
    explicit Queue(QueueParts parts);
    ~Queue();  ///< ends what was started first
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    /// `name` begins the messages of failed copies: "rank 0: all_reduce".
    Work start(std::string name, std::vector<Part> parts, std::function<void()> collective);
    /// The same without buffers, behind all before; blocks, and throws what it throws.
    void run(std::string name, std::function<void()> task);
    /// Zeroes device memory. Blocking.
    void clear(void* address, std::size_t bytes);

  private:
    struct Operation;
    void copy_in(Operation& operation) const;
    void copy_out(Operation& operation) const;
    [[nodiscard]] bool may_copy_now(const Operation& operation) const;
    void wait_for(const cuda::Event& event, const std::string& name) const;
    /// False when it failed; then those who wait for it know.
    bool execute(Operation& operation);
    void finish_returned(std::deque<std::shared_ptr<Operation>>& returning) const;
    void work();

    const QueueParts parts_;
    cuda::Stream in_ = nullptr, out_ = nullptr;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Operation>> waiting_;  ///< the front one is being executed
    std::shared_ptr<cuda::Event> last_out_;           ///< the latest copy back that was queued
    bool leaving_ = false;
    std::thread thread_;
};

}  // namespace ddp::staged
