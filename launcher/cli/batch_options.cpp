#include "launcher/cli/batch_options.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/print.h"
#include "env/text.h"
#include "launcher/batch/batch.h"
#include "launcher/cli/command_words.h"
#include "launcher/cli/option_values.h"
#include "launcher/cli/options.h"
#include "launcher/cli/subcommand.h"
#include "launcher/exit_codes.h"
#include "pbs/walltime.h"

namespace ddprun {
namespace {

constexpr int kMostNodes = 1'000'000;

/// What the options of one command line add up to.
struct BatchDraft {
    BatchCommand command;
    std::string file;
};

struct BatchRow {
    std::string_view label, value, help;
    Status (*apply)(BatchDraft& draft, const std::string& value);
};

Status set_number(const std::string& value, int least, int& place) {
    const Result<std::int64_t> number = parse_int_between(value, least, kMostNodes);
    if (!number) return number.error();
    place = static_cast<int>(*number);
    return {};
}

Status set_text(const std::string& value, std::string& place) {
    if (value.empty()) return invalid("the value is empty");
    place = value;
    return {};
}

/// "1:30:00", "90m", "1h"; a bare number is seconds to PBS and minutes to Slurm.
Status set_job_walltime(BatchDraft& draft, const std::string& value) {
    const bool is_clock = value.find(':') != std::string::npos;
    const bool has_unit = !value.empty() && std::isalpha(static_cast<unsigned char>(value.back())) != 0;
    const Result<Duration> span = is_clock   ? pbs::parse_walltime(value)
                                  : has_unit ? parse_duration(value)
                                             : Result<Duration>(invalid(""));
    if (!span || *span <= Duration::zero())
        return invalid(fmt::format("'{}' is not a walltime (expected HH:MM:SS, 90m or 2h)", excerpt(value)));
    draft.command.request.walltime = *span;
    return {};
}

Status set_job_requeue(BatchDraft& draft, const std::string& value) {
    const Result<std::string> word = parse_choice(value, "no auto self");
    if (!word) return word.error();
    using Mode = RequeueSpec::Mode;
    draft.command.request.requeue = *word == "no" ? Mode::No : *word == "auto" ? Mode::Auto : Mode::Self;
    return {};
}

Status add_variable(BatchDraft& draft, const std::string& value) {
    const std::size_t equals = value.find('=');
    if (equals == std::string::npos) return invalid(fmt::format("'{}' is not NAME=VALUE", excerpt(value)));
    draft.command.request.environment.emplace_back(value.substr(0, equals), value.substr(equals + 1));
    return {};
}

Status set_site(BatchDraft& draft, const std::string& value) {
    Result<SiteProfile> site = find_site(value);
    if (!site) return site.error();
    draft.command.request.site = *std::move(site);
    return {};
}

Status add_modules(BatchDraft& draft, const std::string& value) {
    for (const std::string_view one : split(value, ',')) draft.command.request.modules.emplace_back(one);
    return {};
}

const std::vector<BatchRow>& batch_rows() {
    static const std::vector<BatchRow> rows = {
        {"--site", "NAME|FILE",
         "What the cluster's scripts have in common: derecho, polaris, or a FILE.json (docs/batch.md). Default: generic.",
         set_site},
        {"--nodes", "N", "Nodes. Default 1.",
         [](BatchDraft& d, const std::string& v) { return set_number(v, 1, d.command.request.nodes); }},
        {"--gpus-per-node", "N", "GPUs of each node, and workers, unless --nproc-per-node says how many.",
         [](BatchDraft& d, const std::string& v) {
             return set_number(v, 0, d.command.request.gpus_per_node.emplace());
         }},
        {"--cpus-per-node", "N", "Cores of each node.",
         [](BatchDraft& d, const std::string& v) {
             return set_number(v, 0, d.command.request.cpus_per_node.emplace());
         }},
        {"--memory", "SIZE", "Memory of each node, as the scheduler writes it: 480GB.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.memory); }},
        {"--walltime", "SPAN", "How long it may run: HH:MM:SS, 90m or 2h.", set_job_walltime},
        {"--queue", "NAME", "Queue, or partition.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.queue); }},
        {"--partition", "NAME", "Slurm's name of --queue.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.queue); }},
        {"--account", "NAME", "Who pays.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.account); }},
        {"--filesystems", "NAMES", "PBS: -l filesystems=, as in home:eagle.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.filesystems); }},
        {"--name", "NAME", "The job's name. Default: the program's.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.name); }},
        {"--output", "FILE", "Where the output goes. Default: the scheduler's, NAME-ID.log under Slurm.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.command.request.output); }},
        {"--module", "NAME,...", "Modules to load, behind the site's. May be repeated.", add_modules},
        {"--env", "NAME=VALUE", "A variable for the job. May be repeated.", add_variable},
        {"--setup", "LINE",
         "A line of the script before ddprun, as in --setup 'conda activate train'. May be repeated.",
         [](BatchDraft& d, const std::string& v) {
             d.command.request.setup.push_back(v);
             return Status();
         }},
        {"--directive", "LINE", "What stands behind #PBS or #SBATCH in a line of its own. May be repeated.",
         [](BatchDraft& d, const std::string& v) {
             d.command.request.directives.push_back(v);
             return Status();
         }},
        {"--requeue", "no|auto|self",
         "Whether the job goes back into the queue when its time is up (ddprun's --requeue).",
         set_job_requeue},
        {"--file", "FILE",
         "Where the script is written. Default: NAME.pbs or NAME.slurm for submit, standard output for script.",
         [](BatchDraft& d, const std::string& v) { return set_text(v, d.file); }},
        {"--no-follow", "", "submit: print the job's id only. status: one look.",
         [](BatchDraft& d, const std::string&) {
             d.command.follow = false;
             return Status();
         }},
        {"--help", "", "This text.", [](BatchDraft&, const std::string&) { return Status(); }}};
    return rows;
}

const BatchRow* row_of(std::string_view label) {
    std::string dashed(label == "-h" ? "--help" : label);
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    const auto found = std::find_if(batch_rows().begin(), batch_rows().end(),
                                    [&](const BatchRow& row) { return row.label == dashed; });
    return found == batch_rows().end() ? nullptr : &*found;
}

std::optional<OptionKind> kind_of_batch_option(std::string_view label) {
    const BatchRow* row = row_of(label);
    if (row == nullptr) return std::nullopt;
    return OptionKind{.takes_value = !row->value.empty(), .value_name = row->value};
}

/// As ddprun will read it on the node: what is wrong with it is better heard before the queue.
Status take_ddprun_line(std::vector<std::string> words, JobRequest& request) {
    const EnvironmentLookup nothing = [](std::string_view) { return std::nullopt; };
    const Result<CommandLine> line = parse_command_line(words, nothing);
    if (!line) return line.error();
    if (line->action != CommandLine::Run) return invalid("no program given");
    request.counts_workers = line->sources.count("nproc-per-node") != 0;
    for (const char* option : {"requeue", "requeue-script"}) {
        if (line->sources.count(option) != 0)
            return invalid(
                fmt::format("--{}: give it before the program's line, which the script has too", option));
    }
    request.program = line->spec.program.name;
    request.ddprun = std::move(words);
    return {};
}

Result<BatchCommand> finish_status(BatchDraft draft, const std::vector<std::string>& rest,
                                   Scheduler scheduler, const EnvironmentLookup& env) {
    const std::optional<BatchJob> here = find_batch_job(env);
    if (rest.size() > 1) return invalid(fmt::format("'{}': one job at a time", excerpt(rest[1])));
    if (rest.size() == 1) draft.command.job = rest[0];
    else if (here && here->scheduler == scheduler) draft.command.job = here->id;
    if (draft.command.job.empty() || is_option(draft.command.job))
        return invalid("status: which job? (its id, as submit prints it)");
    return std::move(draft.command);
}

Result<BatchCommand> finish_script(BatchDraft draft, std::vector<std::string> rest, Scheduler scheduler) {
    JobRequest& request = draft.command.request;
    if (const Status line = take_ddprun_line(std::move(rest), request); !line) return line.error();
    if (const Status settled = settle(request); !settled) return settled.error();
    draft.command.to_file = !draft.file.empty();
    const std::string suffix = scheduler == Scheduler::Pbs ? ".pbs" : ".slurm";
    request.script = draft.command.to_file ? draft.file : request.name + suffix;
    const bool names_itself =
        scheduler == Scheduler::Pbs && request.requeue && *request.requeue != RequeueSpec::Mode::No;
    if (draft.command.kind == BatchCommand::Kind::Script && names_itself && !draft.command.to_file) {
        draft.command.remarks.push_back(
            fmt::format("save it as {}: by that name it submits itself again", request.script));
    }
    return std::move(draft.command);
}

}  // namespace

Result<BatchCommand> parse_batch_command(Scheduler scheduler, const std::vector<std::string>& words,
                                         const EnvironmentLookup& env) {
    using Kind = BatchCommand::Kind;
    BatchDraft draft;
    if (words.empty() || words[0] == "-h" || words[0] == "--help") return std::move(draft.command);
    const Result<std::string> verb = parse_choice(words[0], "script submit status");
    if (!verb) return verb.error();
    draft.command.kind = *verb == "script" ? Kind::Script : *verb == "submit" ? Kind::Submit : Kind::Show;

    const Rest rest = draft.command.kind == Kind::Show ? Rest::StandsBetween : Rest::IsTheProgram;
    CommandWords split = split_words({words.begin() + 1, words.end()}, kind_of_batch_option, rest);
    if (split.wrong) return *split.wrong;
    if (split.unknown)
        return invalid(
            fmt::format("{}: unknown option of {} (ddprun's own stand behind --)", *split.unknown, *verb));
    for (const auto& [label, value] : split.options) {
        const BatchRow* row = row_of(label);
        if (row->label == "--help") return BatchCommand{};
        if (const Status applied = row->apply(draft, value); !applied) return applied.error().with(label);
    }
    if (draft.command.kind == Kind::Show) return finish_status(std::move(draft), split.rest, scheduler, env);
    return finish_script(std::move(draft), std::move(split.rest), scheduler);
}

std::vector<std::string> batch_words() {
    std::vector<std::string> words = {"script", "submit", "status"};
    for (const BatchRow& row : batch_rows()) words.emplace_back(row.label);
    return words;
}

std::string render_batch_help(Scheduler scheduler) {
    const std::string_view word = scheduler == Scheduler::Pbs ? "pbs" : "slurm";
    std::string text = fmt::format(
        "usage: ddprun {0} script [options] [--] [options of ddprun] program [arguments]   prints a job script\n"
        "       ddprun {0} submit [options] [--] [options of ddprun] program [arguments]   submits it, follows the job\n"
        "       ddprun {0} status [--no-follow] JOB                                        follows a job\n\n",
        word);
    for (const BatchRow& row : batch_rows()) {
        std::string left = fmt::format("  {} {}", row.label, row.value);
        if (left.size() + 2 > kHelpColumn) left.append(1, '\n').append(kHelpColumn, ' ');
        else left.resize(kHelpColumn, ' ');
        text += left + wrap(row.help, kHelpWidth, kHelpColumn) + '\n';
    }
    return text;
}

int run_batch_command(Scheduler scheduler, const std::vector<std::string>& words) {
    const Result<BatchCommand> command = parse_batch_command(scheduler, words, process_environment);
    if (!command) {
        ddprun::print(stderr, "ddprun {}: {}\n", scheduler == Scheduler::Pbs ? "pbs" : "slurm",
                      printable(command.error().what));
        return static_cast<int>(ExitCode::Usage);
    }
    for (const std::string& remark : command->remarks)
        ddprun::print(stderr, "ddprun: {}\n", printable(remark));
    switch (command->kind) {
        case BatchCommand::Kind::Script:
            return print_job_script(scheduler, command->request, command->to_file);
        case BatchCommand::Kind::Submit: return submit_job(scheduler, command->request, command->follow);
        case BatchCommand::Kind::Show: return show_job(scheduler, command->job, command->follow);
        case BatchCommand::Kind::Help: break;
    }
    ddprun::print("{}", render_batch_help(scheduler));
    return 0;
}

}  // namespace ddprun
