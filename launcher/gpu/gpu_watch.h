#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "launcher/gpu/gpu_usage.h"

namespace ddprun {

/// The GPUs of this node for who asks a running job: measured by a process of its own (`ddprun gpus`),
/// because a driver in trouble can take for ever, and only while somebody asks. Borrows loop and system for
/// its whole life.
class GpuWatch {
  public:
    using Answer = std::function<void(const std::vector<GpuUsage>& gpus)>;

    /// Several who ask within `fresh` share one measurement.
    GpuWatch(os::EventLoop& loop, os::System& system, Duration fresh = std::chrono::milliseconds(500))
        : loop_(loop), system_(system), fresh_(fresh) {}
    GpuWatch(const GpuWatch&) = delete;
    GpuWatch& operator=(const GpuWatch&) = delete;

    /// Calls `answer` once, at once or within kPatience: with what was measured in the last moment or now;
    /// without a driver, and when nothing can be had in time, with what was measured last. Never after this
    /// object's end.
    void look(Answer answer);

    static constexpr Duration kPatience = std::chrono::milliseconds(1500);

  private:
    void measured(Result<std::string> line);

    os::EventLoop& loop_;
    os::System& system_;
    Duration fresh_;
    std::vector<GpuUsage> gpus_;
    TimePoint measured_at_ = TimePoint::min();
    std::vector<Answer> waiting_;
    std::shared_ptr<bool> alive_ =
        std::make_shared<bool>(true);  ///< a tool that runs can outlive this object
};

}  // namespace ddprun
