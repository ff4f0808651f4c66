#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// Warns of each PET_ variable in `environment` ("NAME=value") that belongs to no option. Otherwise nobody
/// would notice a typing error in the description of a pod or a job. Pure.
std::vector<std::string> remarks_on_variables(const std::vector<std::string>& environment);

/// Reads a command line (without argv[0]): torchrun's flags with torchrun's meaning, and ours.
///
/// The command line wins over PET_<NAME> variables, these over --config, and --config over the defaults. The
/// first word that is no option is the program; all later words are the program's own. Reads nothing but
/// `env` and the configuration file.
Result<CommandLine> parse_command_line(const std::vector<std::string>& args, const EnvironmentLookup& env);

/// A job as a JSON file: {"nproc-per-node": 4, "tee": "3", "program": "train", "args": ["--epochs", "2"]}.
struct ConfigFile {
    /// The options in the order of the file: name as written, then its values as text ("1" and "0" for true
    /// and false).
    std::vector<std::pair<std::string, std::vector<std::string>>> options;
    std::optional<std::string> program;
    std::vector<std::string> arguments;
};

/// Reads a configuration file. Error: NotFound or System (the file cannot be read), InvalidArgument (not
/// JSON, or a value of the wrong kind); `what` begins with the path. Names of options are not checked here.
Result<ConfigFile> read_config_file(const std::string& path);
/// The same for text already read; `path` is for messages.
Result<ConfigFile> parse_config(const std::string& text, const std::string& path);

}  // namespace ddprun
