#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/tools/ask.h"
#include "launcher/tools/clean.h"
#include "launcher/tools/doctor/doctor.h"

namespace ddprun {

/// A subcommand of ddprun, such as `ps`. Its name must be exactly the first word of the command line; `ddprun
/// -- ps`, or any option before it, runs a program of that name.
struct SubcommandRow {
    /// The options that it takes: those of `arguments`, these and --job, those of a job, those of a batch
    /// job.
    enum class Takes : std::uint8_t { Own, OwnAndJob, OfAJob, OfABatchJob };
    std::string_view name;
    Takes takes;
    std::string_view arguments;  ///< as --help shows them
    std::string_view help;
};
const std::vector<SubcommandRow>& subcommands();
bool is_subcommand(std::string_view word);
/// The options of a subcommand, for completions: {"--rank", "--job"}. Empty: it has those of a job.
std::vector<std::string> options_of(const SubcommandRow& row);
/// The part of --help about the subcommands.
std::string render_subcommands();

/// Reads the options of the subcommand `name`, and refuses those that its row does not have. Error:
/// InvalidArgument, ready to follow "ddprun ps: ".
Result<AskOptions> parse_ask_options(std::string_view name, const std::vector<std::string>& arguments);
Result<CleanOptions> parse_clean_options(const std::vector<std::string>& arguments);
Result<doctor::Options> parse_doctor_options(const std::vector<std::string>& arguments);

/// Runs a subcommand: `arguments` begin with its name. Returns the exit code: 0; 1: the job cannot or will
/// not do it; 64: wrong usage; 69: no such job.
int run_subcommand(const std::vector<std::string>& arguments);
/// `ddprun env`: takes the options of a job.
int show_environment(const std::vector<std::string>& options);

}  // namespace ddprun
