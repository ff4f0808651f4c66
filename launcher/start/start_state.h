#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "launcher/start/starter_command.h"

namespace ddprun {

/// A host that cannot take part.
struct StartFailure {
    int node = 0;
    std::string why;  ///< the reason of its ddprun, or its starter's last lines
};

/// The most starters that start at a time: the encryption of all their connections shares the head's CPUs.
inline constexpr std::size_t kMostStarting = 64;

/// The state of the start of the other hosts. A starter is a process that starts ddprun on some of them.
///
///   Starting --no host is missing, or 2 s after the first failure--> Settled --finish--> Ending --> Ended
///       \___________________________________ finish ______________________________________/
///
/// Ending: starters end by themselves; those that run at `kill_at`, or whose host is silent, are killed.
struct StartState {
    enum class Phase : std::uint8_t { Starting, Settled, Ending, Ended };
    struct Host {
        enum Phase : std::uint8_t { Missing, Joined, Failed };
        std::size_t starter = 0;  ///< its number
        Phase phase = Missing;
        std::string told = {};  ///< the reason of its own ddprun; read with TimePassed and Ended; "" none
    };
    struct Starter {
        enum Phase : std::uint8_t { Waiting, Running, Ended };
        StarterCommand command;
        Phase phase = Waiting;
        bool is_silent = false;  ///< its only host is lost, so the starter may never end
        std::string words;       ///< the end of what it wrote; cleared when its only host joins
    };
    Duration timeout{};             ///< a host must join within this time after the last starter has begun
    std::map<int, Host> hosts;      ///< by node rank; only those that a starter starts
    std::vector<Starter> starters;  ///< they begin in this order
    Phase phase = Phase::Starting;
    // Counted, because every event of a large job asks for them.
    std::size_t missing_hosts = 0, begun = 0, running = 0;  ///< `begun` and `running`: starters
    std::vector<std::size_t> starting;  ///< running starters that had missing hosts; at most kMostStarting
    std::vector<StartFailure> failures;
    TimePoint late_at = kNever, settle_at = kNever, kill_at = kNever;
    [[nodiscard]] std::vector<int> missing() const;  ///< node ranks
};
StartState begin_start(std::vector<StarterCommand> commands, Duration timeout);

namespace start_event {
struct Begun {
    std::size_t starter;
    Status outcome;
};
struct Ended {
    std::size_t starter;
    std::optional<int> exit_code;
};
struct TimePassed {};
struct Joined {
    int node;
};
/// The node is lost and its host sends nothing any more.
struct FellSilent {
    int node;
};
/// The job is over; starters have `timeout` to pass on the last lines.
struct Finish {
    Duration timeout;
};
}  // namespace start_event

using StartEvent = std::variant<start_event::Begun, start_event::Ended, start_event::TimePassed,
                                start_event::Joined, start_event::FellSilent, start_event::Finish>;

struct StartActions {
    std::optional<std::size_t> begin;  ///< run this starter and feed Begun
    bool settled = false;              ///< remove the secret; report state.failures if there are any
    std::vector<std::size_t> kill;     ///< starters
    bool ended = false;                ///< no starter runs, after Finish
};

/// Pure: changes `state`, returns what to do, in the order of the members.
StartActions step(StartState& state, const StartEvent& event, TimePoint now);

}  // namespace ddprun
