#pragma once

#include "launcher/tools/doctor/trial.h"

namespace ddprun {

/// The options of `ddprun doctor`.
struct DoctorOptions {
    bool json = false;         ///< --json
    bool run = true;           ///< false with --no-run
    bool help = false;         ///< -h, --help
    doctor::TrialSize size{};  ///< --seconds, --bytes
};

/// `ddprun doctor`: examines this machine, tries an all-reduce, and prints what is wrong and what to set.
/// Returns the exit code: 0, or 1 when a finding is an error (a warning is none).
int run_doctor(const DoctorOptions& options);

}  // namespace ddprun
