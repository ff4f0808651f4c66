#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// A job as a JSON file: {"nproc-per-node": 4, "tee": "3", "program": "train", "args": ["--epochs", "2"]}.
struct ConfigFile {
    /// The options in the order of the file: name as written, then its values as text ("1" and "0" for true
    /// and false).
    std::vector<std::pair<std::string, std::vector<std::string>>> options;
    std::optional<std::string> program;
    std::vector<std::string> arguments;
};

/// Error: NotFound or System (the file cannot be read), InvalidArgument (not JSON, or a value of the wrong
/// kind); `what` begins with the path. Names of options are not checked here.
Result<ConfigFile> read_config_file(const std::string& path);
/// The same for text already read; `path` is for messages.
Result<ConfigFile> parse_config(const std::string& text, const std::string& path);

}  // namespace ddprun
