#include "launcher/cli/options.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/core.h>

#include "env/hmac.h"
#include "env/nodes/pmix_source.h"
#include "env/text.h"
#include "launcher/cli/command_words.h"
#include "launcher/cli/config_file.h"
#include "launcher/cli/man_page.h"
#include "launcher/cli/option_table.h"
#include "launcher/cli/option_values.h"
#include "launcher/node/output/lines.h"
#include "launcher/signals.h"

namespace ddprun {
namespace {

/// The values of one option and where they were given.
struct Given {
    std::vector<std::string> values;
    std::string label;   ///< how errors call the option: "--nnodes", "PET_NNODES", "job.json: nnodes"
    std::string source;  ///< "command line", "PET_NNODES", "job.json"
};
using GivenOptions = std::map<const OptionRow*, Given>;

struct Words {
    GivenOptions given;
    std::optional<std::string> program;
    std::vector<std::string> arguments;
    CommandLine::Action action = CommandLine::Run;
};

/// What users of mpiexec and srun type: "-n 4", "-np 4", "--ppn=4". nullopt: the option is none of these.
std::optional<std::string_view> hint_for_mpi_users(std::string_view label) {
    for (const std::string_view count :
         {"-n", "--nprocs", "--ppn", "--npernode", "--ntasks", "--ntasks-per-node"}) {
        if (label == count) return "workers per node are --nproc-per-node";
    }
    if (label == "-N") return "nodes are --nnodes, workers per node --nproc-per-node";
    return std::nullopt;
}

Error unknown_option(std::string_view word, std::string_view name) {
    if (const auto hint = hint_for_mpi_users(word))
        return invalid(fmt::format("{}: unknown option ({})", word, *hint));
    const std::string near = nearest_option(name);
    if (near.empty()) return invalid(fmt::format("{}: unknown option (see ddprun --help)", excerpt(word)));
    return invalid(fmt::format("{}: unknown option (did you mean --{}?)", excerpt(word), near));
}

/// By "--name", "--na_me" or "-n", and as argparse reads it for torchrun's users: by any beginning that one
/// option alone has. nullptr: there is none, or there are several.
const OptionRow* find_by_label(std::string_view label) {
    if (!label.starts_with("--")) return find_option(label[1]);
    const std::string_view name = label.substr(2);
    if (const OptionRow* row = find_option(name)) return row;
    const std::vector<const OptionRow*> candidates = options_beginning_with(name);
    return candidates.size() == 1 ? candidates.front() : nullptr;
}

Error no_such_option(std::string_view word) {
    const std::string label = label_of(word);
    if (!label.starts_with("--")) return unknown_option(label, "");
    const std::string_view name = std::string_view(label).substr(2);
    const std::vector<const OptionRow*> candidates = options_beginning_with(name);
    if (candidates.empty()) return unknown_option(label, name);
    std::vector<std::string> names;
    for (const OptionRow* row : candidates) names.push_back(fmt::format("--{}", row->name));
    const std::string last = std::exchange(names.back(), "");
    names.pop_back();
    return invalid(fmt::format("{}: ambiguous, it could be {} or {}", label, join(names, ", "), last));
}

void add_value(GivenOptions& given, const OptionRow* row, std::string value, std::string label,
               std::string source) {
    Given& entry = given[row];
    if (!row->repeatable) entry.values.clear();
    entry.values.push_back(std::move(value));
    entry.label = std::move(label);
    entry.source = std::move(source);
}

Result<Words> read_words(const std::vector<std::string>& args) {
    const auto kind_of = [](std::string_view label) -> std::optional<OptionKind> {
        const OptionRow* const row = find_by_label(label);
        if (row == nullptr) return std::nullopt;
        return OptionKind{!row->value.empty(), row->value};
    };
    CommandWords split = split_words(args, kind_of, Rest::IsTheProgram);
    Words words;
    for (CommandWords::Option& option : split.options) {
        const OptionRow* const row = find_by_label(option.label);
        if (row->name == "help") words.action = CommandLine::Help;
        if (row->name == "version") words.action = CommandLine::Version;
        if (words.action != CommandLine::Run) return words;
        add_value(words.given, row, std::move(option.value), option.label, "command line");
    }
    if (split.wrong) return *split.wrong;
    if (split.unknown) return no_such_option(*split.unknown);
    if (split.rest.empty()) return words;
    words.program = std::move(split.rest.front());
    words.arguments.assign(std::make_move_iterator(split.rest.begin() + 1),
                           std::make_move_iterator(split.rest.end()));
    return words;
}

void add_variables(GivenOptions& given, const EnvironmentLookup& env) {
    for (const OptionGroup& group : option_groups()) {
        for (const OptionRow& row : group.rows) {
            if (given.contains(&row) || row.name == "help" || row.name == "version") continue;
            for (const std::string_view name : {row.name, row.alias}) {
                if (name.empty()) continue;
                const std::string variable = environment_name(name);
                const std::optional<std::string> value = env(variable);
                // Set to nothing is how job scripts say "unset".
                if (value && !value->empty()) add_value(given, &row, *value, variable, variable);
            }
        }
    }
}

Error unknown_key(const std::string& path, const std::string& key) {
    std::string near = nearest_option(key);
    if (near.empty()) near = nearest(key, {"program", "args"});
    return invalid(near.empty() ? fmt::format("{}: '{}' is not an option of ddprun", path, excerpt(key))
                                : fmt::format("{}: '{}' is not an option of ddprun (did you mean {}?)", path,
                                              excerpt(key), near));
}

Status add_config(Words& words, const std::string& path) {
    Result<ConfigFile> config = read_config_file(path);
    if (!config) return config.error();
    GivenOptions from_file;
    for (const auto& [key, values] : config->options) {
        const OptionRow* row = find_option(key);
        if (row == nullptr || row->name == "help" || row->name == "version") return unknown_key(path, key);
        if (row->name == "config")
            return invalid(fmt::format("{}: config: a file cannot name another", path));
        if (from_file.contains(row)) return invalid(fmt::format("{}: {} is given twice", path, row->name));
        const bool one_list = !row->repeatable && values.size() != 1;
        const std::vector<std::string> entries = one_list ? std::vector{join(values, ",")} : values;
        for (const std::string& value : entries) {
            add_value(from_file, row, value, fmt::format("{}: {}", path, key), path);
        }
    }
    words.given.merge(from_file);  // what is there already wins
    if (!words.program && config->program) {
        words.program = config->program;
        words.arguments = config->arguments;
    }
    return {};
}

Status apply(const OptionRow& row, const Given& given, OptionDraft& draft) {
    for (const std::string& value : given.values) {
        if (row.value.empty()) {
            const Result<bool> on = parse_bool(value);
            if (!on)
                return invalid(fmt::format("{}: '{}' is not true or false", given.label, excerpt(value)));
            if (!*on) continue;
        }
        if (const Status applied = row.apply(draft, value); !applied)
            return applied.error().with(given.label);
    }
    return {};
}

/// Defaults that come from variables without PET_.
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

/// Finds what contradicts; knows how each option was given.
class Contradictions {
  public:
    Contradictions(const GivenOptions& given, const OptionDraft& draft) : given_(given), draft_(draft) {}

    [[nodiscard]] Status check() const {
        if (draft_.module && draft_.no_python && !draft_.run_path) {
            return both("module", "no-python", "a module is run by Python");
        }
        if (const Status nodes = check_nodes(); !nodes) return nodes;
        if (const Status ranks = check_ranks(); !ranks) return ranks;
        const JobSpec& spec = draft_.spec;
        if (spec.pass_mpi_env && spec.pmix == PmixUse::On) {
            return both("pass-mpi-env", "pmix", "workers have one launcher that their MPI speaks with");
        }
        if (spec.attach && spec.stdin_rank && spec.attach->first != *spec.stdin_rank) {
            return both("attach", "stdin", "the attached rank reads the terminal");
        }
        return {};
    }

  private:
    [[nodiscard]] Status check_nodes() const {
        const Nodes& nodes = draft_.spec.nodes;
        const RendezvousSpec& rdzv = draft_.spec.rendezvous;
        if (draft_.standalone && nodes.max > 1) return both("standalone", "nnodes", "standalone is one node");
        if (draft_.standalone && rdzv.node_rank.value_or(0) > 0) {
            return both("standalone", "node-rank", "the only node has rank 0");
        }
        if (is_given("nnodes") && rdzv.node_rank.value_or(0) >= nodes.max) {
            return both("node-rank", "nnodes", fmt::format("nodes have ranks 0 to {}", nodes.max - 1));
        }
        if (!draft_.standalone && rdzv.endpoint && rdzv.endpoint->port == 0 && nodes.max > 1) {
            return both("rdzv-endpoint", "nnodes", "other nodes cannot find port 0; give a port");
        }
        return {};
    }

    [[nodiscard]] Status check_ranks() const {
        if (!draft_.spec.per_rank) return {};
        const WorkerCount& workers = draft_.spec.workers;
        const bool is_one = workers.kind == WorkerCount::Kind::Number && workers.number == 1;
        if (is_given("nproc-per-node") && !is_one)
            return both("per-rank", "nproc-per-node", "a rank is one worker");
        if (draft_.standalone) return both("per-rank", "standalone", "standalone is without the launcher");
        if (draft_.spec.virtual_local_rank)
            return both("per-rank", "virtual-local-rank", "the workers of a node meet by their local ranks");
        return {};
    }

    [[nodiscard]] bool is_given(std::string_view name) const { return given_.contains(find_option(name)); }

    /// "--nnodes 2", "--standalone", "PET_NNODES=2".
    [[nodiscard]] std::string told(std::string_view name) const {
        const auto found = given_.find(find_option(name));
        if (found == given_.end()) return fmt::format("--{}", name);
        const Given& given = found->second;
        if (found->first->value.empty()) return given.label;
        return fmt::format("{}{}{}", given.label, given.label == given.source ? "=" : " ",
                           excerpt(given.values.back()));
    }

    [[nodiscard]] Error both(std::string_view one, std::string_view other, std::string_view why) const {
        return invalid(fmt::format("{} and {} contradict each other: {}", told(one), told(other), why));
    }

    const GivenOptions& given_;
    const OptionDraft& draft_;
};

ProgramSpec::Kind program_kind(const OptionDraft& draft) {
    if (draft.run_path) return ProgramSpec::Kind::RunPath;
    if (draft.module) return ProgramSpec::Kind::Module;
    return draft.no_python ? ProgramSpec::Kind::Executable : ProgramSpec::Kind::Detect;
}

Status settle_rendezvous(const GivenOptions& given, OptionDraft& draft) {
    RendezvousSpec& rdzv = draft.spec.rendezvous;
    if (draft.standalone) {
        for (const char* name : {"rdzv-endpoint", "rdzv-id"}) {
            if (!given.contains(find_option(name))) continue;
            draft.remarks.push_back(fmt::format("--{}: ignored, --standalone chooses it", name));
        }
        rdzv.backend = "c10d";
        rdzv.endpoint.reset();
    }
    // Several nodes have to agree on an id; one has its own, so that what is named after it is not another
    // job's.
    if (draft.standalone || (draft.spec.nodes.max == 1 && !given.contains(find_option("rdzv-id")))) {
        Result<std::string> id = random_hex(8);
        if (!id) return id.error();
        rdzv.run_id = *std::move(id);
    }
    if (draft.standalone) return {};
    if (rdzv.endpoint && rdzv.endpoint->port == 0) rdzv.endpoint.reset();  // this node, any free port
    // torchrun's static rendezvous listens at the master address when it is told no endpoint.
    if (!rdzv.endpoint && rdzv.backend == "static" && draft.spec.nodes.max > 1 && rdzv.master_addr) {
        const int port = rdzv.master_port.value_or(29500);
        rdzv.endpoint = Endpoint{*rdzv.master_addr, static_cast<std::uint16_t>(port)};
    }
    return {};
}

/// With a log directory and no word about streams, everything is kept and everything is shown. Whoever says
/// --tee reads what torchrun's --tee writes.
void settle_output(const GivenOptions& given, OutputSpec& output) {
    if (!output.prefix && output.tee != StreamsMap{}) output.prefix = kTorchrunPrefix;
    const bool told = given.contains(find_option("redirects")) || given.contains(find_option("tee"));
    if (!output.log_dir.empty() && !told) output.tee.everyone = Streams::All;
}

Result<CommandLine> build(const Words& words, const EnvironmentLookup& env) {
    OptionDraft draft;
    draft.spec.signals = default_signals();
    if (const Status defaults = apply_environment_defaults(env, draft.spec); !defaults)
        return defaults.error();
    CommandLine line;
    for (const OptionGroup& group : option_groups()) {
        for (const OptionRow& row : group.rows) {
            const auto found = words.given.find(&row);
            if (found == words.given.end()) continue;
            if (const Status applied = apply(row, found->second, draft); !applied) return applied.error();
            line.sources.emplace(row.name, found->second.source);
            line.values.emplace(row.name, join(found->second.values, ","));
        }
    }
    if (draft.print_man) {
        line.action = CommandLine::PrintMan;
        line.text = render_man_page();
        return line;
    }
    if (!draft.shell.empty()) {
        Result<std::string> script = render_completion(draft.shell);
        if (!script) return script.error();
        line.action = CommandLine::PrintCompletion;
        line.text = *std::move(script);
        return line;
    }
    if (const Status consistent = Contradictions(words.given, draft).check(); !consistent)
        return consistent.error();
    if (!words.program) return invalid("no program given (usage: ddprun [options] program [arguments])");
    if (const Status settled = settle_rendezvous(words.given, draft); !settled) return settled.error();
    settle_output(words.given, draft.spec.output);
    if (draft.spec.pass_mpi_env) draft.spec.pmix = PmixUse::Off;
    draft.spec.failure_grace = std::min(draft.spec.failure_grace, draft.spec.shutdown_timeout);
    draft.spec.program = {program_kind(draft), *words.program, words.arguments};
    line.spec = std::move(draft.spec);
    line.remarks = std::move(draft.remarks);
    return line;
}

std::string version_text() {
    return "ddprun " DDPRUN_VERSION "\n" + (built_with_pmix() ? std::string() : std::string(kNoPmix) + "\n");
}

}  // namespace

Result<CommandLine> parse_command_line(const std::vector<std::string>& args, const EnvironmentLookup& env) {
    Result<Words> words = read_words(args);
    if (!words) return words.error();
    if (words->action != CommandLine::Run) {
        CommandLine line;
        line.action = words->action;
        line.text = line.action == CommandLine::Help ? render_help() : version_text();
        return line;
    }
    add_variables(words->given, env);
    const auto config = words->given.find(find_option("config"));
    if (config != words->given.end()) {
        const std::string path = config->second.values.back();
        if (const Status added = add_config(*words, path); !added) return added.error().with("--config");
    }
    return build(*words, env);
}

}  // namespace ddprun
