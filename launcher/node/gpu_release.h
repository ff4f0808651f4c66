#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/node/gpu_watch.h"

namespace ddprun {

/// Tells whether the GPU memory of ended processes is free again. The driver frees it some time after their
/// end: a worker that starts at once may find too little.
struct GpuRelease {
    bool is_free = true;
    std::string why;  ///< "GPU 3 still holds 61 GiB of process 4171"; "" when free
};
/// `gone` are the ended processes. If the driver lists one of them, its memory is not free. (The driver may
/// hide processes, or number them as a container's host does.) Otherwise memory that no listed process holds
/// is waited for as long as it shrinks between two measurements; without an earlier one, measure again. Pure.
GpuRelease judge_gpu_release(const std::optional<std::vector<GpuUsage>>& before,
                             const std::vector<GpuUsage>& now, const std::vector<pid_t>& gone);

/// Waits for free GPU memory before a restart. Borrows loop, system and log for its whole life.
class GpuReleaseWait {
  public:
    GpuReleaseWait(os::EventLoop& loop, os::System& system, os::Log& log)
        : loop_(loop), log_(log), gpus_(loop, system, kPause) {}
    ~GpuReleaseWait() { cancel(); }
    GpuReleaseWait(const GpuReleaseWait&) = delete;
    GpuReleaseWait& operator=(const GpuReleaseWait&) = delete;

    /// Calls `done` once, when the memory is free or after `bound` (with a warning that names the holder).
    /// Replaces a wait in progress.
    void begin(std::vector<pid_t> gone, Duration bound, std::function<void()> done);
    void cancel();

  private:
    static constexpr Duration kPause = std::chrono::milliseconds(200);

    struct Wait {
        std::vector<pid_t> gone;
        TimePoint begun, until;
        std::function<void()> done;
        std::optional<std::vector<GpuUsage>> before;
        bool is_logged = false;
    };
    void measure();
    void judge(const std::vector<GpuUsage>& now);
    void finish();

    os::EventLoop& loop_;
    os::Log& log_;
    GpuWatch gpus_;
    std::shared_ptr<Wait> wait_;
    os::EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun
