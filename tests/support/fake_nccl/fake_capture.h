#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/support/fake_nccl/fake_cuda.h"

namespace fake {

/// What streams were given while they were captured, in the order in which it was given: one that every
/// dependency allows, since all of them point back.
class Capture {
  public:
    /// How far along each stream something is known to be done: what a captured event carries.
    using Clock = std::map<const Stream*, std::size_t>;
    using Tasks = std::vector<std::function<void()>>;

    explicit Capture(std::shared_ptr<Stream> origin);
    void record(const Stream& stream, std::function<void()> task);
    [[nodiscard]] Clock clock_of(const Stream& stream);
    /// `stream` waits for a captured event, and belongs to the capture from now on.
    void join(const std::shared_ptr<Stream>& stream, const Clock& event,
              const std::shared_ptr<Capture>& self);
    void invalidate(int code);
    /// Lets all streams go. 0, or why there is no graph. By the thread that began it, on the stream where it
    /// began: else nothing happens.
    int end(const Stream& ending, Tasks& tasks);

  private:
    std::mutex mutex_;
    const std::thread::id beginner_ = std::this_thread::get_id();
    std::vector<std::shared_ptr<Stream>> members_;  ///< the origin first
    std::map<const Stream*, Clock> clocks_;
    Tasks tasks_;
    int invalid_ = 0;
};

}  // namespace fake
