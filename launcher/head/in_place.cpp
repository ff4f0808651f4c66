#include "launcher/head/in_place.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddprun {
bool can_recover_somewhere(const JobState& state) {
    return std::ranges::any_of(state.nodes, &JobState::Node::can_recover);
}

bool all_can_recover(const JobState& state) {
    return std::ranges::all_of(state.nodes, &JobState::Node::can_recover);
}

InPlaceDecision decide_in_place(const JobState& state, const JobPolicy& policy, const FailureFacts& failure,
                                const JobState::InPlace& recovery, TimePoint now) {
    if (policy.recover.mode != RecoverSpec::Mode::Auto) return {};
    if (!permanent_failure(failure).empty()) return {};
    if (stopped_early(failure)) return {false, "exit code 75 means that the ranks have stopped"};
    if (!state.cannot_recover.empty()) return {false, state.cannot_recover};
    if (!can_recover_somewhere(state)) return {};
    if (!all_can_recover(state)) return {false, "not all ranks were ready for it"};
    if (state.anybody_succeeded()) return {false, "a rank has ended"};
    if (state.is_released) return {false, "all ranks had finished"};
    if (2 * recovery.lost > recovery.ranks)
        return {false, fmt::format("{} of {} ranks failed", recovery.lost, recovery.ranks)};
    // Half of a world that has become smaller meanwhile may be all of it.
    if (recovery.failed.size() >= static_cast<std::size_t>(state.ranks()))
        return {false, "no rank is left that has the state"};
    if (state.history.stuck_recoveries > kStuckGenerations)
        return {false, fmt::format("{} recoveries in a row came no step further", kStuckGenerations)};
    if (state.time_up <= now) return {false, "the walltime is over"};
    return {true, ""};
}

InPlaceDecision decide_on_hang(const JobState& state, const JobPolicy& policy, TimePoint now) {
    if (state.hang_ended == state.generation) return {false, "it does not tell which rank is to start again"};
    return decide_in_place(state, policy, {}, {.ranks = state.ranks(), .lost = 1}, now);
}

std::string describe_recovery(const JobState& state, RecoverSpec::Mode mode) {
    if (mode != RecoverSpec::Mode::Auto) return std::string(without_recovery(mode));
    if (!state.cannot_recover.empty()) return "all ranks restart (" + state.cannot_recover + ")";
    if (!can_recover_somewhere(state))
        return "all ranks restart (the program has not announced that it recovers in place)";
    if (!all_can_recover(state)) return "all ranks restart (not all ranks are ready for recovery in place)";
    return "the failed ranks start again in place";
}

std::string describe_rehearsals(const JobState& state, const RecoverSpec& spec) {
    if (spec.rehearse == 0) return "";
    if (state.rehearsals > 0)
        return fmt::format("{} rehearsal{}: all ranks let go and met again, {} steps or more apart",
                           state.rehearsals, state.rehearsals == 1 ? "" : "s", spec.rehearse);
    if (!state.cannot_recover.empty()) return "";  // the line that named the refusal has said so
    const std::string why = all_can_recover(state) && !state.nodes.empty()
                                ? "the job ended too soon for one"
                                : describe_recovery(state, spec.mode);
    return fmt::format("there was no rehearsal (--rehearse): {}", why);
}

}  // namespace ddprun
