#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

enum class Scheduler : std::uint8_t { Slurm, Pbs, Lsf };
/// "Slurm", "PBS", "LSF".
std::string_view name_of(Scheduler scheduler);

/// The job of a scheduler that this process belongs to.
struct BatchJob {
    Scheduler scheduler = Scheduler::Pbs;
    std::string id;  ///< for the scheduler's own programs: "4711.pbs01", "5[0].pbs01", Slurm's "17_3",
                     ///< LSF's "17[3]"
    std::string submitted_in;  ///< the directory it was submitted in; "" not known
    bool is_script = false;    ///< has a job script, so it can run again; false: interactive
    bool is_array_element = false;
    bool operator==(const BatchJob&) const = default;
};

/// Finds the job by the scheduler's variables (PBS_JOBID is also Torque's). nullopt: no job. Pure.
std::optional<BatchJob> find_batch_job(const EnvironmentLookup& env);

/// The PATH for a scheduler's programs: ours, then in a PBS job that of its submission, because a job without
/// a script (qsub -- ddprun) has a PATH of the system's directories only. Pure.
std::string scheduler_search_path(const EnvironmentLookup& env);
/// `environment` ("NAME=value") with scheduler_search_path() as its PATH, for programs of the scheduler and
/// their callers.
std::vector<std::string> scheduler_environment(std::vector<std::string> environment,
                                               const EnvironmentLookup& env);

/// A job's id as a part of a file name: characters other than letters, digits, '.' and '-' become '_'.
std::string file_name_of(std::string_view job_id);

/// A line about a job of several hosts of a scheduler whose jobs ddprun does not read (Grid Engine, Cobalt,
/// OAR, PJM), and the remedy; "" there is none. Pure but for `read_file`.
std::string remark_on_other_scheduler(
    const EnvironmentLookup& variable,
    const std::function<Result<std::string>(const std::string& path)>& read_file);

}  // namespace ddprun
