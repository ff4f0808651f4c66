#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/gpu/gpu_watch.h"

namespace ddprun {

/// Whether the memory of processes that have ended is free again. The driver gives it back some time after
/// their end: a worker that starts at once may find too little.
struct GpuRelease {
    bool is_free = true;
    std::string why;  ///< "GPU 3 still holds 61 GiB of process 4171"; "" when free
};
/// `gone` are the processes. Where the driver lists them (it may number processes as the host of a container
/// does, or hide them) that decides. Otherwise memory that no listed process explains is waited for as long
/// as it becomes less between two looks; without a look before, it is looked at again. Pure.
GpuRelease judge_gpu_release(const std::optional<std::vector<GpuUsage>>& before,
                             const std::vector<GpuUsage>& now, const std::vector<pid_t>& gone);

/// Waits for that before a restart. Borrows loop, system and log for its whole life.
class GpuReleaseWait {
  public:
    GpuReleaseWait(os::EventLoop& loop, os::System& system, os::Log& log)
        : loop_(loop), log_(log), gpus_(loop, system, kPause) {}
    ~GpuReleaseWait() { cancel(); }
    GpuReleaseWait(const GpuReleaseWait&) = delete;
    GpuReleaseWait& operator=(const GpuReleaseWait&) = delete;

    /// Calls `done` once, when it is free or `bound` is over (that is said, with who holds how much). A wait
    /// in progress is forgotten.
    void begin(std::vector<pid_t> gone, Duration bound, std::function<void()> done);
    void cancel();

  private:
    static constexpr Duration kPause = std::chrono::milliseconds(200);

    struct Wait {
        std::vector<pid_t> gone;
        TimePoint begun, until;
        std::function<void()> done;
        std::optional<std::vector<GpuUsage>> before;
        bool is_said = false;
    };
    void look();
    void judge(const std::vector<GpuUsage>& now);
    void finish();

    os::EventLoop& loop_;
    os::Log& log_;
    GpuWatch gpus_;
    std::shared_ptr<Wait> wait_;
    os::EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun
