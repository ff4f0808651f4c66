#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/ask/ask.h"
#include "launcher/ask/clean.h"
#include "launcher/doctor/doctor.h"

namespace ddprun {

/// `ddprun ps` and its like: they ask a running job and start nothing. The word must be the first of the
/// command line, exactly; a program of that name is run by `ddprun -- ps`, or with any option before it.
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

/// Error: InvalidArgument, ready to follow "ddprun ps: ".
Result<AskOptions> parse_ask_options(const std::vector<std::string>& arguments);
Result<CleanOptions> parse_clean_options(const std::vector<std::string>& arguments);
Result<DoctorOptions> parse_doctor_options(const std::vector<std::string>& arguments);

/// Runs a subcommand: `arguments` begin with its name. Returns the exit code: 0, 1 the job cannot or will not
/// do it, 64 wrong usage, 69 there is no such job.
int run_subcommand(const std::vector<std::string>& arguments);
/// `ddprun env`: takes the options of a job.
int show_environment(const std::vector<std::string>& options);

}  // namespace ddprun
