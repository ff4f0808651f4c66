#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// `ddprun ps` and its like: they ask a running job and start nothing. The word must be the first of the command line,
/// exactly; a program of that name is run by `ddprun -- ps`, or with any option before it.
struct SubcommandRow {
    std::string_view name;
    std::string_view arguments;  ///< as --help shows them
    std::string_view help;
};
const std::vector<SubcommandRow>& subcommands();
bool is_subcommand(std::string_view word);
/// The options a subcommand takes, for completions: {"--rank", "--job"}. Empty: it takes those of a job.
std::vector<std::string> options_of(const SubcommandRow& row);
/// The part of --help about them.
std::string render_subcommands();

/// What was said behind the subcommand's name.
struct AskOptions {
    std::string job;               ///< --job; "" the only one
    std::optional<int> rank;       ///< -r, --rank
    bool follow = false;           ///< -f, --follow
    bool json = false;             ///< --json
    bool help = false;             ///< -h, --help
    std::vector<std::string> words;  ///< the others
};
/// Error: InvalidArgument, ready to follow "ddprun ps: ".
Result<AskOptions> parse_ask_options(const std::vector<std::string>& arguments);

}  // namespace ddprun
