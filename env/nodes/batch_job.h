#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/worker_env.h"

namespace ddprun {

enum class Scheduler : std::uint8_t { Slurm, Pbs, Lsf };
/// "Slurm", "PBS", "LSF".
std::string_view name_of(Scheduler scheduler);

/// The job of a scheduler that this process belongs to.
struct BatchJob {
    Scheduler scheduler = Scheduler::Pbs;
    std::string id;  ///< as the scheduler's own programs take it: "4711.pbs01", "5[0].pbs01", "17_3" of
                     ///< Slurm, "17[3]" of LSF
    std::string submitted_in;  ///< the directory it was submitted in; "" not told
    bool is_script =
        false;  ///< a job script's: not interactive, so it can be run again without anybody there
    bool is_array_element = false;
    bool operator==(const BatchJob&) const = default;
};

/// By the variables that the scheduler sets (PBS_JOBID is Torque's too). nullopt: there is none. Pure.
std::optional<BatchJob> find_batch_job(const EnvironmentLookup& env);

/// Where a scheduler's programs are found: PATH, then in a PBS job what was PATH where it was submitted. A
/// job that is a program and no script (qsub -- ddprun) has a PATH of the system's own directories only.
/// Pure.
std::string scheduler_search_path(const EnvironmentLookup& env);
/// `environment` ("NAME=value") with that as its PATH: for programs of the scheduler, and what looks for
/// them.
std::vector<std::string> scheduler_environment(std::vector<std::string> environment,
                                               const EnvironmentLookup& env);

/// A job's id as a part of a file name: what is neither letter, digit, point nor dash becomes '_'.
std::string file_name_of(std::string_view job_id);

}  // namespace ddprun
