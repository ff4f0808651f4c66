#include "launcher/cli/subcommand.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "env/io/file.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/help.h"
#include "launcher/cli/options.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/tools/batch/batch.h"
#include "pbs/qstat.h"

namespace ddprun {
namespace {

constexpr int kMostNodes = 1'000'000;

auto count_from(int least) {
    return [least](std::string_view value) -> Result<int> {
        const Result<std::int64_t> number = parse_int_between(value, least, kMostNodes);
        return number ? Result<int>(static_cast<int>(*number)) : number.error();
    };
}

/// "2-12", "2-12:30", "2-12:30:00": Slurm's way to write days. The hours come next.
Result<Duration> parse_days(const std::string& value, std::size_t dash) {
    std::string clock = value.substr(dash + 1);
    for (auto colons = std::count(clock.begin(), clock.end(), ':'); colons < 2; ++colons) clock += ":00";
    return pbs::parse_walltime(value.substr(0, dash) + ":" + clock);
}

/// "1:30:00", "2-00:00:00", "90m", "1h"; a bare number is refused, because it means seconds to PBS and
/// minutes to Slurm.
Result<Duration> parse_job_walltime(const std::string& value) {
    const std::size_t dash = value.find('-');
    const bool is_clock = value.find(':') != std::string::npos;
    const bool has_unit = !value.empty() && std::isalpha(static_cast<unsigned char>(value.back())) != 0;
    const Result<Duration> span = dash != value.npos ? parse_days(value, dash)
                                  : is_clock         ? pbs::parse_walltime(value)
                                  : has_unit         ? parse_duration(value)
                                                     : Result<Duration>(Error::invalid(""));
    if (!span || *span <= Duration::zero())
        return Error::invalid(fmt::format(
            "'{}' is not a walltime (expected HH:MM:SS, D-HH:MM:SS, 90m, 2h or 1d)", excerpt(value)));
    return *span;
}

Result<std::pair<std::string, std::string>> parse_job_variable(std::string_view value) {
    const std::size_t equals = value.find('=');
    if (equals == std::string_view::npos)
        return Error::invalid(fmt::format("'{}' is not NAME=VALUE", excerpt(value)));
    return std::pair{std::string(value.substr(0, equals)), std::string(value.substr(equals + 1))};
}

/// Adds what `parse` makes of each value.
template <class Element, class Parse>
TakeValue onto(std::vector<Element>& place, Parse parse) {
    return [&place, parse](const std::string& value) -> Status {
        return into(place.emplace_back(), parse)(value);
    };
}

/// The options of a job that its script carries besides the requested resources.
void declare_script_options(OptionList& options, BatchCommand& command) {
    JobRequest& request = command.request;
    const auto as_it_is = [](const std::string& line) { return Result<std::string>(line); };
    const auto add_modules = [&request](const std::string& value) -> Status {
        for (const std::string_view one : split(value, ',')) request.modules.emplace_back(one);
        return {};
    };
    options.value("-J,--name,--job-name", "NAME", into(request.name, parse_text),
                  "Name of the job. Default: the program's.");
    options.value("-o,--output", "FILE", into(request.output, parse_text),
                  "The file for the job's output. Default: the scheduler's, NAME-ID.log under Slurm.",
                  "@file");
    options.value("--module", "NAME,...", add_modules, "Modules to load after the site's. May be repeated.");
    options.value("--env", "NAME=VALUE", onto(request.environment, parse_job_variable),
                  "A variable for the job. May be repeated.");
    options.value(
        "--setup", "LINE", onto(request.setup, as_it_is),
        "A line of the script before ddprun, as in --setup 'conda activate train'. May be repeated.");
    options.value("--directive", "LINE", onto(request.directives, as_it_is),
                  "A line of its own after #PBS or #SBATCH. May be repeated.");
    options.value("--file", "FILE", into(command.file, parse_text),
                  "The file for the script. Default: NAME.pbs or NAME.slurm for submit, standard output for "
                  "script.",
                  "@file");
}

Error unknown_batch_option(const OptionList& options, const std::string& word, const std::string& verb) {
    const std::string label = label_of(word);
    const std::string near =
        label.starts_with("--") ? options.nearest_to(std::string_view(label).substr(2)) : "";
    const std::string remedy =
        near.empty() ? "options of ddprun come after --" : fmt::format("did you mean --{}?", near);
    return Error::invalid(fmt::format("{}: unknown option of {} ({})", word, verb, remedy));
}

/// An administrator's profile: in etc/ of the prefix where ddprun lies in bin/, or in /etc.
std::vector<std::string> site_files() {
    const auto prefix = std::filesystem::path(own_directory()).parent_path();
    return {prefix / "etc/ddprun/site.json", "/etc/ddprun/site.json"};
}

Status take_default_site(BatchCommand& command, const EnvironmentLookup& env) {
    const std::string word = default_site(env("DDPRUN_SITE"), site_files());
    Result<SiteProfile> site = find_site(word);
    if (!site)
        return Error::invalid(fmt::format(
            "the default of --site is wrong: {}; --site=generic goes without it", site.error().what));
    command.request.site = *std::move(site);
    if (word != "generic") command.remarks.push_back(fmt::format("--site={} is the default here", word));
    return {};
}

/// Checks that the line's nodes are those that the job asks for.
Status check_nodes(const CommandLine& line, int nodes) {
    const auto is_given = [&](const char* option) { return line.sources.contains(option); };
    if (is_given("hosts"))
        return Error::invalid(
            "--hosts: which hosts the job gets is known when it runs; leave it out to use all of them");
    if (nodes > 1 && is_given("standalone"))
        return Error::invalid(
            fmt::format("--standalone uses one node, and --nodes {} asks for {}", nodes, nodes));
    const bool meets_others = is_given("node-rank") || is_given("rdzv-endpoint") || is_given("master-addr");
    if (!is_given("nnodes") || meets_others || line.spec.nodes.max == nodes) return {};
    return Error::invalid(
        fmt::format("--nnodes={} contradicts --nodes {}: leave --nnodes out to use all nodes of the job",
                    to_string(line.spec.nodes), nodes));
}

/// Checks the words as ddprun will read them on the node, so that an error shows before the job is queued.
Status take_ddprun_line(std::vector<std::string> words, JobRequest& request) {
    const EnvironmentLookup nothing = [](std::string_view) { return std::nullopt; };
    const Result<CommandLine> line = parse_command_line(words, nothing);
    if (!line) return line.error();
    if (!line->text.empty()) return Error::invalid("no program given");
    request.counts_workers = line->sources.count("nproc-per-node") != 0;
    if (const Status nodes = check_nodes(*line, request.nodes); !nodes) return nodes;
    request.workers = line->spec.workers;
    request.is_elastic = line->spec.nodes.min < line->spec.nodes.max;
    for (const char* option : {"requeue", "requeue-script"}) {
        if (line->sources.count(option) != 0)
            return Error::invalid(fmt::format(
                "--{}: give it before the options of ddprun, so that the script has it too", option));
    }
    request.program = line->spec.program;
    request.ddprun = std::move(words);
    return {};
}

Result<BatchCommand> finish_status(BatchCommand command, const std::vector<std::string>& rest,
                                   Scheduler scheduler, const EnvironmentLookup& env) {
    const std::optional<BatchJob> here = find_batch_job(env);
    if (rest.size() > 1)
        return Error::invalid(fmt::format("'{}': status follows one job only", excerpt(rest[1])));
    if (rest.size() == 1) command.job = rest[0];
    else if (here && here->scheduler == scheduler) command.job = here->id;
    if (command.job.empty() || is_option(command.job))
        return Error::invalid("status: no job given (expected the id that submit prints)");
    return command;
}

Result<BatchCommand> finish_script(BatchCommand command, std::vector<std::string> rest, Scheduler scheduler) {
    JobRequest& request = command.request;
    if (const Status line = take_ddprun_line(std::move(rest), request); !line) return line.error();
    if (const Status settled = settle(request); !settled) return settled.error();
    const std::optional<Scheduler> machines = request.site.scheduler;
    if (machines && *machines != scheduler)
        return Error::invalid(fmt::format("--site={}: that machine has {}; use ddprun {} ...",
                                          request.site.name, name_of(*machines), subcommand_of(*machines)));
    if (std::string remark = remark_on_cpus(scheduler, request); !remark.empty())
        command.remarks.push_back(std::move(remark));
    request.script =
        !command.file.empty() ? command.file : fmt::format("{}.{}", request.name, subcommand_of(scheduler));
    const bool names_itself = scheduler == Scheduler::Pbs && wants_requeue(request);
    if (command.kind == BatchCommand::Kind::Script && names_itself && command.file.empty()) {
        command.remarks.push_back(
            fmt::format("save the script as {}: the job submits a file of that name again", request.script));
    }
    return command;
}

}  // namespace

void declare_batch_options(OptionList& options, SubcommandDraft& draft) {
    JobRequest& request = draft.batch.request;
    using Mode = RequeueSpec::Mode;
    options.value(
        "--site", "NAME|FILE", into(request.site, find_site),
        "What the cluster's scripts have in common: derecho, polaris, or a FILE.json (docs/batch.md). "
        "Default: DDPRUN_SITE, else etc/ddprun/site.json of ddprun's prefix or of the host, else generic.",
        "@file");
    options.value("-N,--nodes", "N", into(request.nodes, count_from(1)), "Nodes. Default 1.");
    options.value("--gpus-per-node", "N", into(request.gpus_per_node, count_from(0)),
                  "GPUs of each node. The number of workers is the same, unless --nproc-per-node is given.");
    options.value("--cpus-per-node,--cpus-per-task", "N", into(request.cpus_per_node, count_from(0)),
                  "Cores of each node. Without it, most clusters give one.");
    options.value("--memory,--mem", "SIZE", into(request.memory, parse_text),
                  "Memory of each node, as the scheduler writes it: 480GB.");
    options.value("-t,--walltime,--time", "SPAN", into(request.walltime, parse_job_walltime),
                  "How long the job may run: HH:MM:SS, D-HH:MM:SS, 90m, 2h or 1d.");
    options.value("--queue", "NAME", into(request.queue, parse_text), "Queue, or partition.");
    options.value("-p,--partition", "NAME", into(request.queue, parse_text), "Slurm's name of --queue.");
    options.value("-A,--account", "NAME", into(request.account, parse_text), "The account that pays.");
    options.value("--filesystems", "NAMES", into(request.filesystems, parse_text),
                  "PBS: -l filesystems=, as in home:eagle.");
    declare_script_options(options, draft.batch);
    options.choice("--requeue", "no|auto|self", request.requeue,
                   {{"no", Mode::No}, {"auto", Mode::Auto}, {"self", Mode::Self}},
                   "Whether the job goes back into the queue when its walltime ends (ddprun's --requeue).");
    options.flag(
        "--no-follow", [&draft] { draft.batch.follow = false; },
        "submit: print only the job's id. status: show the state once.");
}

Result<BatchCommand> parse_batch_command(Scheduler scheduler, const std::vector<std::string>& words,
                                         const EnvironmentLookup& env) {
    using Kind = BatchCommand::Kind;
    if (words.empty() || words[0] == "-h" || words[0] == "--help") return BatchCommand{};
    const Result<Kind> kind = parse_choice<Kind>(
        words[0], {{"script", Kind::Script}, {"submit", Kind::Submit}, {"status", Kind::Show}});
    if (!kind) return kind.error();
    SubcommandOptions own(*find_subcommand(subcommand_of(scheduler)));
    OptionList& options = own.list;
    BatchCommand& command = own.draft.batch;
    command.kind = *kind;
    SplitWords split = options.split({words.begin() + 1, words.end()},
                                     *kind == Kind::Show ? Rest::StandsBetween : Rest::IsTheProgram);
    if (split.wrong) return *split.wrong;
    if (split.unknown) return unknown_batch_option(options, *split.unknown, words[0]);
    bool has_site = *kind == Kind::Show;
    for (const SplitWords::Given& given : split.options) {
        if (const Status applied = options.apply(given); !applied) return applied.error();
        if (own.draft.help) return BatchCommand{};
        has_site = has_site || name_of(*given.option) == "site";
    }
    if (!has_site) {
        if (const Status taken = take_default_site(command, env); !taken) return taken.error();
    }
    if (*kind == Kind::Show) return finish_status(std::move(command), split.rest, scheduler, env);
    return finish_script(std::move(command), std::move(split.rest), scheduler);
}

int run_batch_command(Scheduler scheduler, const std::vector<std::string>& words) {
    const Result<BatchCommand> command = parse_batch_command(scheduler, words, process_environment);
    if (!command) {
        ddprun::print(stderr, "ddprun {}: {}\n", subcommand_of(scheduler), printable(command.error().what));
        return static_cast<int>(ExitCode::Usage);
    }
    for (const std::string& remark : command->remarks)
        ddprun::print(stderr, "ddprun: {}\n", printable(remark));
    switch (command->kind) {
        case BatchCommand::Kind::Script:
            return print_job_script(scheduler, command->request, !command->file.empty());
        case BatchCommand::Kind::Submit: return submit_job(scheduler, command->request, command->follow);
        case BatchCommand::Kind::Show: return show_job(scheduler, command->job, command->follow);
        case BatchCommand::Kind::Help: break;
    }
    ddprun::print("{}", render_subcommand_help(*find_subcommand(subcommand_of(scheduler))));
    return 0;
}

}  // namespace ddprun
