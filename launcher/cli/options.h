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
    JobSpec spec;      ///< for Run; checked, contradictions have been refused
    std::string text;  ///< for the other actions: print it and exit with 0
    /// What the user should know though nothing is wrong ("--start-method: accepted, without effect: ...").
    std::vector<std::string> remarks;
    /// Which options were given, by long name, and where: "command line", "PET_NNODES", "job.json".
    std::map<std::string, std::string> sources;
    /// Their values as they were written; of a repeatable option joined with commas.
    std::map<std::string, std::string> values;
};

/// Reads a command line (without argv[0]): torchrun's flags with torchrun's meaning, and ours.
///
/// The command line wins over PET_<NAME> variables, these over --config, that over the defaults. The first
/// word that is no option is the program; what follows belongs to it, untouched. Reads nothing but `env` and
/// the configuration file.
/// Error: InvalidArgument, one line that names the option and the value, ready to follow "ddprun: ".
/// The caller exits with ExitCode::Usage. System or NotFound: the configuration file cannot be read.
Result<CommandLine> parse_command_line(const std::vector<std::string>& args, const EnvironmentLookup& env);

}  // namespace ddprun
