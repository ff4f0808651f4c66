#pragma once

#include <map>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// What the user asked for.
struct CommandLine {
    enum Action { Run, Help, Version, PrintCompletion, PrintMan } action = Run;
    JobSpec spec;      ///< for Run; checked, without contradictions
    std::string text;  ///< for the other actions: print it and exit with 0
    /// What the user should know although nothing is wrong ("--start-method: accepted, without effect: ...").
    std::vector<std::string> remarks;
    /// The options that were given, by long name, and their source: "command line", "PET_NNODES", "job.json".
    std::map<std::string, std::string> sources;
    /// The values as they were written; those of a repeatable option are joined with commas.
    std::map<std::string, std::string> values;
};

/// Lines about PET_ variables in `environment` ("NAME=value") that no option has: a typing error in a pod's
/// or a job's description would be ignored without a word. Pure.
std::vector<std::string> remarks_on_variables(const std::vector<std::string>& environment);

/// Reads a command line (without argv[0]): torchrun's flags with torchrun's meaning, and ours.
///
/// The command line wins over PET_<NAME> variables, these over --config, and --config over the defaults. The
/// first word that is no option is the program; all later words are the program's own. Reads nothing but
/// `env` and the configuration file.
Result<CommandLine> parse_command_line(const std::vector<std::string>& args, const EnvironmentLookup& env);

}  // namespace ddprun
