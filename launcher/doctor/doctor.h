#pragma once

#include "launcher/doctor/trial.h"

namespace ddprun {

/// What was said behind `ddprun doctor`.
struct DoctorOptions {
    bool json = false;         ///< --json
    bool run = true;           ///< not --no-run
    bool help = false;         ///< -h, --help
    doctor::TrialSize size{};  ///< --seconds, --bytes
};

/// `ddprun doctor`: looks at this machine, tries an all-reduce, says what is wrong and what to set.
/// Returns the exit code: 0, 1 something is wrong (an error among the findings; warnings are none).
int run_doctor(const DoctorOptions& options);

}  // namespace ddprun
