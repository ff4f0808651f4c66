#pragma once

#include <string>
#include <vector>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "launcher/tools/batch/job_request.h"

namespace ddprun {

/// A `ddprun pbs ...` or `ddprun slurm ...` command line, without that word.
struct BatchCommand {
    enum class Kind : std::uint8_t { Script, Submit, Show, Help } kind = Kind::Help;
    JobRequest request;    ///< of Script and Submit; complete
    bool to_file = false;  ///< Script: --file was given
    bool follow = true;    ///< --no-follow
    std::string job;       ///< of Show
    std::vector<std::string> remarks;
};
/// Reads `words` and a site's file. The words after the options are ddprun's own command line, which is
/// checked as ddprun would. `env` tells which job this process belongs to. Error: InvalidArgument, NotFound,
/// System, ready to follow "ddprun pbs: ".
Result<BatchCommand> parse_batch_command(Scheduler scheduler, const std::vector<std::string>& words,
                                         const EnvironmentLookup& env);

/// The subcommands ("script", "submit", "status") and all options, for completions.
std::vector<std::string> batch_words();
/// What `ddprun pbs --help` prints.
std::string render_batch_help(Scheduler scheduler);

/// Runs the command. Returns the exit code.
int run_batch_command(Scheduler scheduler, const std::vector<std::string>& words);

}  // namespace ddprun
