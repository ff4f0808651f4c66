#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "env/clock.h"

namespace ddprun {

/// What the ranks have committed since a start of all of them.
struct CommittedTime {
    std::int64_t steps = -1;  ///< by the program's own count, which goes on after a restart; -1: it has none
    std::int64_t commits = -1;  ///< since the start; -1: the program commits nothing
    Duration time{};            ///< of these commits
    /// Takes the larger of each value. The ranks have the same commits, but the time of a rank whose node was
    /// replaced begins with the spare.
    void raise_to(const CommittedTime& other);
};

/// The time in which a job got nowhere, by cause.
struct LostTime {
    Duration failures{};  ///< recoveries in place, from the failure until all ranks have joined
    Duration restarts{};  ///< from the end of a generation to the next start of all ranks, and repeated steps
    Duration rehearsals{};  ///< generations in place without a failure
};

struct JobTime {
    std::optional<Duration>
        useful;  ///< of the committed steps that count in the end; nullopt: none is committed
    LostTime lost;
};

/// Adds up a job's starts, the latest last. A start that goes on behind the last step of an earlier one, from
/// a checkpoint, repeats steps: their time is lost by the restart. Pure.
JobTime add_up(const std::vector<CommittedTime>& starts, LostTime lost);

}  // namespace ddprun
