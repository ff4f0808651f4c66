#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "env/os/event_loop.h"
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

}  // namespace ddprun
