#include "launcher/worker_state.h"

namespace ddprun {

WorkerStep step(WorkerState state, WorkerEvent event) {
    if (state == WorkerState::Ended) return {state, WorkerAction::None};
    switch (event) {
        case WorkerEvent::Exited: return {WorkerState::Ended, WorkerAction::BuryGroup};
        case WorkerEvent::StopRequested:
            if (state != WorkerState::Running) return {state, WorkerAction::None};
            return {WorkerState::Stopping, WorkerAction::SendStop};
        case WorkerEvent::KillRequested:
            if (state == WorkerState::Killed) return {state, WorkerAction::None};
            return {WorkerState::Killed, WorkerAction::SendKill};
    }
    return {state, WorkerAction::None};
}

}  // namespace ddprun
