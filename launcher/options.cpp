// The command line is read by hand: the table in option_table.cpp drives parsing, PET_ variables, configuration
// files, suggestions, --help and four kinds of completion scripts, and torchrun's rules (both spellings, the
// program ends the options, precedence of four sources) would have to be built around a parser library anyway.
#include "launcher/options.h"

#include <algorithm>

#include <fmt/core.h>

#include "env/hmac.h"
#include "env/text.h"
#include "launcher/config_file.h"
#include "launcher/man_page.h"
#include "launcher/option_table.h"
#include "launcher/option_values.h"

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

Error unknown_option(std::string_view word, std::string_view name) {
    const std::string near = nearest_option(name);
    if (near.empty()) return invalid(fmt::format("{}: unknown option (see ddprun --help)", word));
    return invalid(fmt::format("{}: unknown option (did you mean --{}?)", word, near));
}

/// One option word taken apart: "--tee=3", "-t", "-t3", "-t=3".
struct OptionWord {
    const OptionRow* row = nullptr;
    std::string label;
    std::optional<std::string> value;
};

Result<OptionWord> take_apart(const std::string& word) {
    OptionWord option;
    if (word.starts_with("--")) {
        const std::size_t equals = word.find('=');
        option.label = word.substr(0, equals);
        option.row = find_option(std::string_view(option.label).substr(2));
        if (equals != std::string::npos) option.value = word.substr(equals + 1);
    } else {
        option.label = word.substr(0, 2);
        option.row = find_option(word[1]);
        if (word.size() > 2) option.value = word.substr(word[2] == '=' ? 3 : 2);
    }
    if (option.row == nullptr) return unknown_option(option.label, std::string_view(option.label).substr(2));
    if (option.row->value.empty() && option.value) {
        return invalid(fmt::format("{}: takes no value (got '{}')", option.label, *option.value));
    }
    return option;
}

bool is_option(std::string_view word) { return word.size() > 1 && word[0] == '-'; }

/// The value of an option that was written as two words.
Result<std::string> next_word(const std::vector<std::string>& args, std::size_t at, const OptionWord& option) {
    const std::string need = fmt::format("{}: needs a value ({})", option.label, option.row->value);
    if (at >= args.size()) return invalid(need);
    const std::string& word = args[at];
    // "--rdzv-id --standalone" forgot the value; "--prefix --" or a negative number is a value.
    if (is_option(word) && word != "--") {
        if (const Result<OptionWord> other = take_apart(word); other) {
            return invalid(fmt::format("{}, but {} follows; write {}=VALUE if it is the value", need, word, option.label));
        }
    }
    return word;
}

void add_value(GivenOptions& given, const OptionRow* row, std::string value, std::string label, std::string source) {
    Given& entry = given[row];
    if (!row->repeatable) entry.values.clear();
    entry.values.push_back(std::move(value));
    entry.label = std::move(label);
    entry.source = std::move(source);
}

Result<Words> read_words(const std::vector<std::string>& args) {
    Words words;
    std::size_t at = 0;
    for (; at < args.size() && is_option(args[at]); ++at) {
        if (args[at] == "--") {
            ++at;
            break;
        }
        Result<OptionWord> option = take_apart(args[at]);
        if (!option) return option.error();
        if (option->row->name == "help" || option->row->name == "version") {
            words.action = option->row->name == "help" ? CommandLine::Help : CommandLine::Version;
            return words;
        }
        if (option->row->value.empty()) option->value = "1";
        if (!option->value) {
            Result<std::string> value = next_word(args, ++at, *option);
            if (!value) return value.error();
            option->value = *std::move(value);
        }
        add_value(words.given, option->row, *std::move(option->value), option->label, "command line");
    }
    if (at < args.size()) {
        words.program = args[at];
        words.arguments.assign(args.begin() + static_cast<std::ptrdiff_t>(at) + 1, args.end());
    }
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
    return invalid(near.empty() ? fmt::format("{}: '{}' is not an option of ddprun", path, key)
                                : fmt::format("{}: '{}' is not an option of ddprun (did you mean {}?)", path, key, near));
}

Status add_config(Words& words, const std::string& path) {
    Result<ConfigFile> config = read_config_file(path);
    if (!config) return config.error();
    GivenOptions from_file;
    for (const auto& [key, values] : config->options) {
        const OptionRow* row = find_option(key);
        if (row == nullptr || row->name == "help" || row->name == "version") return unknown_key(path, key);
        if (row->name == "config") return invalid(fmt::format("{}: config: a file cannot name another", path));
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
            if (!on) return invalid(fmt::format("{}: '{}' is not true or false", given.label, value));
            if (!*on) continue;
        }
        if (const Status applied = row.apply(draft, value); !applied) return applied.error().with(given.label);
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
    if (const auto prefix = env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")) spec.output.prefix = *prefix;
    // no-color.org: present and not empty.
    if (const auto no_color = env("NO_COLOR"); no_color && !no_color->empty()) spec.output.color = OutputSpec::Color::Never;
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
        const JobSpec& spec = draft_.spec;
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

    [[nodiscard]] bool is_given(std::string_view name) const { return given_.contains(find_option(name)); }

    /// "--nnodes 2", "--standalone", "PET_NNODES=2".
    [[nodiscard]] std::string told(std::string_view name) const {
        const auto found = given_.find(find_option(name));
        if (found == given_.end()) return fmt::format("--{}", name);
        const Given& given = found->second;
        if (found->first->value.empty()) return given.label;
        return fmt::format("{}{}{}", given.label, given.label == given.source ? "=" : " ", given.values.back());
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
        Result<std::string> id = random_hex(8);
        if (!id) return id.error();
        rdzv.backend = "c10d";
        rdzv.endpoint.reset();
        rdzv.run_id = *std::move(id);
        return {};
    }
    if (rdzv.endpoint && rdzv.endpoint->port == 0) rdzv.endpoint.reset();  // this node, any free port
    // torchrun's static rendezvous listens at the master address when it is told no endpoint.
    if (!rdzv.endpoint && rdzv.backend == "static" && draft.spec.nodes.max > 1 && rdzv.master_addr) {
        const int port = rdzv.master_port.value_or(29500);
        rdzv.endpoint = Endpoint{*rdzv.master_addr, static_cast<std::uint16_t>(port)};
    }
    return {};
}

/// With a log directory and no word about streams, everything is kept and everything is shown.
void settle_output(const GivenOptions& given, OutputSpec& output) {
    const bool told = given.contains(find_option("redirects")) || given.contains(find_option("tee"));
    if (!output.log_dir.empty() && !told) output.tee.everyone = Streams::All;
}

Result<CommandLine> build(const Words& words, const EnvironmentLookup& env) {
    OptionDraft draft;
    draft.spec.signals = default_signals();
    if (const Status defaults = apply_environment_defaults(env, draft.spec); !defaults) return defaults.error();
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
    if (const Status consistent = Contradictions(words.given, draft).check(); !consistent) return consistent.error();
    if (!words.program) return invalid("no program given (usage: ddprun [options] program [arguments])");
    if (const Status settled = settle_rendezvous(words.given, draft); !settled) return settled.error();
    settle_output(words.given, draft.spec.output);
    draft.spec.failure_grace = std::min(draft.spec.failure_grace, draft.spec.shutdown_timeout);
    draft.spec.program = {program_kind(draft), *words.program, words.arguments};
    line.spec = std::move(draft.spec);
    line.remarks = std::move(draft.remarks);
    return line;
}

}  // namespace

Result<CommandLine> parse_command_line(const std::vector<std::string>& args, const EnvironmentLookup& env) {
    Result<Words> words = read_words(args);
    if (!words) return words.error();
    if (words->action != CommandLine::Run) {
        CommandLine line;
        line.action = words->action;
        line.text = line.action == CommandLine::Help ? render_help() : "ddprun " DDPRUN_VERSION "\n";
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
