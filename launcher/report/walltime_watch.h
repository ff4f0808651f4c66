#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"

namespace ddprun {

/// When the walltime ends. Under OpenPBS, whose environment does not tell it, qstat is asked once, beside the loop: its
/// answer comes later, or never. Borrows its parts for its whole life.
class WalltimeWatch {
  public:
    WalltimeWatch(os::EventLoop& loop, os::System& system, os::Log& log) : loop_(loop), system_(system), log_(log) {}
    ~WalltimeWatch() { *alive_ = false; }
    WalltimeWatch(const WalltimeWatch&) = delete;
    WalltimeWatch& operator=(const WalltimeWatch&) = delete;

    /// Calls `known` once when the end is known, from here or later from the loop.
    void begin(std::function<void(TimePoint end)> known);
    /// nullopt: there is none, or it is not known (yet).
    [[nodiscard]] std::optional<TimePoint> end() const { return end_; }

  private:
    void ask_qstat(const std::string& job);
    void ends_in(Duration left);

    os::EventLoop& loop_;
    os::System& system_;
    os::Log& log_;
    std::function<void(TimePoint)> known_;
    std::optional<TimePoint> end_;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
