#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>

#include "ddp/nccl_session_parts.h"
#include "env/clock.h"

namespace ddp::nccl {

/// The numbers of one rank's collectives, and what the launcher and the peers see of them: its line in the
/// node's segment.
class Ledger {
  public:
    explicit Ledger(const SessionParts& parts);

    /// Of the next call; send and recv count among those with the same peer.
    std::uint64_t next_number(const cpu::Call& call);
    void begin(const cpu::Call& call, ddprun::TimePoint now);
    /// One thread at a time, in the order of the calls.
    void end(const cpu::Call& call, ddprun::TimePoint begun, ddprun::TimePoint now);
    [[nodiscard]] double communication_seconds() const {
        return static_cast<double>(inside_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }

  private:
    ddprun::RankLine private_line_{};
    ddprun::RankLine& line_;
    std::uint64_t seq_ = 0;
    std::map<std::pair<ddprun::SegmentOp, int>, std::uint64_t> messages_;  ///< by direction and peer
    std::atomic<std::int64_t> inside_ns_ = 0;
};

}  // namespace ddp::nccl
