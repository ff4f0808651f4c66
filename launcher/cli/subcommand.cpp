#include "launcher/cli/subcommand.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/batch_options.h"
#include "launcher/cli/command_words.h"
#include "launcher/cli/option_values.h"
#include "launcher/signals.h"

namespace ddprun {
namespace {

constexpr double kMostTrialSeconds = 30;

/// A subcommand's own options, by all their labels.
OptionKinds options_with(std::vector<std::string_view> value, std::vector<std::string_view> none) {
    return [value = std::move(value),
            none = std::move(none)](std::string_view label) -> std::optional<OptionKind> {
        if (std::find(value.begin(), value.end(), label) != value.end())
            return OptionKind{.takes_value = true};
        if (std::find(none.begin(), none.end(), label) != none.end()) return OptionKind{.takes_value = false};
        return std::nullopt;
    };
}

/// The value of --seconds or --bytes.
Status set_trial_size(const std::string& label, const std::string& value, doctor::TrialSize& size) {
    if (label == "--bytes") {
        size.bytes = value;
        const Result<std::uint64_t> bytes = parse_bytes(value);
        return bytes ? Status() : Status(bytes.error());
    }
    size.seconds = value;
    const Result<double> seconds = parse_double(value);
    if (!seconds) return seconds.error();
    if (*seconds > 0 && *seconds <= kMostTrialSeconds) return {};
    return invalid(fmt::format("'{}' is not between 0 and {}", value, kMostTrialSeconds));
}

}  // namespace

const std::vector<SubcommandRow>& subcommands() {
    static const std::vector<SubcommandRow> rows = {
        {"ps", "[--json]", "The jobs of this user that run on this host, and their workers on all nodes."},
        {"top", "", "The same, live; q or Ctrl-C ends it. One look when standard output is no terminal."},
        {"signal", "NAME [--rank R]", "Send a signal to all workers, or to one."},
        {"stacks", "[--rank R]",
         "Print the stacks of all workers of all nodes, or of one: by libddp's own handler, py-spy, gdb or "
         "eu-stack, whichever there is; without any, what the kernel says."},
        {"drain", "", "Preempt the job: notice and SIGTERM to the workers, --preempt-grace, exit code 75."},
        {"logs", "[-r RANK] [-f]",
         "Print the log files of this attempt; -f follows them, across restarts, to the end of the job."},
        {"clean", "[--dry-run] [--user NAME]",
         "End what killed ddpruns of this user have left on this host: processes, cgroups, job directories; --dry-run only "
         "shows it. Root ends another user's with --user. A job that runs is not touched."},
        {"gpus", "[--json]",
         "The NVIDIA GPUs of this host: how busy they are, their memory. Asks the driver, no job."},
        {"env", "[options]",
         "What was detected here: CPUs, GPUs, allocation; and where each option's value comes from."},
        {"doctor", "[options]",
         "Look for what is wrong with this machine: driver, GPUs, network, limits; with a short all-reduce."},
        {"pbs", "script|submit|status ...",
         "A job script for PBS from few options; submit it and follow the job; follow it again (ddprun pbs --help)."},
        {"slurm", "script|submit|status ...", "The same for Slurm."}};
    return rows;
}

bool is_subcommand(std::string_view word) {
    return std::any_of(subcommands().begin(), subcommands().end(),
                       [word](const SubcommandRow& row) { return row.name == word; });
}

std::vector<std::string> options_of(const SubcommandRow& row) {
    if (row.arguments == "[options]") return {};
    if (row.name == "pbs" || row.name == "slurm") return batch_words();
    std::vector<std::string> options;
    for (const std::string_view word : split(row.arguments, ' ')) {
        const std::string_view option = word.substr(word.starts_with('[') ? 1 : 0);
        if (option.starts_with('-')) options.emplace_back(option.substr(0, option.find(']')));
    }
    if (row.name != "gpus" && row.name != "clean") options.emplace_back("--job");
    options.emplace_back("--help");
    return options;
}

std::string render_subcommands() {
    std::string text;
    for (const SubcommandRow& row : subcommands()) {
        std::string left = fmt::format("  ddprun {} {}", row.name, row.arguments);
        if (left.size() + 2 > kHelpColumn) left.append(1, '\n').append(kHelpColumn, ' ');
        else left.resize(kHelpColumn, ' ');
        text += left + wrap(row.help, kHelpWidth, kHelpColumn) + '\n';
    }
    return text +
           wrap(
               "  --job ID chooses one of several running jobs: the id that ddprun ps shows (or its beginning), "
               "or the --rdzv-id. A program with such a name is run by ddprun -- NAME.",
               kHelpWidth, 2) +
           '\n';
}

Result<AskOptions> parse_ask_options(const std::vector<std::string>& arguments) {
    CommandWords words = split_words(
        arguments, options_with({"--job", "--rank", "-r"}, {"-f", "--follow", "--json", "-h", "--help"}),
        Rest::StandsBetween);
    if (words.wrong) return *words.wrong;
    if (words.unknown) return invalid(fmt::format("{}: unknown option", *words.unknown));
    AskOptions options;
    options.words = std::move(words.rest);
    for (const auto& [label, value] : words.options) {
        if (label == "--job") options.job = value;
        else if (label == "-f" || label == "--follow") options.follow = true;
        else if (label == "--json") options.json = true;
        else if (label == "-h" || label == "--help") options.help = true;
        else {
            const Result<int> rank = parse_rank(value);
            if (!rank) return rank.error().with(label);
            options.rank = *rank;
        }
    }
    return options;
}

Result<DoctorOptions> parse_doctor_options(const std::vector<std::string>& arguments) {
    const CommandWords words = split_words(
        arguments, options_with({"--seconds", "--bytes"}, {"--json", "--no-run", "--no_run", "-h", "--help"}),
        Rest::StandsBetween);
    if (words.wrong) return *words.wrong;
    if (!words.rest.empty()) {
        const std::string& word = words.unknown ? *words.unknown : words.rest.front();
        return invalid(fmt::format("{}: unknown (expected --json, --no-run, --seconds or --bytes)", word));
    }
    DoctorOptions options;
    for (const auto& [label, value] : words.options) {
        if (label == "--json") options.json = true;
        else if (label == "--no-run" || label == "--no_run") options.run = false;
        else if (label == "-h" || label == "--help") options.help = true;
        else if (const Status set = set_trial_size(label, value, options.size); !set)
            return set.error().with(label);
    }
    return options;
}

Result<CleanOptions> parse_clean_options(const std::vector<std::string>& arguments) {
    const CommandWords words = split_words(
        arguments, options_with({"--user"}, {"--dry-run", "--dry_run", "-h", "--help"}), Rest::StandsBetween);
    if (words.wrong) return *words.wrong;
    if (!words.rest.empty()) {
        return invalid(fmt::format("{}: unknown (expected --dry-run or --user NAME)",
                                   words.unknown ? *words.unknown : words.rest.front()));
    }
    CleanOptions options;
    for (const auto& [label, value] : words.options) {
        if (label == "--user") options.user = value;
        else if (label == "-h" || label == "--help") options.help = true;
        else options.dry_run = true;
    }
    return options;
}

int run_subcommand(const std::vector<std::string>& arguments) {
    const std::string& name = arguments.front();
    const std::vector<std::string> words(arguments.begin() + 1, arguments.end());
    unblock_handled_signals();  // blocked for a job; here Ctrl-C and a closed pipe end us as any other
                                // program
    if (name == "env") return show_environment(words);
    if (name == "pbs") return run_batch_command(Scheduler::Pbs, words);
    if (name == "slurm") return run_batch_command(Scheduler::Slurm, words);
    if (name == "doctor") {
        const Result<DoctorOptions> options = parse_doctor_options(words);
        return options ? run_doctor(*options) : complain(name, options.error());
    }
    if (name == "clean") {
        const Result<CleanOptions> options = parse_clean_options(words);
        if (!options) return complain(name, options.error());
        if (!options->help) return clean(*options);
        ddprun::print("{}", render_subcommands());
        return 0;
    }
    const Result<AskOptions> options = parse_ask_options(words);
    if (!options) return complain(name, options.error());
    if (options->help) {
        ddprun::print("{}", render_subcommands());
        return 0;
    }
    if (name == "signal") return send_signal(*options);
    if (name == "logs") return show_logs(*options);
    if (!options->words.empty())
        return complain(name, invalid(fmt::format("'{}': takes no argument", options->words.front())));
    if (name == "ps") return show_jobs(*options);
    if (name == "top") return watch_jobs(*options);
    if (name == "stacks") return show_stacks(*options);
    if (name == "drain") return drain(*options);
    return show_gpus(*options);
}

}  // namespace ddprun
