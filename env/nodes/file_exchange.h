#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "env/clock.h"
#include "env/nodes/exchange.h"

namespace ddprun {

/// Files in a directory that all nodes see, one per rank, for launchers without a channel (plain srun, PALS).
struct FileExchange {
    std::string directory;
    std::string job;  ///< part of the file names: letters, digits, '.', '_', '-'
    int rank = 0;
    int size = 1;
    /// Begin of the job by the scheduler, in seconds since 1970; older files are of an earlier run. 0: not
    /// known.
    std::int64_t began = 0;
};

/// The file exchange of this process's job, with its begin by SLURM_JOB_START_TIME, else the age of
/// PBS_NODEFILE.
FileExchange file_exchange_of(std::string directory, const Placement& placement,
                              const EnvironmentLookup& lookup);

/// Writes nothing before the fence. The file is complete when it has its name, only we can read it, and the
/// destructor removes it. Files of other users are refused.
Result<std::unique_ptr<Exchange>> open_file_exchange(FileExchange exchange, TimePoint deadline);

}  // namespace ddprun
