#include "launcher/cli/subcommand.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/help.h"
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
    return Error::invalid(fmt::format("'{}' is not between 0 and {}", value, kMostTrialSeconds));
}

/// Checks the value of --bytes, which the trial gets in this form.
Result<std::string> parse_trial_bytes(const std::string& value) {
    const Result<std::uint64_t> bytes = parse_bytes(value);
    return bytes ? Result<std::string>(value) : bytes.error();
}

void declare_none(OptionList&, SubcommandDraft&) {}
void declare_job(OptionList& options, SubcommandDraft& draft) {
    options.value(
        "--job", "ID", into(draft.ask.job, parse_text),
        "The job, by the id that ddprun ps shows (or its beginning), or by its --rdzv-id. Needed when "
        "several jobs run here.");
}
void declare_json(OptionList& options, SubcommandDraft& draft) {
    options.flag("--json", draft.ask.json, "Print JSON: docs/events.md describes it.");
}
void declare_ps(OptionList& options, SubcommandDraft& draft) {
    declare_job(options, draft);
    declare_json(options, draft);
}
void declare_rank(OptionList& options, SubcommandDraft& draft) {
    options.value("-r,--rank", "RANK", into(draft.ask.rank, parse_rank), "Only this rank. Default: all.");
    declare_job(options, draft);
}
void declare_logs(OptionList& options, SubcommandDraft& draft) {
    options.flag("-f,--follow", draft.ask.follow,
                 "Print new lines as they come, across restarts, until the job ends.");
    declare_rank(options, draft);
}
void declare_clean(OptionList& options, SubcommandDraft& draft) {
    options.flag("--dry-run", draft.clean.dry_run, "Only show what would be ended and removed.");
    options.value("--user", "NAME", into(draft.clean.user, parse_text),
                  "Clean after this user, a name or number. Only root may do it.");
}
void declare_doctor(OptionList& options, SubcommandDraft& draft) {
    doctor::Options& doctor = draft.doctor;
    options.flag("--json", doctor.json, "Print one JSON object with the findings and the facts behind them.");
    options.flag(
        "--no-run", [&doctor] { doctor.run = false; }, "Leave out the all-reduce.");
    options.value("--seconds", "S", into(doctor.size.seconds, parse_trial_seconds),
                  "How long the all-reduce lasts, up to 30. Default 2.");
    options.value("--bytes", "SIZE", into(doctor.size.bytes, parse_trial_bytes),
                  "How much each worker gives to the all-reduce. Default 256MiB of a GPU, else 64MiB.");
}

int show_trace(SubcommandDraft& draft) {
    const std::vector<std::string>& directories = draft.ask.words;
    if (directories.size() != 1)
        return complain("trace",
                        Error::invalid("expected one directory, as in: ddprun trace DIR > job.json"));
    const Result<TraceFiles> files = read_trace_files(directories.front());
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

template <int (*ask)(const AskOptions&)>
int run_ask(SubcommandDraft& draft) {
    return ask(draft.ask);
}
template <Scheduler scheduler>
int run_batch(SubcommandDraft& draft) {
    return run_batch_command(scheduler, draft.ask.words);
}

}  // namespace

const std::vector<Subcommand>& subcommands() {
    static const std::vector<Subcommand> rows = {
        {"ps", "", "", "Show the jobs of this user that run on this host, and their workers on all nodes.",
         declare_ps, run_ask<show_jobs>},
        {"top", "", "",
         "Show the same as ps, live; q or Ctrl-C ends it. When standard output is no terminal, show it once.",
         declare_job, run_ask<watch_jobs>},
        {"signal", "NAME", "HUP INT QUIT TERM KILL USR1 USR2 CONT STOP",
         "Send a signal to all workers, or to one.", declare_rank, run_ask<send_signal>},
        {"stacks", "", "",
         "Print the stacks of all workers of all nodes, or of one. They come from libddp's own handler, "
         "py-spy, gdb or eu-stack, whichever there is; else the kernel tells what each worker waits for.",
         declare_rank, run_ask<show_stacks>},
        {"drain", "", "",
         "Preempt the job: notice and SIGTERM to the workers, --preempt-grace, exit code 75.", declare_job,
         run_ask<drain>},
        {"logs", "", "", "Print the log files of this attempt.", declare_logs, run_ask<show_logs>},
        {"clean", "", "",
         "End what killed ddpruns of this user have left on this host: processes, cgroups, job directories. "
         "A job that runs is not touched.",
         declare_clean, [](SubcommandDraft& draft) { return clean(draft.clean); }},
        {"trace", "DIR", "@directory",
         "Merge the trace files of a job's --trace DIR and print them for ui.perfetto.dev: ddprun trace DIR "
         "> job.json. It asks no job, and works while one runs.",
         declare_none, show_trace},
        {"gpus", "", "",
         "Show the NVIDIA GPUs of this host: how busy they are, their memory. It asks the driver, no job.",
         declare_json, run_ask<show_gpus>},
        {"env", "", "",
         "Show what ddprun detects here: CPUs, GPUs, allocation; and the source of each option's value.",
         nullptr, [](SubcommandDraft& draft) { return show_environment(draft.ask.words); }, true},
        {"doctor", "", "",
         "Look for what is wrong with this machine: driver, GPUs, NCCL's variables, network, memory, limits, "
         "clock; then run a short all-reduce among the GPUs, or the CPUs. Each line is ok, note, warning or "
         "error, and says what to set. The exit code is 1 when there is an error, else 0.",
         declare_doctor, [](SubcommandDraft& draft) { return doctor::run(draft.doctor); }},
        {"pbs", "script|submit|status ...", "script submit status @file",
         "Make a job script for PBS from few options; submit it and follow the job; follow it again.",
         declare_batch_options, run_batch<Scheduler::Pbs>, true},
        {"slurm", "script|submit|status ...", "script submit status @file", "The same as pbs, for Slurm.",
         declare_batch_options, run_batch<Scheduler::Slurm>, true}};
    return rows;
}

const Subcommand* find_subcommand(std::string_view name) {
    const auto found = std::ranges::find(subcommands(), name, &Subcommand::name);
    return found == subcommands().end() ? nullptr : &*found;
}

Result<SubcommandDraft> parse_subcommand(std::string_view name, const std::vector<std::string>& words) {
    const Subcommand& row = *find_subcommand(name);
    SubcommandOptions options(row);
    SubcommandDraft& draft = options.draft;
    draft.ask.words = words;
    if (row.reads_options) return std::move(draft);
    Result<std::vector<std::string>> rest = options.list.read(words);
    if (!rest) return rest.error();
    if (row.arguments.empty() && !rest->empty())
        return Error::invalid(fmt::format("{}: unknown{}", excerpt(rest->front()), options.list.expected()));
    draft.ask.words = *std::move(rest);
    return std::move(draft);
}

int run_subcommand(const std::vector<std::string>& arguments) {
    const Subcommand& row = *find_subcommand(arguments.front());
    const std::vector<std::string> words(arguments.begin() + 1, arguments.end());
    unblock_handled_signals();  // blocked for a job; here Ctrl-C or a closed pipe ends ddprun
    const auto asks_for_help = [](const auto& word) { return word == "-h" || word == "--help"; };
    const bool has_program = row.declare == declare_batch_options;  // the word may be the program's
    if (!has_program && std::ranges::any_of(words, asks_for_help)) {
        ddprun::print("{}", render_subcommand_help(row));
        return 0;
    }
    Result<SubcommandDraft> draft = parse_subcommand(row.name, words);
    return draft ? row.run(*draft) : complain(arguments.front(), draft.error());
}

}  // namespace ddprun
