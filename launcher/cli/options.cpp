#include "launcher/cli/options.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <utility>

#include <fmt/core.h>

#include "env/hmac.h"
#include "env/text.h"
#include "launcher/cli/help.h"
#include "launcher/cli/option_table.h"
#include "launcher/cli/option_values.h"
#include "launcher/output/lines.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// Where an option was given.
struct Source {
    std::string label;  ///< the option's name in errors: "--nnodes", "PET_NNODES", "job.json: nnodes"
    std::string place;  ///< "command line", "PET_NNODES", "job.json"
};

/// A command line that is being read.
struct Reading : DdprunOptions {
    std::map<std::string, Source, std::less<>> given;  ///< by long name
    std::optional<std::string> program;
    std::vector<std::string> arguments;

    /// `name` is the whole name, without dashes.
    [[nodiscard]] bool is_given(std::string_view name) const { return given.contains(name); }
};

/// Options of mpiexec, mpirun and srun, and ddprun's for the same; {0} is the user's value.
struct MpiOption {
    std::string_view words;
    const char* ours;
};
constexpr std::array kMpiOptions = {
    MpiOption{"-n -np --nprocs -ppn --ppn -perhost -npernode --npernode --ntasks --ntasks-per-node",
              "--nproc-per-node={0}, the workers of each node"},
    MpiOption{"-N", "--nnodes={0} for srun's -N, --nproc-per-node={0} for mpirun's"},
    MpiOption{"-f -hostfile -machinefile --machinefile", "--hostfile={0}"},
    MpiOption{"-H -host -hosts", "--hosts={0}"},
};

/// Finds such a word among the first ones: "-np 4", "-n4", "--ppn=4". nullopt: there is none.
std::optional<Error> hint_for_mpi_users(const std::vector<std::string>& words, std::size_t first_ones) {
    for (std::size_t at = 0; at < first_ones; ++at) {
        const std::string_view word = words[at];
        const std::size_t end = std::min(word.find_first_of("=0123456789"), word.size());
        const std::string_view name = word.substr(0, end);
        const bool has_next = at + 1 < words.size() && !is_option(words[at + 1]);
        const std::string_view value = end == word.size() ? has_next ? std::string_view(words[at + 1]) : "N"
                                       : word[end] == '=' ? word.substr(end + 1)
                                                          : word.substr(end);
        for (const auto& [theirs, ours] : kMpiOptions) {
            const std::vector<std::string_view> names = split(theirs, ' ');
            if (std::find(names.begin(), names.end(), name) != names.end())
                return Error::invalid(fmt::format("{}: unknown option; ddprun's is {}", name,
                                                  fmt::format(fmt::runtime(ours), excerpt(value))));
        }
    }
    return std::nullopt;
}

Error unknown_option(const OptionList& options, std::string_view word, const std::string& name) {
    const std::string near = options.nearest_to(name);
    if (near.empty())
        return Error::invalid(fmt::format("{}: unknown option (see ddprun --help)", excerpt(word)));
    return Error::invalid(fmt::format("{}: unknown option (did you mean --{}?)", excerpt(word), near));
}

Error no_such_option(const OptionList& options, std::string_view word) {
    const std::string label = label_of(word);
    const std::vector<CLI::Option*> candidates = options.beginning_with(label);
    if (candidates.empty())
        return unknown_option(options, label, label.starts_with("--") ? label.substr(2) : "");
    std::vector<std::string> names;
    for (const CLI::Option* option : candidates) names.push_back(option->get_name());
    const std::string last = std::exchange(names.back(), "");
    names.pop_back();
    return Error::invalid(fmt::format("{}: ambiguous, it could be {} or {}", label, join(names, ", "), last));
}

/// The parts of a build (meson_options.txt), with what users lack without each.
constexpr std::pair<std::string_view, std::string_view> kConsequences[] = {
    {"pmix", "ranks are not read from a PMIx server, and workers get none (--pmix)"},
    {"tls", "--tls is refused"},
    {"libfabric", "libddp's cpu backend works within one node only"},
    {"cuda", "train, allreduce-check and libddp compute on the CPU; GPUs are still assigned and watched"},
    {"mpi", "libddp has no backend \"mpi\""},
    {"blas", "train multiplies matrices by plain loops"}};

std::string version_text() {
    constexpr std::string_view kLacks = DDPRUN_LACKS;
    const std::vector<std::string_view> lacks = split(kLacks, ',');
    std::string text = "ddprun " DDPRUN_VERSION "\n";
    for (const auto& [part, consequence] : kConsequences) {
        if (std::find(lacks.begin(), lacks.end(), part) != lacks.end())
            text += fmt::format("built without {}: {}\n", part, consequence);
    }
    return text;
}

bool ends_reading(const CLI::Option& option) {
    return name_of(option) == "help" || name_of(option) == "version";
}

/// Reads the value of --help: none, or "all", which may also be the next word.
Status take_help(Reading& reading, const SplitWords::Given& help, const std::vector<std::string>& rest) {
    if (help.value != "1" && help.value != "all")
        return Error::invalid(fmt::format("{}: '{}' is not all", help.label, excerpt(help.value)));
    const bool is_all = help.value == "all" || (!rest.empty() && rest.front() == "all");
    reading.draft.text = is_all ? render_full_help() : render_help();
    return {};
}

Status read_options(Reading& reading, SplitWords& split) {
    for (SplitWords::Given& one : split.options) {
        const std::string& name = name_of(*one.option);
        if (name == "help") return take_help(reading, one, split.rest);
        if (name == "version") {
            reading.draft.text = version_text();
            return {};
        }
        one.option->add_result(std::move(one.value));
        reading.given[name] = {one.label, "command line"};
    }
    if (split.wrong) return *split.wrong;
    return split.unknown ? no_such_option(reading.list, *split.unknown) : Status();
}

Status read_words(Reading& reading, const std::vector<std::string>& args) {
    SplitWords split = reading.list.split(args, Rest::IsTheProgram);
    if (const Status read = read_options(reading, split); !read) {
        const std::size_t options = args.size() - split.rest.size() + (split.unknown ? 1 : 0);
        return hint_for_mpi_users(args, options).value_or(read.error());
    }
    if (!reading.draft.text.empty() || split.rest.empty()) return {};
    for (const std::string_view dash : {"\u2010", "\u2011", "\u2013", "\u2014", "\u2212"}) {
        if (split.rest.front().starts_with(dash))
            return Error::invalid(fmt::format("'{}' begins with '{}', a typographic dash, and not with '-'",
                                              excerpt(split.rest.front()), dash));
    }
    reading.program = std::move(split.rest.front());
    reading.arguments.assign(std::make_move_iterator(split.rest.begin() + 1),
                             std::make_move_iterator(split.rest.end()));
    return {};
}

/// Adds values from a weaker source than those read before.
void give(Reading& reading, CLI::Option* option, const std::vector<std::string>& values, Source source) {
    if (!values.empty() && reading.given.emplace(name_of(*option), std::move(source)).second)
        option->add_result(values);
}

void add_variables(Reading& reading, const EnvironmentLookup& env) {
    for (CLI::Option* option : reading.list.options()) {
        const std::string variable = option->get_envname();
        const std::optional<std::string> value = ends_reading(*option) ? std::nullopt : env(variable);
        // Job scripts unset a variable by setting it to "".
        if (value && !value->empty()) give(reading, option, {*value}, {variable, variable});
    }
}

Error unknown_key(const OptionList& options, const std::string& path, const std::string& key) {
    std::string near = options.nearest_to(key);
    if (near.empty()) near = nearest(key, {"program", "args"});
    return Error::invalid(near.empty()
                              ? fmt::format("{}: '{}' is not an option of ddprun", path, excerpt(key))
                              : fmt::format("{}: '{}' is not an option of ddprun (did you mean {}?)", path,
                                            excerpt(key), near));
}

Status add_config(Reading& reading, const std::string& path) {
    Result<ConfigFile> config = read_config_file(path);
    if (!config) return config.error();
    std::set<const CLI::Option*> seen;
    for (const auto& [key, values] : config->options) {
        CLI::Option* const option = reading.list.find_exactly("--" + key);
        if (option == nullptr || ends_reading(*option)) return unknown_key(reading.list, path, key);
        if (name_of(*option) == "config")
            return Error::invalid(fmt::format("{}: config: a file cannot name another", path));
        if (!seen.insert(option).second)
            return Error::invalid(fmt::format("{}: {} is given twice", path, name_of(*option)));
        const bool is_one_list = !is_repeatable(*option) && values.size() != 1;
        give(reading, option, is_one_list ? std::vector{join(values, ",")} : values,
             {fmt::format("{}: {}", path, key), path});
    }
    if (!reading.program && config->program) {
        reading.program = config->program;
        reading.arguments = config->arguments;
    }
    return {};
}

/// Applies the values in the order in which the options are declared.
Status apply_values(Reading& reading) {
    for (CLI::Option* option : reading.list.options()) {
        const auto given = reading.given.find(name_of(*option));
        if (given == reading.given.end()) continue;
        const auto& [name, source] = *given;
        if (const Status applied = reading.list.apply(*option); !applied)
            return applied.error().with(source.label);
        reading.draft.sources.emplace(name, source.place);
        reading.draft.values.emplace(
            name, is_repeatable(*option) ? join(option->results(), ",") : option->results().back());
    }
    return {};
}

/// Applies defaults from variables without PET_.
Status apply_environment_defaults(const EnvironmentLookup& env, JobSpec& spec) {
    if (const auto timeout = env("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"); timeout && !timeout->empty()) {
        const Result<Duration> span = parse_span(*timeout);
        if (!span) return span.error().with("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
        spec.shutdown_timeout = *span;
    }
    if (const auto prefix = env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"); prefix && !prefix->empty())
        spec.output.prefix = *prefix;
    // no-color.org: present and not empty.
    if (const auto no_color = env("NO_COLOR"); no_color && !no_color->empty())
        spec.output.color = OutputSpec::Color::Never;
    return {};
}

/// Writes an option as the user gave it: "--nnodes 2", "--standalone", "PET_NNODES=2".
std::string as_given(const Reading& reading, std::string_view name) {
    const auto found = reading.given.find(name);
    if (found == reading.given.end()) return fmt::format("--{}", name);
    const auto& [label, place] = found->second;
    const CLI::Option* const option = reading.list.find_exactly(fmt::format("--{}", name));
    if (is_flag(*option)) return label;
    return fmt::format("{}{}{}", label, label == place ? "=" : " ", excerpt(option->results().back()));
}

Status check_contradictions(const Reading& reading) {
    const OptionDraft& draft = reading.draft;
    const JobSpec& spec = draft.spec;
    const int nodes = spec.nodes.max, node_rank = spec.rendezvous.node_rank.value_or(0);
    const bool has_port_0 = spec.rendezvous.endpoint && spec.rendezvous.endpoint->port == 0;
    const bool is_one_worker = spec.workers == WorkerCount{};
    const struct {
        bool is_there;
        std::string_view one, other;
        std::string why;
    } contradictions[] = {
        {draft.module && draft.no_python && !draft.run_path, "module", "no-python",
         "a module is run by Python"},
        {draft.standalone && nodes > 1, "standalone", "nnodes", "standalone is one node"},
        {draft.standalone && node_rank > 0, "standalone", "node-rank", "the only node has rank 0"},
        {reading.is_given("nnodes") && node_rank >= nodes, "node-rank", "nnodes",
         fmt::format("nodes have ranks 0 to {}", nodes - 1)},
        {!draft.standalone && has_port_0 && nodes > 1, "rdzv-endpoint", "nnodes",
         "other nodes cannot find port 0; give a port"},
        {spec.per_rank && reading.is_given("nproc-per-node") && !is_one_worker, "per-rank", "nproc-per-node",
         "a rank is one worker"},
        {spec.per_rank && draft.standalone, "per-rank", "standalone",
         "a standalone job ignores the launcher"},
        {spec.per_rank && spec.virtual_local_rank, "per-rank", "virtual-local-rank",
         "the workers of a node meet by their local ranks"},
        {spec.pass_mpi_env && spec.pmix == PmixUse::On, "pass-mpi-env", "pmix",
         "the MPI of the workers can use one launcher only"},
        {spec.recover.rehearse > 0 && spec.recover.mode != RecoverSpec::Mode::Auto, "rehearse", "recover",
         "a rehearsal is a recovery in place"},
        {spec.attach && spec.stdin_rank && spec.attach->first != *spec.stdin_rank, "attach", "stdin",
         "the attached rank reads the terminal"},
    };
    for (const auto& [is_there, one, other, why] : contradictions) {
        if (is_there)
            return Error::invalid(fmt::format("{} and {} contradict each other: {}", as_given(reading, one),
                                              as_given(reading, other), why));
    }
    return {};
}

ProgramSpec::Kind program_kind(const OptionDraft& draft) {
    if (draft.run_path) return ProgramSpec::Kind::RunPath;
    if (draft.module) return ProgramSpec::Kind::Module;
    return draft.no_python ? ProgramSpec::Kind::Executable : ProgramSpec::Kind::Detect;
}

Status settle_rendezvous(Reading& reading) {
    OptionDraft& draft = reading.draft;
    RendezvousSpec& rdzv = draft.spec.rendezvous;
    if (draft.standalone) {
        for (const char* name : {"rdzv-endpoint", "rdzv-id"}) {
            if (!reading.is_given(name)) continue;
            draft.remarks.push_back(fmt::format("--{}: ignored, --standalone chooses it", name));
        }
        rdzv.backend = "c10d";
        rdzv.endpoint.reset();
    }
    // Several nodes have to agree on an id. One node makes its own, so that files named after it are not
    // another job's.
    if (draft.standalone || (draft.spec.nodes.max == 1 && !reading.is_given("rdzv-id"))) {
        Result<std::string> id = random_hex(8);
        if (!id) return id.error();
        rdzv.run_id = *std::move(id);
    }
    if (draft.standalone) return {};
    if (rdzv.endpoint && rdzv.endpoint->port == 0) rdzv.endpoint.reset();  // this node, any free port
    // torchrun's static rendezvous listens at the master address when no endpoint is given.
    if (!rdzv.endpoint && rdzv.backend == "static" && draft.spec.nodes.max > 1 && rdzv.master_addr) {
        const int port = rdzv.master_port.value_or(29500);
        rdzv.endpoint = Endpoint{*rdzv.master_addr, static_cast<std::uint16_t>(port)};
    }
    return {};
}

/// Takes the node rank of a pod of a Kubernetes Indexed Job from JOB_COMPLETION_INDEX, unless the command
/// line names ranks or hosts. A job of one node has none: each pod is a job of its own.
Status settle_pod_index(Reading& reading, const EnvironmentLookup& env) {
    RendezvousSpec& rdzv = reading.draft.spec.rendezvous;
    const std::optional<std::string> index = env("JOB_COMPLETION_INDEX");
    if (!index || index->empty() || reading.draft.spec.nodes.max == 1) return {};
    for (const char* said : {"node-rank", "hosts", "hostfile", "start"}) {
        if (reading.is_given(said)) return {};
    }
    const Result<int> rank = parse_rank(*index);
    if (!rank) return rank.error().with("JOB_COMPLETION_INDEX");
    rdzv.node_rank = *rank;
    reading.draft.sources.emplace("node-rank", "JOB_COMPLETION_INDEX");
    reading.draft.values.emplace("node-rank", *index);
    return {};
}

/// A log directory without an option about streams keeps and shows all output. With --tee, lines have
/// torchrun's prefix unless --prefix is given.
void settle_output(const Reading& reading, OutputSpec& output) {
    if (!output.prefix && output.tee != StreamsMap{}) output.prefix = kTorchrunPrefix;
    const bool told = reading.is_given("redirects") || reading.is_given("tee");
    if (!output.log_dir.empty() && !told) output.tee.everyone = Streams::All;
}

/// Warns when the output of the rank that reads the terminal is not shown; "" when it is. Assumes that all
/// nodes have equally many workers.
std::string remark_on_hidden_stdin(const JobSpec& spec) {
    const std::vector<int>& shown = spec.output.local_ranks;
    if (!spec.stdin_rank || shown.empty()) return "";
    const int workers = spec.workers.kind == WorkerCount::Kind::Number ? spec.workers.number : 0;
    const int local_rank = workers > 0 ? *spec.stdin_rank % workers : *spec.stdin_rank;
    if (std::ranges::find(shown, local_rank) != shown.end()) return "";
    return fmt::format(
        "--stdin {}: that rank's questions are not seen, because --local-ranks-filter does not show local "
        "rank {}",
        *spec.stdin_rank, local_rank);
}

/// Checks the options against each other, and derives what follows from several of them.
Status settle(Reading& reading, const EnvironmentLookup& env) {
    OptionDraft& draft = reading.draft;
    if (const Status consistent = check_contradictions(reading); !consistent) return consistent;
    if (draft.spec.recover.within == Duration::zero())
        return Error::invalid("--recover-within: 0 leaves no time (--recover=restart turns recovery off)");
    if (!reading.program)
        return Error::invalid("no program given (usage: ddprun [options] program [arguments])");
    if (const Status settled = settle_rendezvous(reading); !settled) return settled;
    if (const Status settled = settle_pod_index(reading, env); !settled) return settled;
    settle_output(reading, draft.spec.output);
    if (draft.spec.pass_mpi_env) draft.spec.pmix = PmixUse::Off;
    draft.spec.failure_grace = std::min(draft.spec.failure_grace, draft.spec.shutdown_timeout);
    if (std::string remark = remark_on_hidden_stdin(draft.spec); !remark.empty())
        draft.remarks.push_back(std::move(remark));
    draft.spec.program = {program_kind(draft), *std::move(reading.program), std::move(reading.arguments)};
    return {};
}

}  // namespace

std::vector<std::string> remarks_on_variables(const std::vector<std::string>& environment) {
    const DdprunOptions ours;
    std::vector<std::string> remarks;
    for (const std::string& entry : environment) {
        const std::string name = entry.substr(0, entry.find('='));
        if (!name.starts_with("PET_")) continue;
        const auto is_it = [&](const CLI::Option* option) { return option->get_envname() == name; };
        if (std::ranges::any_of(ours.list.options(), is_it)) continue;
        std::string word = name.substr(4);
        std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
        const CLI::Option* const near = ours.list.find_exactly("--" + ours.list.nearest_to(word));
        remarks.push_back(
            fmt::format("{} is ignored: no option of ddprun has this variable{}", printable(name),
                        near == nullptr ? "" : fmt::format(" (did you mean {}?)", near->get_envname())));
    }
    return remarks;
}

Result<CommandLine> parse_command_line(const std::vector<std::string>& args, const EnvironmentLookup& env) {
    Reading reading;
    OptionDraft& draft = reading.draft;
    if (const Status read = read_words(reading, args); !read) return read.error();
    if (!draft.text.empty()) return CommandLine(std::move(draft));
    add_variables(reading, env);
    if (reading.is_given("config")) {
        const std::string path = reading.list.find_exactly("--config")->results().back();
        if (const Status added = add_config(reading, path); !added) return added.error().with("--config");
    }
    if (const Status applied = apply_environment_defaults(env, draft.spec); !applied) return applied.error();
    if (const Status applied = apply_values(reading); !applied) return applied.error();
    if (!draft.text.empty()) return CommandLine(std::move(draft));
    if (const Status settled = settle(reading, env); !settled) return settled.error();
    return CommandLine(std::move(draft));
}

}  // namespace ddprun
