#pragma once

#include <cstdint>
#include <functional>

#include "ddp/process_group.h"
#include "env/clock.h"

namespace train {

/// Lets all ranks stop after the same step although each hears of it at its own time: now and then they ask each
/// other. Steps between two votes are so many that a vote comes about five times a second, as the slowest rank
/// counts; the number is part of the vote, so that all ranks count alike.
class StopVote {
  public:
    /// `wanted` is asked at every vote; empty: nobody ever wants to stop, and nothing is sent. The same on all
    /// ranks. Borrows the group.
    StopVote(ddp::ProcessGroup& group, std::function<bool()> wanted);

    /// Collective, at every step. True on all ranks from the vote on in which one rank wanted to stop.
    bool passed();

  private:
    void vote();

    ddp::ProcessGroup& group_;
    std::function<bool()> wanted_;
    bool passed_ = false;
    std::uint64_t steps_left_ = 1;
    std::uint64_t steps_between_ = 1;
    ddprun::TimePoint last_vote_;
};

}  // namespace train
