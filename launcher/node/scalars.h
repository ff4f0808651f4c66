#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/segment.h"
#include "launcher/node/workers.h"

namespace ddprun {

/// A number that a worker told: ddprun.step(step, name=value) in Python.
struct ToldScalar {
    std::uint64_t step = 0;
    double time = 0;  ///< seconds from the epoch
    double value = 0;
    std::string name;
    bool operator==(const ToldScalar&) const = default;
};

/// Takes at most `most` records from the ring, the oldest first. The ring belongs to a worker and is not
/// trusted: a record whose name is not in the table is left out.
std::vector<ToldScalar> take_scalars(ScalarRing& ring, std::size_t most);

/// One line for each: "300 1700000000.5 0.25 loss"; and back, what is no such line left out. Pure.
std::string encode_scalars(const std::vector<ToldScalar>& scalars);
std::vector<ToldScalar> decode_scalars(std::string_view lines);

/// Sends the scalars of rank 0 to the head, once per second (--tensorboard). The other ranks usually have the
/// same curves. Does nothing on other nodes. For the loop's thread.
class ScalarSender {
  public:
    /// Borrows all for its whole life.
    ScalarSender(os::EventLoop& loop, os::Log& log, const AgentConfig& config, const NodeWorkers& workers,
                 const SendToHead& send)
        : loop_(loop), log_(log), config_(config), workers_(workers), send_(send) {}
    ~ScalarSender() { loop_.cancel(timer_); }
    ScalarSender(const ScalarSender&) = delete;
    ScalarSender& operator=(const ScalarSender&) = delete;

    /// Tells the workers, in a new segment, that their scalars are read.
    void begin_segment();
    void send_later();
    void send();
    /// Rank 0 has ended: the head gets what it told last before it hears of the end.
    void end();

  private:
    [[nodiscard]] bool reads() const;

    os::EventLoop& loop_;
    os::Log& log_;
    const AgentConfig& config_;
    const NodeWorkers& workers_;
    const SendToHead& send_;
    os::EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun
