#include "launcher/cli/man_page.h"

#include <fmt/core.h>

#include <string_view>

#include "launcher/cli/option_table.h"
#include "launcher/cli/subcommand.h"

namespace ddprun {
namespace {

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

std::string section(std::string_view title) { return fmt::format(".SH {}\n", title); }

std::string entry(std::string_view term, std::string_view text) {
    return fmt::format(".TP\n.B {}\n{}\n", troff(term), troff(text));
}

std::string option_entry(const CLI::Option& option) {
    std::string term;
    for (const std::string& letter : option.get_snames()) term += fmt::format("\\fB\\-{}\\fR, ", letter);
    term += fmt::format("\\fB{}\\fR", troff(option.get_name()));
    if (!is_flag(option)) term += fmt::format(" \\fI{}\\fR", troff(option.get_type_name()));
    std::string text = troff(option.get_description());
    if (option.get_lnames().size() > 1)
        text += fmt::format(" Also {}.", troff("--" + option.get_lnames()[1]));
    if (is_repeatable(option)) text += " May be given several times.";
    return fmt::format(".TP\n{}\n{}\n", term, text);
}

std::string options_section() {
    std::string text = section("OPTIONS");
    text +=
        troff(
            "Every option may be written with dashes or underscores, and cut short where one option alone begins so. Its default can be set by a variable: "
            "PET_NNODES for --nnodes. The command line wins over variables, these over the file of --config. "
            "Time spans are written 90, 90s, 500ms, 15m or 2h.") +
        "\n";
    const DdprunOptions options;
    for (CLI::App* group : options.list.groups()) {
        if (!group->get_options().empty()) text += fmt::format(".SS {}\n", troff(group->get_group()));
        for (const CLI::Option* option : group->get_options()) text += option_entry(*option);
    }
    return text;
}

std::string asking() {
    std::string text = section("OTHER COMMANDS");
    for (const SubcommandRow& row : subcommands())
        text += entry(fmt::format("ddprun {} {}", row.name, row.arguments), row.help);
    return text;
}

std::string doctor_command() {
    std::string text = section("DOCTOR");
    text +=
        troff(
            "ddprun doctor looks at this machine as a place for training: driver, GPUs and how they are connected, NCCL's variables, "
            "network, memory, limits, clock. Then it runs an all-reduce among the GPUs, or the CPUs, as a job of its own. Each line is "
            "ok, note, warning or error, and says what to set. Its exit status is 0, or 1 when there was an error.") +
        "\n";
    text += entry("--json", "One JSON object with the findings and the facts behind them.");
    text += entry("--no-run", "Without the all-reduce.");
    text += entry(
        "--seconds S, --bytes SIZE",
        "How long it lasts (2 seconds), and how much each worker gives to it (256MiB of a GPU, else 64MiB).");
    return text;
}

std::string environment() {
    std::string text = section("ENVIRONMENT");
    text += entry("PET_<OPTION>", "The default of an option.");
    text += entry(
        "PYTHON_EXEC",
        "The Python that runs .py programs, -m and --run-path. Default: that of the virtual environment "
        "that ddprun is installed in, else python3.");
    text += entry("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "The default of --shutdown-timeout, in seconds.");
    text += entry("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "The default of --prefix.");
    text += entry("TORCHELASTIC_ERROR_FILE", "Where the first failure is left as JSON, as torchrun does.");
    text += entry("LOGLEVEL", "How much ddprun says of itself: DEBUG, INFO, WARNING or ERROR.");
    text += entry(
        "DDPRUN_TOKEN",
        "The secret of a job of several nodes; the same on all of them. Without it they share the file below.");
    text += entry("DDPRUN_INSECURE", "1: as --insecure.");
    text += entry("DDP_NCCL_LIBRARY, DDPRUN_NVML_LIBRARY",
                  "Files to load in place of libnccl.so.2 and libnvidia-ml.so.1.");
    text += entry("NO_COLOR", "Not empty: prefixes without colour.");
    text +=
        ".PP\nEach worker finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_NAME, "
        "ROLE_RANK, ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, "
        "TORCHELASTIC_RUN_ID and TORCHELASTIC_ERROR_FILE in its environment, and all that ddprun inherited.\n";
    return text;
}

std::string files() {
    std::string text = section("FILES");
    text += entry(
        "$XDG_CONFIG_HOME/ddprun/secret, ~/.config/ddprun/secret",
        "32 random bytes by which the nodes of a user's jobs know each other, made when a job of several nodes starts without "
        "DDPRUN_TOKEN. Nodes that do not share it get a copy of it, readable by its owner alone.");
    return text;
}

std::string signals() {
    std::string text = section("SIGNALS");
    text += entry("SIGTERM, SIGINT, SIGHUP, SIGQUIT",
                  "The workers get the same signal and --shutdown-timeout to save; ddprun exits with 75. "
                  "A second one kills them now.");
    text += entry(
        "SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH",
        "Passed on to the workers; the job goes on. "
        "SIGTSTP (Ctrl-Z) stops ddprun, too: of a job of several nodes for less than --heartbeat-timeout, else it is lost to the others.");
    text +=
        entry("SIGKILL",
              "Nothing can be done, and nothing is left: the workers and all that they started are killed.");
    return text + ".PP\n" + troff("--signal and --signals-to-handle change what a signal does.") + "\n";
}

std::string exit_codes() {
    std::string text = section("EXIT STATUS");
    for (const auto& [code, meaning] : kExitCodes) text += entry(code, meaning);
    return text;
}

std::string examples() {
    std::string text = section("EXAMPLES");
    for (const auto& [what, command] : kExamples)
        text += fmt::format(".PP\n{}:\n.PP\n.RS\n.nf\n{}\n.fi\n.RE\n", troff(what), troff(command));
    return text;
}

}  // namespace

std::string render_man_page() {
    std::string page = ".TH DDPRUN 1 \"\" \"ddprun " DDPRUN_VERSION "\" \"User Commands\"\n";
    page += section("NAME") + "ddprun \\- start and supervise distributed data\\-parallel training\n";
    page +=
        section("SYNOPSIS") + ".B ddprun\n[\\fIoptions\\fR] \\fIprogram\\fR [\\fIarguments\\fR ...]\n.br\n";
    page += ".B ddprun\n\\fIsubcommand\\fR [\\fIarguments\\fR ...]\n";
    page += section("DESCRIPTION");
    page +=
        troff(
            "Starts, watches and stops the workers of a distributed data-parallel job, on one node or several. Every command line "
            "of torchrun works. A program ending in .py is run by Python; a name without a slash is looked for among "
            "ddprun's own workers, then in PATH. \"${local_rank}\" and \"${rank}\" in the arguments are replaced for "
            "each worker. What follows the program belongs to it.") +
        "\n";
    return page + options_section() + asking() + doctor_command() + signals() + environment() + files() +
           exit_codes() + examples();
}

}  // namespace ddprun
