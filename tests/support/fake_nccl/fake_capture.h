#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/support/fake_nccl/fake_cuda.h"

namespace fake {

/// The work given to captured streams, in the order of the calls. Every dependency points backwards, so that
/// order satisfies all of them.
class Capture {
  public:
    /// A captured event: how much of each stream is done when the event is reached.
    using Clock = std::map<const Stream*, std::size_t>;
    using Tasks = std::vector<std::function<void()>>;

    explicit Capture(std::shared_ptr<Stream> origin);
    void record(const Stream& stream, std::function<void()> task);
    [[nodiscard]] Clock clock_of(const Stream& stream);
    /// Adds `stream`, which waits for a captured event, to the capture.
    void join(const std::shared_ptr<Stream>& stream, const Clock& event,
              const std::shared_ptr<Capture>& self);
    void invalidate(int code);
    /// Ends the capture of all streams. Returns 0, or the reason why there is no graph. Has no effect unless
    /// the thread and the stream are those that began the capture.
    int end(const Stream& ending, Tasks& tasks);

  private:
    std::mutex mutex_;
    const std::thread::id beginner_ = std::this_thread::get_id();
    std::vector<std::shared_ptr<Stream>> members_;  ///< the origin is first
    std::map<const Stream*, Clock> clocks_;
    Tasks tasks_;
    int invalid_ = 0;
};

}  // namespace fake
