#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "env/clock.h"
#include "env/nodes/exchange.h"

namespace ddprun {

/// Files in a directory that all nodes see, one per rank: for launchers that carry nothing (plain srun,
/// PALS).
struct FileExchange {
    std::string directory;
    std::string job;  ///< part of the name: letters, digits, '.', '_', '-'
    int rank = 0;
    int size = 1;
    /// When the scheduler began the job, in seconds since 1970; what is older was left by an earlier run of
    /// it. 0: not known.
    std::int64_t began = 0;
};

/// How this process's job is called there, and when it began (SLURM_JOB_START_TIME, else the age of
/// PBS_NODEFILE).
FileExchange file_exchange_of(std::string directory, const Placement& placement,
                              const EnvironmentLookup& lookup);

/// Nothing is written before the fence. The file is complete when it has its name, is readable for us alone,
/// and is removed at the end of the object. What others own is not believed.
Result<std::unique_ptr<Exchange>> open_file_exchange(FileExchange exchange, TimePoint deadline);

}  // namespace ddprun
