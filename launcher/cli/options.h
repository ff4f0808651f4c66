#pragma once

#include <string>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

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
