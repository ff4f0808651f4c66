#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"

/// How all ranks stop after the same step, also in loops without collectives.
///
/// A rank that calls should_stop(n) stores n and then looks whether a stop is written for it (RankLine in
/// env/segment.h). The head asks all nodes for the highest n, and proposes a step above it. Each agent writes
/// the proposal into its workers' lines, makes all threads of the host pass a memory barrier, and only then
/// reads how far they are. So of a rank that goes past the step, either the agent sees the rank there and
/// says so, or the rank sees the proposal and waits there for the decision. If a rank is there already, the
/// head proposes again with twice the margin; if none is, the step is decided, and a rank that waits or comes
/// there stops. The agents answer for their workers: a rank that waits for others in a collective, or
/// computes for long, delays nothing.
///
/// *Not taken:* a vote of the ranks, which needs a collective in every step (or now and then), and which
/// loops without collectives cannot have; a stop "after the next step" without the waiting, which a fast rank
/// passes before it hears of it.
namespace ddprun {

/// What the head knows of an agreement, without acting.
struct StopAgreement {
    enum class Phase : std::uint8_t { Closed, Asking, Proposing };
    Phase phase = Phase::Closed;
    std::uint64_t step = 0;     ///< the proposed one
    std::uint64_t margin = 1;   ///< of the next proposal above the highest step
    std::uint64_t highest = 0;  ///< of the answers so far
    bool listens = true;        ///< all ranks of the answers so far ask for a stop
    std::vector<int> awaited;   ///< nodes that have not answered
    std::vector<int> nodes;     ///< with workers, by group rank
    TimePoint deadline = kNever;
};

namespace stop_event {
/// The ranks are to stop within `time`. `nodes`: those with workers.
struct Noticed {
    std::vector<int> nodes;
    Duration time;
};
struct Answered {
    int node;
    std::uint64_t step;  ///< of the proposal; 0 for a question
    bool listens;
    std::uint64_t highest;
};
/// A worker has failed, a node is lost, or the workers are to stop at once.
struct Broken {
    std::string why;
};
struct TimerFired {};
}  // namespace stop_event
using StopEvent =
    std::variant<stop_event::Noticed, stop_event::Answered, stop_event::Broken, stop_event::TimerFired>;

struct StopActions {
    /// Send all nodes this proposal; 0 asks how far their ranks are.
    std::optional<std::uint64_t> propose;
    struct Decision {
        std::uint64_t step = 0;  ///< 0: there is no common step
        std::string why;         ///< why not, where the ranks listen; else ""
    };
    std::optional<Decision> decide;  ///< the last action of an agreement
};

/// Without an agreement by then the ranks are stopped without one: a quarter of their time, at most this.
inline constexpr Duration kLongestAgreement = std::chrono::seconds(3);
/// With less time than this, there is no attempt at an agreement.
inline constexpr Duration kTooNear = std::chrono::seconds(1);

/// Pure: changes `state`, returns what to do. `deadline` is when TimerFired is due, kNever when closed.
StopActions step(StopAgreement& state, const StopEvent& event, TimePoint now);

}  // namespace ddprun
