#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/machine/gpu/gpu_usage.h"

namespace ddprun {

/// Measures the GPUs of this node for questions to a running job, on request only, by a separate process
/// (`ddprun gpus`), because a driver in trouble can take for ever. Borrows loop and system for its whole
/// life.
class GpuWatch {
  public:
    using Answer = std::function<void(const std::vector<GpuUsage>& gpus)>;

    /// Calls within `fresh` share one measurement.
    GpuWatch(os::EventLoop& loop, os::System& system, Duration fresh = std::chrono::milliseconds(500))
        : loop_(loop), system_(system), fresh_(fresh) {}
    GpuWatch(const GpuWatch&) = delete;
    GpuWatch& operator=(const GpuWatch&) = delete;

    /// Calls `answer` once, at once or within kTimeout, with a measurement not older than `fresh`; with the
    /// last one when there is no driver or it does not answer in time. Never after this object's end.
    void measure(Answer answer);

    static constexpr Duration kTimeout = std::chrono::milliseconds(1500);

  private:
    void measured(Result<std::string> line);

    os::EventLoop& loop_;
    os::System& system_;
    Duration fresh_;
    std::vector<GpuUsage> gpus_;
    TimePoint measured_at_ = TimePoint::min();
    std::vector<Answer> waiting_;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< the tool may outlive this object
};

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
