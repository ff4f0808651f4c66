#pragma once

#include <string>

#include "launcher/head/job_state.h"

namespace ddprun {

struct InPlaceDecision {
    bool in_place = false;
    std::string why;  ///< why not; "" where nobody expects it, or where the decision on a restart says it
};

/// Decides whether a failure is recovered in place: the failed ranks start again, the others go on.
/// `recovery`: what was lost since all ranks were last in one world, with this failure. Pure.
InPlaceDecision decide_in_place(const JobState& state, const JobPolicy& policy, const FailureFacts& failure,
                                const JobState::InPlace& recovery, TimePoint now);

/// Decides whether a rank that hangs is killed, to start again in place. Pure.
InPlaceDecision decide_on_hang(const JobState& state, const JobPolicy& policy, TimePoint now);

/// True when all workers have announced that they survive the end of a generation.
bool all_can_recover(const JobState& state);

/// True when the workers of a node have announced it.
bool can_recover_somewhere(const JobState& state);

/// A few words for people: whether this job recovers in place, or why not.
std::string describe_recovery(const JobState& state, RecoverSpec::Mode mode);

/// One line at the end of a job with --rehearse; "" where none is needed.
std::string describe_rehearsals(const JobState& state, const RecoverSpec& spec);

}  // namespace ddprun
