#include "launcher/cli/subcommand.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/batch_options.h"
#include "launcher/cli/option_list.h"
#include "launcher/cli/option_values.h"
#include "launcher/spec/signals.h"
#include "launcher/tools/trace/trace.h"

namespace ddprun {
namespace {

constexpr double kMostTrialSeconds = 30;

/// Checks the value of --seconds.
Result<std::string> parse_trial_seconds(const std::string& value) {
    const Result<double> seconds = parse_double(value);
    if (!seconds) return seconds.error();
    if (*seconds > 0 && *seconds <= kMostTrialSeconds) return value;
    return invalid(fmt::format("'{}' is not between 0 and {}", value, kMostTrialSeconds));
}

/// Checks the value of --bytes, which the trial gets in this form.
Result<std::string> parse_trial_bytes(const std::string& value) {
    const Result<std::uint64_t> bytes = parse_bytes(value);
    return bytes ? Result<std::string>(value) : bytes.error();
}

/// Reads the words of a command that has only options.
Status read_all(OptionList& list, const std::vector<std::string>& arguments, std::string_view expected) {
    const Result<std::vector<std::string>> rest = list.read(arguments);
    if (!rest) return rest.error();
    if (rest->empty()) return {};
    return invalid(fmt::format("{}: unknown (expected {})", rest->front(), expected));
}

}  // namespace

const std::vector<SubcommandRow>& subcommands() {
    using enum SubcommandRow::Takes;
    static const std::vector<SubcommandRow> rows = {
        {"ps", OwnAndJob, "[--json]",
         "The jobs of this user that run on this host, and their workers on all nodes."},
        {"top", OwnAndJob, "",
         "The same, live; q or Ctrl-C ends it. One look when standard output is no terminal."},
        {"signal", OwnAndJob, "NAME [--rank R]", "Send a signal to all workers, or to one."},
        {"stacks", OwnAndJob, "[--rank R]",
         "Print the stacks of all workers of all nodes, or of one: by libddp's own handler, py-spy, gdb or "
         "eu-stack, whichever there is; without any, what the kernel says."},
        {"drain", OwnAndJob, "",
         "Preempt the job: notice and SIGTERM to the workers, --preempt-grace, exit code 75."},
        {"logs", OwnAndJob, "[-r RANK] [-f]",
         "Print the log files of this attempt; -f follows them, across restarts, to the end of the job."},
        {"clean", Own, "[--dry-run] [--user NAME]",
         "End what killed ddpruns of this user have left on this host: processes, cgroups, job directories; --dry-run only "
         "shows it. Root ends another user's with --user. A job that runs is not touched."},
        {"trace", Own, "DIR",
         "Merge the trace files of a job's --trace DIR and print them for ui.perfetto.dev: ddprun trace DIR > job.json. "
         "Asks no job, and works while one runs."},
        {"gpus", Own, "[--json]",
         "The NVIDIA GPUs of this host: how busy they are, their memory. Asks the driver, no job."},
        {"env", OfAJob, "[options]",
         "What was detected here: CPUs, GPUs, allocation; and where each option's value comes from."},
        {"doctor", Own, "[--json] [--no-run] [--seconds S] [--bytes SIZE]",
         "Look for what is wrong with this machine: driver, GPUs, network, limits; with a short all-reduce."},
        {"pbs", OfABatchJob, "script|submit|status ...",
         "A job script for PBS from few options; submit it and follow the job; follow it again (ddprun pbs --help)."},
        {"slurm", OfABatchJob, "script|submit|status ...", "The same for Slurm."}};
    return rows;
}

namespace {

/// nullptr: there is none of that name.
const SubcommandRow* find_subcommand(std::string_view name) {
    const auto found = std::ranges::find(subcommands(), name, &SubcommandRow::name);
    return found == subcommands().end() ? nullptr : &*found;
}

}  // namespace

bool is_subcommand(std::string_view word) { return find_subcommand(word) != nullptr; }

std::vector<std::string> options_of(const SubcommandRow& row) {
    using enum SubcommandRow::Takes;
    if (row.takes == OfAJob) return {};
    if (row.takes == OfABatchJob) return batch_words();
    std::vector<std::string> options;
    for (const std::string_view word : split(row.arguments, ' ')) {
        const std::string_view option = word.substr(word.starts_with('[') ? 1 : 0);
        if (option.starts_with('-')) options.emplace_back(option.substr(0, option.find(']')));
    }
    if (row.takes == OwnAndJob) options.emplace_back("--job");
    options.emplace_back("--help");
    return options;
}

std::string render_subcommands() {
    std::string text;
    for (const SubcommandRow& row : subcommands()) {
        text += help_entry(fmt::format("  ddprun {} {}", row.name, row.arguments), row.help);
    }
    return text +
           wrap(
               "  --job ID chooses one of several running jobs: the id that ddprun ps shows (or its beginning), "
               "or the --rdzv-id. A program with such a name is run by ddprun -- NAME.",
               kHelpWidth, 2) +
           '\n';
}

Result<AskOptions> parse_ask_options(std::string_view name, const std::vector<std::string>& arguments) {
    AskOptions options;
    OptionList list;
    const std::vector<std::string> own = options_of(*find_subcommand(name));
    const auto has = [&own](std::string_view option) { return std::ranges::find(own, option) != own.end(); };
    if (has("--job")) list.value("--job", "ID", into(options.job, parse_text), "");
    if (has("--rank") || has("-r")) list.value("-r,--rank", "RANK", into(options.rank, parse_rank), "");
    if (has("-f")) list.flag("-f,--follow", options.follow, "");
    if (has("--json")) list.flag("--json", options.json, "");
    Result<std::vector<std::string>> words = list.read(arguments);
    if (!words) return words.error();
    options.words = *std::move(words);
    return options;
}

Result<doctor::Options> parse_doctor_options(const std::vector<std::string>& arguments) {
    doctor::Options options;
    OptionList list;
    bool no_run = false;
    list.value("--seconds", "S", into(options.size.seconds, parse_trial_seconds), "");
    list.value("--bytes", "SIZE", into(options.size.bytes, parse_trial_bytes), "");
    list.flag("--json", options.json, "");
    list.flag("--no-run", no_run, "");
    list.flag("-h,--help", options.help, "");
    if (const Status read = read_all(list, arguments, "--json, --no-run, --seconds or --bytes"); !read)
        return read.error();
    options.run = !no_run;
    return options;
}

Result<CleanOptions> parse_clean_options(const std::vector<std::string>& arguments) {
    CleanOptions options;
    OptionList list;
    list.value("--user", "NAME", into(options.user, parse_text), "");
    list.flag("--dry-run", options.dry_run, "");
    if (const Status read = read_all(list, arguments, "--dry-run or --user NAME"); !read) return read.error();
    return options;
}

namespace {

int show_trace(const std::vector<std::string>& words) {
    const Result<std::vector<std::string>> directories = OptionList().read(words);
    if (!directories) return complain("trace", directories.error());
    if (directories->size() != 1)
        return complain("trace", invalid("expected one directory, as in: ddprun trace DIR > job.json"));
    const Result<TraceFiles> files = read_trace_files(directories->front());
    if (!files) return complain("trace", files.error());
    const MergedTrace merged = merge_trace(*files);
    for (const auto* remarks : {&files->remarks, &merged.remarks}) {
        for (const std::string& remark : *remarks)
            ddprun::print(stderr, "ddprun trace: {}\n", printable(remark));
    }
    const bool written = std::fwrite(merged.json.data(), 1, merged.json.size(), stdout) == merged.json.size();
    if (written && std::fflush(stdout) == 0) return 0;
    return complain("trace", Error::system("write to standard output"));
}

}  // namespace

int run_subcommand(const std::vector<std::string>& arguments) {
    const std::string& name = arguments.front();
    const std::vector<std::string> words(arguments.begin() + 1, arguments.end());
    unblock_handled_signals();  // blocked for a job; here Ctrl-C or a closed pipe ends ddprun
    if (name == "env") return show_environment(words);
    if (name == "pbs") return run_batch_command(Scheduler::Pbs, words);
    if (name == "slurm") return run_batch_command(Scheduler::Slurm, words);
    if (name == "doctor") {
        const Result<doctor::Options> options = parse_doctor_options(words);
        return options ? doctor::run(*options) : complain(name, options.error());
    }
    if (std::ranges::any_of(words, [](const auto& word) { return word == "-h" || word == "--help"; })) {
        ddprun::print("{}", render_subcommands());
        return 0;
    }
    if (name == "trace") return show_trace(words);
    if (name == "clean") {
        const Result<CleanOptions> options = parse_clean_options(words);
        return options ? clean(*options) : complain(name, options.error());
    }
    const Result<AskOptions> options = parse_ask_options(name, words);
    if (!options) return complain(name, options.error());
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
