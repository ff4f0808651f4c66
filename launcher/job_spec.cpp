#include "launcher/job_spec.h"

#include <signal.h>

namespace ddprun {

std::map<int, SignalAction> default_signals() {
    std::map<int, SignalAction> actions;
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) actions[signal] = SignalAction::Stop;
    for (const int signal : {SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH}) {
        actions[signal] = SignalAction::Forward;
    }
    return actions;
}

}  // namespace ddprun
