#include "launcher/subcommand.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/text.h"
#include "launcher/option_values.h"
#include "launcher/wrap.h"

namespace ddprun {
namespace {

constexpr std::size_t kHelpWidth = 100;
constexpr std::size_t kHelpColumn = 30;

/// "--rank=3", or the next word.
Result<std::string> value_of(const std::vector<std::string>& arguments, std::size_t& at) {
    const std::string& word = arguments[at];
    if (const std::size_t equals = word.find('='); word.starts_with("--") && equals != std::string::npos) {
        return word.substr(equals + 1);
    }
    if (++at >= arguments.size()) return invalid(fmt::format("{}: needs a value", word));
    return arguments[at];
}

}  // namespace

const std::vector<SubcommandRow>& subcommands() {
    static const std::vector<SubcommandRow> rows = {
        {"ps", "[--json]", "The jobs of this user that run on this host, and their workers on all nodes."},
        {"top", "", "The same, live; q or Ctrl-C ends it. One look when standard output is no terminal."},
        {"signal", "NAME [--rank R]", "Send a signal to all workers, or to one."},
        {"stacks", "[--rank R]", "Print the stacks of all workers of all nodes, or of one: by libddp's own handler, py-spy, gdb or "
                                 "eu-stack, whichever there is; without any, what the kernel says."},
        {"drain", "", "Preempt the job: notice and SIGTERM to the workers, --preempt-grace, exit code 75."},
        {"logs", "[-r RANK] [-f]", "Print the log files of this attempt; -f follows them, across restarts, to the end of the job."},
        {"gpus", "[--json]", "The NVIDIA GPUs of this host: how busy they are, their memory. Asks the driver, no job."},
        {"env", "[options]", "What was detected here: CPUs, GPUs, allocation; and where each option's value comes from."},
        {"doctor", "[options]", "Look for what is wrong with this machine: driver, GPUs, libraries, network, limits; with a short all-reduce."}};
    return rows;
}

bool is_subcommand(std::string_view word) {
    return std::any_of(subcommands().begin(), subcommands().end(), [word](const SubcommandRow& row) { return row.name == word; });
}

std::vector<std::string> options_of(const SubcommandRow& row) {
    if (row.arguments == "[options]") return {};
    std::vector<std::string> options;
    for (const std::string_view word : split(row.arguments, ' ')) {
        const std::string_view option = word.substr(word.starts_with('[') ? 1 : 0);
        if (option.starts_with('-')) options.emplace_back(option.substr(0, option.find(']')));
    }
    if (row.name != "gpus") options.emplace_back("--job");
    options.emplace_back("--help");
    return options;
}

std::string render_subcommands() {
    std::string text;
    for (const SubcommandRow& row : subcommands()) {
        std::string left = fmt::format("  ddprun {} {}", row.name, row.arguments);
        if (left.size() + 2 > kHelpColumn) left += '\n' + std::string(kHelpColumn, ' ');
        else left.resize(kHelpColumn, ' ');
        text += left + wrap(row.help, kHelpWidth, kHelpColumn) + '\n';
    }
    return text + wrap("  --job ID chooses one of several running jobs: the id that ddprun ps shows (or its beginning), "
                       "or the --rdzv-id. A program with such a name is run by ddprun -- NAME.", kHelpWidth, 2) + '\n';
}

Result<AskOptions> parse_ask_options(const std::vector<std::string>& arguments) {
    AskOptions options;
    for (std::size_t at = 0; at < arguments.size(); ++at) {
        const std::string& word = arguments[at];
        const std::string name = word.substr(0, word.starts_with("--") ? word.find('=') : std::string::npos);
        if (name == "--job" || name == "--rank" || name == "-r") {
            const Result<std::string> value = value_of(arguments, at);
            if (!value) return value.error();
            if (name == "--job") {
                options.job = *value;
                continue;
            }
            const Result<int> rank = parse_rank(*value);
            if (!rank) return rank.error().with(name);
            options.rank = *rank;
        } else if (word == "-f" || word == "--follow") {
            options.follow = true;
        } else if (word == "--json") {
            options.json = true;
        } else if (word == "-h" || word == "--help") {
            options.help = true;
        } else if (word.size() > 1 && word[0] == '-') {
            return invalid(fmt::format("{}: unknown option", word));
        } else {
            options.words.push_back(word);
        }
    }
    return options;
}

}  // namespace ddprun
