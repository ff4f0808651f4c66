#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "env/clock.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"

namespace ddp {

/// The worker's end of the lifeline (env/lifeline.h). Lifeline and Recovery share one, because a packet that
/// one of them reads may be meant for the other. For one thread at a time.
class LifelineSocket {
  public:
    /// Duplicates the inherited descriptor. Throws InvalidInput when it is not open.
    explicit LifelineSocket(int inherited);

    /// The next generation of the world.
    struct Generation {
        ddprun::EnvironmentList variables;  ///< that replace the worker's
        ddprun::UniqueFd segment;
        std::uint64_t number = 0;
    };

    /// Sends a packet that may be lost where the launcher does not read.
    void tell(char kind, const std::string& payload);
    /// Waits until there is room for the packet, which is lost where the agent has gone. Throws TimeoutError
    /// when the agent reads nothing until the deadline.
    void report(char kind, const std::string& payload, ddprun::TimePoint deadline);
    /// Reads what has come.
    void receive();
    /// Receives until `is_there`, the agent has gone, or the deadline passes.
    template <class Condition>
    void receive_until(Condition is_there, ddprun::TimePoint deadline) {
        for (receive(); !is_there() && !is_closed() && wait(deadline);) receive();
    }

    [[nodiscard]] bool is_closed() const { return !fd_; }
    /// The reason of the request to save and stop; none before one.
    [[nodiscard]] const std::optional<std::string>& stop_request() const { return stop_request_; }
    /// The newest generation that was announced, until it is taken.
    [[nodiscard]] std::optional<Generation>& generation() { return generation_; }
    /// The launcher said that no generation follows.
    [[nodiscard]] bool is_last() const { return is_last_; }
    /// The generation whose ranks have all finished; 0 for none.
    [[nodiscard]] std::uint64_t released() const { return released_; }

  private:
    /// False when the deadline has passed.
    bool wait(ddprun::TimePoint deadline) const;
    void take(char kind, std::string payload, ddprun::UniqueFd descriptor);

    ddprun::UniqueFd fd_;  ///< none when the agent has gone
    std::optional<std::string> stop_request_;
    std::optional<Generation> generation_;
    bool is_last_ = false;
    std::uint64_t released_ = 0;
};

}  // namespace ddp
