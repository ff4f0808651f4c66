#pragma once

#include <cstdint>

namespace ddprun {

/// Life of one worker process as its agent sees it.
///
///   Running --stop--> Stopping --kill--> Killed --exit--> Ended
///      \________________ exit ______________________________/
///
/// A stop is sent once however often it is asked for; a kill may follow a stop, never the other way round.
enum class WorkerState : std::uint8_t { Running, Stopping, Killed, Ended };

enum class WorkerEvent : std::uint8_t { StopRequested, KillRequested, Exited };

enum class WorkerAction : std::uint8_t {
    None,
    SendStop,      ///< the stop signal, to the group
    SendKill,      ///< SIGKILL, to the group
    BuryGroup,     ///< SIGKILL to what is left of the group, then reap its leader
};

struct WorkerStep {
    WorkerState next;
    WorkerAction action;
    bool operator==(const WorkerStep&) const = default;
};

/// Pure. An event that makes no sense in a state (a second exit) changes nothing.
WorkerStep step(WorkerState state, WorkerEvent event);

}  // namespace ddprun
