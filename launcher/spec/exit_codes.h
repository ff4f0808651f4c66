#pragma once

#include <sysexits.h>

namespace ddprun {

/// ddprun's own exit codes. Any other code is the failed worker's: 1-127 as it exited, or 128 + signal.
enum class ExitCode : int {
    Success = 0,
    Usage = EX_USAGE,              ///< 64: the command line or a configuration file is wrong
    Unavailable = EX_UNAVAILABLE,  ///< 69: rendezvous failed or a peer is not reachable
    Internal = EX_SOFTWARE,        ///< 70: a bug or a system call of ours failed
    TryAgain = EX_TEMPFAIL,        ///< 75: preempted or stopped by a signal or the walltime; requeue me
    DoNotRequeue = 93,             ///< a worker exited with this code: starting again is useless
    Hung = 124,                    ///< no progress for --hang-timeout; the code of timeout(1)
    NotExecutable = 126,           ///< the program was found but cannot be executed
    NotFound = 127,                ///< the program does not exist
};

}  // namespace ddprun
