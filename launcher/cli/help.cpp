#include "launcher/cli/help.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "env/text.h"
#include "launcher/cli/option_table.h"

namespace ddprun {
namespace {

constexpr std::size_t kHelpWidth = 100, kHelpColumn = 30;

/// The options of the short help, in its order.
constexpr const char* kMostUsed[] = {
    "nproc-per-node", "nnodes",  "standalone", "hosts",        "hostfile",         "node-rank",
    "rdzv-endpoint",  "module",  "env",        "max-restarts", "shutdown-timeout", "walltime-notice",
    "hang-timeout",   "log-dir", "redirects",  "tee",          "report",           "dry-run",
    "quiet",          "help"};

/// A term and what it means.
struct Term {
    const char* term;
    const char* text;
};

constexpr Term kExamples[] = {
    {"a Python script, with one worker per GPU, else per CPU",
     "ddprun --nproc-per-node=auto train.py --epochs 5"},
    {"four workers, at most three restarts within any hour, log files of each rank",
     "ddprun --nproc-per-node=4 --max-restarts=3/1h --log-dir=logs train.py"},
    {"in a PBS, Slurm or LSF job: all its hosts", "ddprun --nproc-per-node=auto train.py"},
    {"a program on four hosts, started by ssh", "ddprun --hosts=node[01-04] --nproc-per-node=8 ./train"},
    {"two hosts by hand, the second one with --node-rank=1",
     "ddprun --nnodes=2 --node-rank=0 --rdzv-endpoint=node01:29400 --nproc-per-node=8 train.py"},
    {"the jobs that run on this host, and their workers", "ddprun ps"},
};

constexpr const char* kIntroduction[] = {
    "Starts, watches and stops the workers of a distributed data-parallel job. Python runs a program that "
    "ends in .py, or a path to a file that is not executable and begins with #!...python. The Python is "
    "PYTHON_EXEC, else that of the virtual environment that ddprun is installed in, else python3. ddprun "
    "looks for a name without a slash among its own workers, then in PATH. It replaces \"${local_rank}\" and "
    "\"${rank}\" in the arguments for each worker.",
    "Every option can be written with dashes or underscores, and shortened to a beginning that no other "
    "option has. A variable sets its default: PET_NNODES=2 is for --nnodes; the command line wins. Time "
    "spans: 90, 90s, 500ms, 15m, 2h. If ddprun does not recognise the surrounding launcher, DDPRUN_LAUNCHER "
    "names it (openmpi, pmi, pals, slurm, ..., or none).",
};

constexpr Term kExitCodes[] = {
    {"0", "All workers succeeded."},
    {"1-127", "The exit code of the worker that failed first."},
    {"128+N", "The worker that failed first died of signal N."},
    {"64", "The command line or a configuration file is wrong; nothing was started."},
    {"69", "The nodes did not find together, or one was lost."},
    {"70", "ddprun itself failed."},
    {"75", "The job was stopped by a signal, or preempted: start it again."},
    {"93", "A worker asked not to be started again."},
    {"124", "The workers hung (--hang-timeout)."},
    {"126, 127", "The program cannot be executed; does not exist."},
};

constexpr Term kSignals[] = {
    {"SIGTERM, SIGINT, SIGHUP, SIGQUIT",
     "The workers get the same signal and --shutdown-timeout to save; ddprun exits with 75. A second signal "
     "kills them at once."},
    {"SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH",
     "ddprun passes the signal on to the workers, and the job goes on. SIGTSTP (Ctrl-Z) stops ddprun, too. "
     "The other nodes take a ddprun that is stopped for --heartbeat-timeout for lost."},
    {"SIGKILL", "The kernel kills ddprun, and the workers with all that they started."},
};

constexpr Term kVariables[] = {
    {"PET_<OPTION>", "The default of an option."},
    {"PYTHON_EXEC",
     "The Python that runs .py programs, -m and --run-path. Default: that of the virtual environment that "
     "ddprun is installed in, else python3."},
    {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "The default of --shutdown-timeout, in seconds."},
    {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "The default of --prefix."},
    {"TORCHELASTIC_ERROR_FILE", "The file where ddprun leaves the first failure as JSON, as torchrun does."},
    {"LOGLEVEL", "How much ddprun logs: DEBUG, INFO, WARNING or ERROR."},
    {"DDPRUN_TOKEN",
     "The secret of a job of several nodes, equal on all of them. Without it they share the file below."},
    {"DDPRUN_INSECURE", "1 does the same as --insecure."},
    {"DDP_NCCL_LIBRARY, DDPRUN_NVML_LIBRARY",
     "The files to load in place of libnccl.so.2 and libnvidia-ml.so.1."},
    {"NO_COLOR", "When it is not empty, prefixes have no colour."},
};

constexpr Term kFiles[] = {
    {"$XDG_CONFIG_HOME/ddprun/secret, ~/.config/ddprun/secret",
     "32 random bytes by which the nodes of a user's jobs know each other. ddprun makes the file when a job "
     "of several nodes starts without DDPRUN_TOKEN. Nodes that do not share it need a copy of it, readable "
     "by its owner alone."},
};

constexpr std::string_view kUsageOfBatch =
    "usage: ddprun {0} script [options] [--] [options of ddprun] program [arguments]   prints a job script\n"
    "       ddprun {0} submit [options] [--] [options of ddprun] program [arguments]   submits it, follows "
    "the job\n"
    "       ddprun {0} status [--no-follow] JOB                                        follows a job\n";

// ---- the walk over the options that every text is made from

struct Entry {
    std::string letter, name;  ///< "r", "redirects"
    std::string type;          ///< "" of a flag
    std::string text;
};
struct Group {
    std::string title;
    std::vector<Entry> entries;
};

Entry entry_of(const CLI::Option& option) {
    const std::vector<std::string>&letters = option.get_snames(), &names = option.get_lnames();
    const std::string also = names.size() > 1 ? fmt::format(" Also --{}.", names[1]) : "";
    return {letters.empty() ? "" : letters[0], names[0], option.get_type_name(),
            option.get_description() + also};
}

std::vector<Group> groups_of(const OptionList& list) {
    std::vector<Group> groups;
    for (const CLI::Option* option : list.options()) {
        if (groups.empty() || groups.back().title != option->get_group())
            groups.push_back({option->get_group(), {}});
        groups.back().entries.push_back(entry_of(*option));
    }
    return groups;
}

/// "ddprun signal NAME [-r RANK] [--job ID]".
std::string usage_of(const Subcommand& row) {
    std::string usage = fmt::format("ddprun {}", row.name);
    if (!row.arguments.empty()) usage += fmt::format(" {}", row.arguments);
    if (row.declare == nullptr) return usage + " [options of a job]";
    if (row.reads_options) return usage;
    const SubcommandOptions own(row);
    for (const CLI::Option* option : own.list.options()) {
        const Entry entry = entry_of(*option);
        if (entry.name == "help") continue;
        const std::string name = entry.letter.empty() ? "--" + entry.name : "-" + entry.letter;
        usage += fmt::format(" [{}{}{}]", name, entry.type.empty() ? "" : " ", entry.type);
    }
    return usage;
}

// ---- --help

/// "  -r, --redirects STREAMS", with a text beside or below it.
std::string help_entry(std::string left, std::string_view text) {
    if (left.size() + 2 > kHelpColumn) left.append(1, '\n').append(kHelpColumn, ' ');
    else left.resize(kHelpColumn, ' ');
    return left + wrap(text, kHelpWidth, kHelpColumn) + '\n';
}

std::string help_entry(const Entry& entry, std::string_view text) {
    const std::string letter = entry.letter.empty() ? "    " : fmt::format("-{}, ", entry.letter);
    return help_entry(
        fmt::format("  {}--{}{}{}", letter, entry.name, entry.type.empty() ? "" : " ", entry.type), text);
}

std::string help_of_options(const OptionList& list) {
    std::string text;
    for (const Group& group : groups_of(list)) {
        if (!group.title.empty()) text += fmt::format("\n{}:\n", group.title);
        for (const Entry& entry : group.entries) text += help_entry(entry, entry.text);
    }
    return text;
}

std::string usage() {
    const std::string names =
        join(subcommands(), "|", [](const Subcommand& row) { return std::string(row.name); });
    return fmt::format(
        "usage: ddprun [options] program [arguments of the program ...]\n       ddprun {} [...]\n\n", names);
}

/// The first sentence, for places that have room for one.
std::string first_sentence(std::string_view text) {
    const std::string_view sentence = text.substr(0, text.find(". "));
    return fmt::format("{}{}", sentence, sentence.ends_with('.') ? "" : ".");
}

// ---- the manual page

/// Escapes text for troff: backslashes and a leading dot are printed as they are, and a dash can be copied
/// into a shell.
std::string troff(std::string_view text) {
    std::string out;
    if (text.starts_with('.') || text.starts_with('\'')) out += "\\&";
    for (const char c : text) {
        if (c == '\\') out += "\\e";
        else if (c == '-') out += "\\-";
        else out += c;
    }
    return out;
}

std::string man_entry(const Entry& entry) {
    std::string term = entry.letter.empty() ? "" : fmt::format("\\fB\\-{}\\fR, ", entry.letter);
    term += fmt::format("\\fB{}\\fR", troff("--" + entry.name));
    if (!entry.type.empty()) term += fmt::format(" \\fI{}\\fR", troff(entry.type));
    return fmt::format(".TP\n{}\n{}\n", term, troff(entry.text));
}

std::string man_entries(std::string_view title, const auto& terms) {
    std::string text = fmt::format(".SH {}\n", title);
    for (const Term& one : terms) text += fmt::format(".TP\n.B {}\n{}\n", troff(one.term), troff(one.text));
    return text;
}

std::string man_options() {
    std::string text =
        ".SH OPTIONS\n" +
        troff(
            "Every option may be written with dashes or underscores, and shortened to a beginning that no "
            "other option has. A variable sets its default: PET_NNODES is for --nnodes. The command line "
            "wins over variables, and these win over the file of --config. Time spans are written 90, 90s, "
            "500ms, 15m or 2h.") +
        "\n";
    for (const Group& group : groups_of(DdprunOptions().list)) {
        text += fmt::format(".SS {}\n", troff(group.title));
        for (const Entry& entry : group.entries) text += man_entry(entry);
    }
    return text;
}

std::string man_subcommands() {
    std::string text = ".SH OTHER COMMANDS\n";
    void (*before)(OptionList&, SubcommandDraft&) = nullptr;
    for (const Subcommand& row : subcommands()) {
        text += fmt::format(".TP\n.B {}\n{}\n", troff(usage_of(row)), troff(row.help));
        const bool are_described =
            row.declare == std::exchange(before, row.declare) || row.declare == nullptr;
        if (are_described) continue;
        text += ".RS\n";
        const SubcommandOptions own(row);
        for (const CLI::Option* option : own.list.options()) {
            if (name_of(*option) != "help") text += man_entry(entry_of(*option));
        }
        text += ".RE\n";
    }
    return text;
}

std::string man_examples() {
    std::string text = ".SH EXAMPLES\n";
    for (const auto& [what, command] : kExamples)
        text += fmt::format(".PP\n{}:\n.PP\n.RS\n.nf\n{}\n.fi\n.RE\n", troff(what), troff(command));
    return text;
}

}  // namespace

std::string render_help() {
    std::string text = usage() + "Examples:\n";
    for (const auto& [what, command] : kExamples) text += fmt::format("  # {}\n  {}\n", what, command);
    text += "\nOptions (ddprun --help=all lists all of them, with their defaults and the exit codes):\n";
    const DdprunOptions options;
    for (const char* name : kMostUsed) {
        const Entry entry = entry_of(*options.list.find_exactly(fmt::format("--{}", name)));
        text += help_entry(entry, first_sentence(entry.text));
    }
    return text;
}

std::string render_full_help() {
    std::string text = usage();
    for (const char* paragraph : kIntroduction) text += wrap(paragraph, kHelpWidth, 0) + "\n\n";
    text.pop_back();
    text += help_of_options(DdprunOptions().list) + "\nOther commands:\n";
    for (const Subcommand& row : subcommands()) text += help_entry("  " + usage_of(row), row.help);
    text +=
        "  ddprun COMMAND --help explains the options of a command. ddprun -- NAME runs a program of such a\n"
        "  name.\n\nExit codes:\n";
    for (const auto& [code, meaning] : kExitCodes) text += help_entry(fmt::format("  {}", code), meaning);
    return text;
}

std::string render_subcommand_help(const Subcommand& row) {
    const bool is_batch = row.reads_options && row.declare != nullptr;
    const std::string usage = is_batch ? fmt::format(fmt::runtime(kUsageOfBatch), row.name)
                                       : fmt::format("usage: {}\n", wrap(usage_of(row), kHelpWidth, 7));
    const std::string rest = row.declare == nullptr ? "  ddprun --help=all lists the options of a job.\n"
                                                    : help_of_options(SubcommandOptions(row).list);
    return fmt::format("{}\n{}\n\n{}", usage, wrap(row.help, kHelpWidth, 0), rest);
}

std::string render_man_page() {
    std::string page = ".TH DDPRUN 1 \"\" \"ddprun " DDPRUN_VERSION "\" \"User Commands\"\n";
    page += ".SH NAME\nddprun \\- start and supervise distributed data\\-parallel training\n";
    page += ".SH SYNOPSIS\n.B ddprun\n[\\fIoptions\\fR] \\fIprogram\\fR [\\fIarguments\\fR ...]\n.br\n";
    page += ".B ddprun\n\\fIsubcommand\\fR [\\fIarguments\\fR ...]\n.SH DESCRIPTION\n";
    page +=
        troff(
            "ddprun starts, watches and stops the workers of a distributed data-parallel job, on one node or "
            "several. Every command line of torchrun works. Python runs a program that ends in .py. ddprun "
            "looks for a name without a slash among its own workers, then in PATH. It replaces "
            "\"${local_rank}\" and \"${rank}\" in the arguments for each worker. What follows the program "
            "belongs to it.") +
        "\n" + man_options() + man_subcommands() + man_entries("SIGNALS", kSignals);
    page += ".PP\n" + troff("--signal and --signals-to-handle change what a signal does.") + "\n";
    page += man_entries("ENVIRONMENT", kVariables);
    page +=
        ".PP\nEach worker finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, "
        "GROUP_WORLD_SIZE, ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, "
        "TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID and "
        "TORCHELASTIC_ERROR_FILE in its environment, and all that ddprun inherited.\n";
    return page + man_entries("FILES", kFiles) + man_entries("EXIT STATUS", kExitCodes) + man_examples();
}

}  // namespace ddprun
