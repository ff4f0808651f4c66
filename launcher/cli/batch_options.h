#pragma once

#include <string>
#include <vector>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "launcher/batch/job_request.h"

namespace ddprun {

/// `ddprun pbs ...` and `ddprun slurm ...`, behind that word.
struct BatchCommand {
    enum class Kind : std::uint8_t { Script, Submit, Show, Help } kind = Kind::Help;
    JobRequest request;    ///< of Script and Submit; settled
    bool to_file = false;  ///< Script: --file was given
    bool follow = true;    ///< --no-follow
    std::string job;       ///< of Show
    std::vector<std::string> remarks;
};
/// The words behind the options are ddprun's own command line, which is checked as ddprun would. Reads a
/// site's file. `env` tells the job that this process belongs to. Error: InvalidArgument, NotFound, System,
/// ready to follow "ddprun pbs: ".
Result<BatchCommand> parse_batch_command(Scheduler scheduler, const std::vector<std::string>& words,
                                         const EnvironmentLookup& env);

/// "script", "submit", "status" and all options, for completions.
std::vector<std::string> batch_words();
/// What `ddprun pbs --help` prints.
std::string render_batch_help(Scheduler scheduler);

/// Runs it. Returns the exit code.
int run_batch_command(Scheduler scheduler, const std::vector<std::string>& words);

}  // namespace ddprun
