#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "env/text.h"
#include "launcher/cli/option_table.h"
#include "launcher/cli/option_values.h"
#include "launcher/cli/subcommand.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// The options of the short help, in its order.
constexpr std::array kMostUsed = {
    "nproc-per-node", "nnodes",  "standalone", "hosts",        "hostfile",         "node-rank",
    "rdzv-endpoint",  "module",  "env",        "max-restarts", "shutdown-timeout", "walltime-notice",
    "hang-timeout",   "log-dir", "redirects",  "tee",          "report",           "dry-run",
    "quiet",          "help"};

std::vector<CLI::Option*> all_options() {
    static const DdprunOptions options;
    return options.list.options();
}

/// All ways to write the option: "--redirects", "--log_dir" ...
std::vector<std::string> spellings(const CLI::Option& option) {
    std::string underscored = name_of(option);
    std::replace(underscored.begin(), underscored.end(), '-', '_');
    std::vector<std::string> all = {option.get_name()};
    if (underscored != name_of(option)) all.push_back("--" + underscored);
    for (const std::string& name : option.get_lnames()) {
        if (name != name_of(option)) all.push_back("--" + name);
    }
    for (const std::string& letter : option.get_snames()) all.push_back("-" + letter);
    return all;
}

/// The options that take a value, which completions skip to find the program.
std::string value_options(char separator) {
    std::string words;
    for (const CLI::Option* option : all_options()) {
        if (is_flag(*option)) continue;
        for (const std::string& word : spellings(*option))
            words += (words.empty() ? "" : std::string(1, separator)) + word;
    }
    return words;
}

std::string subcommand_names(char separator) {
    std::vector<std::string> names;
    for (const SubcommandRow& row : subcommands()) names.emplace_back(row.name);
    return join(names, std::string_view(&separator, 1));
}

/// The help's first sentence, which is shown beside a completion.
std::string_view first_sentence(std::string_view help) {
    return help.substr(0, std::min(help.find(". "), help.size()));
}

std::string usage() {
    return "usage: ddprun [options] program [arguments of the program ...]\n       ddprun " +
           subcommand_names('|') + " [...]\n\n";
}

/// What a shell offers for the words of a subcommand that are no options.
struct OfferedWords {
    std::string first;  ///< for the word behind the subcommand, separated by blanks
    enum Paths { None, Directories, Files } paths = None;
};
OfferedWords words_of(const SubcommandRow& row) {
    using enum SubcommandRow::Takes;
    if (row.takes == OfABatchJob) return {"script submit status", OfferedWords::Files};
    if (row.arguments.starts_with("DIR")) return {"", OfferedWords::Directories};
    if (row.name != "signal") return {};
    const auto name = [](int signal) { return signal_name(signal).substr(3); };
    return {join(std::array{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGKILL, SIGUSR1, SIGUSR2, SIGCONT, SIGSTOP},
                 " ", name),
            OfferedWords::None};
}

/// The commands of a shell's language by which it offers words, files and directories.
struct OfferCommands {
    std::string_view before_words, behind_words;
    std::string_view files, directories;
    std::string_view word;      ///< the word that is completed
    std::string_view is_first;  ///< the condition that it stands directly behind the subcommand
};

/// One case for each subcommand without a job's options, in the language of bash and zsh.
std::string cases_of_subcommands(const OfferCommands& offer) {
    std::string cases;
    for (const SubcommandRow& row : subcommands()) {
        const std::vector<std::string> options = options_of(row);
        if (options.empty()) continue;
        const OfferedWords words = words_of(row);
        cases += fmt::format("      {}) if [[ {} == -* ]]; then {}{}{}", row.name, offer.word,
                             offer.before_words, join(options, " "), offer.behind_words);
        if (!words.first.empty())
            cases += fmt::format("; elif {}; then {}{}{}", offer.is_first, offer.before_words, words.first,
                                 offer.behind_words);
        if (words.paths != OfferedWords::None)
            cases += fmt::format("; else {}",
                                 words.paths == OfferedWords::Files ? offer.files : offer.directories);
        cases += "; fi; return;;\n";
    }
    return cases;
}

/// The subcommands that take a job's options: "env".
std::string job_subcommands(char separator) {
    std::vector<std::string> names;
    for (const SubcommandRow& row : subcommands()) {
        if (options_of(row).empty()) names.emplace_back(row.name);
    }
    return join(names, std::string_view(&separator, 1));
}

std::string bash_completion() {
    std::string cases, names;
    for (const CLI::Option* option : all_options()) {
        names += fmt::format(" --{}", name_of(*option));
        if (is_flag(*option)) continue;
        const std::string words = join(spellings(*option), "|");
        if (option->get_option_text() == "@file")
            cases += fmt::format("    {}) COMPREPLY=($(compgen -f -- \"$cur\")); return;;\n", words);
        else if (option->get_option_text() == "@directory")
            cases += fmt::format("    {}) COMPREPLY=($(compgen -d -- \"$cur\")); return;;\n", words);
        else
            cases += fmt::format("    {}) COMPREPLY=($(compgen -W \"{}\" -- \"$cur\")); return;;\n", words,
                                 option->get_option_text());
    }
    return fmt::format(
        R"(# bash completion for ddprun; put it into ~/.local/share/bash-completion/completions/ddprun
_ddprun() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" i
  COMPREPLY=()
  # "--name=value" arrives as three words.
  [[ $cur == "=" ]] && cur=""
  [[ $prev == "=" ]] && prev="${{COMP_WORDS[COMP_CWORD-2]}}"
  if ((COMP_CWORD > 1)); then
    case "${{COMP_WORDS[1]}}" in
{}    esac
  fi
  # Behind the program everything belongs to it.
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${{COMP_WORDS[i]}}" in
    {}) [[ ${{COMP_WORDS[i+1]}} == "=" ]] && ((i++)); ((i++));;
    -*) ;;
    {}) ((i > 1)) && {{ COMPREPLY=($(compgen -f -- "$cur")); return; }};;
    *) COMPREPLY=($(compgen -f -- "$cur")); return;;
    esac
  done
  case "$prev" in
{}  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "{}" -- "${{cur//_/-}}"))
  else
    COMPREPLY=($(compgen -c -- "$cur") $(compgen -f -- "$cur"))
    ((COMP_CWORD == 1)) && COMPREPLY+=($(compgen -W "{}" -- "$cur"))
  fi
}}
complete -o filenames -F _ddprun ddprun
)",
        cases_of_subcommands({"COMPREPLY=($(compgen -W \"", "\" -- \"$cur\"))",
                              "COMPREPLY=($(compgen -f -- \"$cur\"))",
                              "COMPREPLY=($(compgen -d -- \"$cur\"))", "$cur", "((COMP_CWORD == 2))"}),
        value_options('|'), job_subcommands('|'), cases, names.substr(1), subcommand_names(' '));
}

/// Escapes text inside single quotes, for a shell that has no escapes there.
std::string single_quoted(std::string_view text) {
    std::string out;
    for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out;
}

/// Escapes text inside the brackets of zsh's _arguments, where ] : and \ are special.
std::string zsh_text(std::string_view text) {
    std::string out;
    for (const char c : single_quoted(text)) {
        if (c == '[' || c == ']' || c == ':') out += '\\';
        out += c;
    }
    return out;
}

std::string zsh_completion() {
    std::string lines;
    for (const CLI::Option* option : all_options()) {
        std::string action;
        if (!is_flag(*option)) {
            const std::string how = option->get_option_text() == "@file"        ? "_files"
                                    : option->get_option_text() == "@directory" ? "_files -/"
                                    : option->get_option_text().empty()
                                        ? " "
                                        : fmt::format("({})", option->get_option_text());
            action = fmt::format(":{}:{}", zsh_text(option->get_type_name()), how);
        }
        for (const std::string& word : spellings(*option)) {
            const bool separate = word.size() == 2;  // -r 3, but --tee 3 and --tee=3
            lines += fmt::format("    '{}{}{}[{}]{}' \\\n", is_repeatable(*option) ? "*" : "", word,
                                 action.empty() ? ""
                                 : separate     ? "+"
                                                : "=",
                                 zsh_text(first_sentence(option->get_description())), action);
        }
    }
    return fmt::format(
        "#compdef ddprun\n# zsh completion for ddprun; put it as _ddprun into a directory of $fpath\n"
        "_ddprun_first() {{\n  ((CURRENT == 2)) && compadd {}\n  _command_names -e\n}}\n"
        "_ddprun() {{\n  if ((CURRENT > 2)); then\n    case ${{words[2]}} in\n{}      {}) words=(${{words[1]}} ${{words[3,-1]}}); ((CURRENT--));;\n    esac\n  fi\n  _arguments -S \\\n{}    '1:program:_ddprun_first' \\\n    '*::argument:_files'\n}}\n"
        "_ddprun \"$@\"\n",
        subcommand_names(' '),
        cases_of_subcommands({"compadd -- ", "", "_files", "_files -/", "$PREFIX", "((CURRENT == 3))"}),
        job_subcommands('|'), lines);
}

/// Escapes text inside fish's single quotes.
std::string fish_text(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (c == '\'' || c == '\\') out += '\\';
        out += c;
    }
    return out;
}

std::string fish_completion() {
    std::string lines;
    for (const CLI::Option* option : all_options()) {
        lines += fmt::format("complete -c ddprun -n __ddprun_own -l {}", name_of(*option));
        for (const std::string& letter : option->get_snames()) lines += " -s " + letter;
        if (!is_flag(*option)) {
            if (option->get_option_text() == "@file") lines += " -r";
            else if (option->get_option_text() == "@directory")
                lines += " -x -a '(__fish_complete_directories)'";
            else lines += fmt::format(" -x -a '{}'", option->get_option_text());
        }
        lines += fmt::format(" -d '{}'\n", fish_text(first_sentence(option->get_description())));
    }
    lines += "complete -c ddprun -n __ddprun_own -a '(__fish_complete_command)'\n";
    for (const SubcommandRow& row : subcommands()) {
        lines += fmt::format("complete -c ddprun -n __fish_is_first_arg -a {} -d '{}'\n", row.name,
                             fish_text(first_sentence(row.help)));
        const std::vector<std::string> options = options_of(row);
        if (options.empty()) continue;
        const OfferedWords words = words_of(row);
        lines += fmt::format("complete -c ddprun -n '__ddprun_asks {}' {} -a '{}'\n", row.name,
                             words.paths == OfferedWords::Files ? "-F" : "-f", join(options, " "));
        if (!words.first.empty())
            lines +=
                fmt::format("complete -c ddprun -n '__ddprun_asks {} 2' -f -a '{}'\n", row.name, words.first);
        if (words.paths == OfferedWords::Directories)
            lines += fmt::format(
                "complete -c ddprun -n '__ddprun_asks {}' -f -a '(__fish_complete_directories)'\n", row.name);
    }
    return fmt::format(R"(# fish completion for ddprun; put it into ~/.config/fish/completions/ddprun.fish
function __ddprun_asks -d 'the subcommand is this one, and the word behind it the one of this number'
  set -l words (commandline -opc)
  set -q words[2]; and test $words[2] = $argv[1]; and begin not set -q argv[2]; or test (count $words) = $argv[2]; end
end
function __ddprun_own -d 'not behind the program, to which everything belongs'
  set -l words (commandline -opc)
  set -l skip 1
  for word in $words
    if test $skip = 1
      set skip 0
      continue
    end
    switch $word
      case {}
        set skip 1
      case '-*' {}
      case '*'
        return 1
    end
  end
end
{})",
                       value_options(' '), job_subcommands(' '), lines);
}

std::string tcsh_completion() {
    std::string names, values;
    for (const CLI::Option* option : all_options()) {
        const std::string &name = name_of(*option), &words = option->get_option_text();
        names += " " + name;
        if (words == "@file") values += fmt::format(" 'n/--{}/f/'", name);
        else if (words == "@directory") values += fmt::format(" 'n/--{}/d/'", name);
        else if (!words.empty()) values += fmt::format(" 'n/--{}/({})/'", name, words);
    }
    return fmt::format(
        "# tcsh completion for ddprun; source it from ~/.tcshrc\ncomplete ddprun 'c/--/({})/'{} 'p/*/c/'\n",
        names.substr(1), values);
}

}  // namespace

constexpr std::array<Example, 6> kExamples = {{
    {"a Python script, with one worker per GPU, else per CPU",
     "ddprun --nproc-per-node=auto train.py --epochs 5"},
    {"four workers, at most three restarts within any hour, log files of each rank",
     "ddprun --nproc-per-node=4 --max-restarts=3/1h --log-dir=logs train.py"},
    {"in a PBS, Slurm or LSF job: all its hosts", "ddprun --nproc-per-node=auto train.py"},
    {"a program on four hosts, started by ssh", "ddprun --hosts=node[01-04] --nproc-per-node=8 ./train"},
    {"two hosts by hand, the second one with --node-rank=1",
     "ddprun --nnodes=2 --node-rank=0 --rdzv-endpoint=node01:29400 --nproc-per-node=8 train.py"},
    {"the jobs that run on this host, and their workers", "ddprun ps"},
}};

constexpr std::array<std::pair<const char*, const char*>, 10> kExitCodes = {{
    {"0", "All workers succeeded."},
    {"1-127", "That of the worker which failed first."},
    {"128+N", "The worker which failed first died of signal N."},
    {"64", "The command line or a configuration file is wrong; nothing was started."},
    {"69", "The nodes did not find together, or one was lost."},
    {"70", "An error of ddprun's own."},
    {"75", "Stopped by a signal, or preempted: start it again."},
    {"93", "A worker asked not to be started again."},
    {"124", "The workers hung (--hang-timeout)."},
    {"126, 127", "The program cannot be executed; does not exist."},
}};

std::string render_help() {
    std::string text = usage() + "Examples:\n";
    for (const auto& [what, command] : kExamples) text += fmt::format("  # {}\n  {}\n", what, command);
    text += "\nOptions (ddprun --help=all lists all of them, with their defaults and the exit codes):\n";
    const DdprunOptions options;
    for (const char* name : kMostUsed) {
        const CLI::Option& option = *options.list.find_exactly(fmt::format("--{}", name));
        const std::string_view sentence = first_sentence(option.get_description());
        text += help_entry(left_of_help(option),
                           fmt::format("{}{}", sentence, sentence.ends_with('.') ? "" : "."));
    }
    return text;
}

std::string render_full_help() {
    std::string text =
        usage() +
        "Starts, watches and stops the workers of a distributed data-parallel job. A program ending in .py,\n"
        "or a path to a file that is not executable and begins with #!...python, is run with PYTHON_EXEC,\n"
        "else the Python of the virtual environment that ddprun is installed in, else python3; a name\n"
        "without a slash is looked for among ddprun's own workers, then in PATH.\n"
        "\"${local_rank}\" and \"${rank}\" in the arguments are replaced for each worker.\n\n"
        "Every option can be written with dashes or underscores and set by a variable: PET_NNODES=2 is the\n"
        "default of --nnodes; the command line wins. A name may be cut short where one option alone begins\n"
        "so. Time spans: 90, 90s, 500ms, 15m, 2h.\n"
        "DDPRUN_LAUNCHER names the launcher around us (openmpi, pmi, pals, slurm, ..., or none) where it\n"
        "is not recognised.\n";
    text += render_options(DdprunOptions().list);
    text += "\nOther commands:\n" + render_subcommands() + "\nExit codes:\n";
    for (const auto& [code, meaning] : kExitCodes) text += help_entry(fmt::format("  {}", code), meaning);
    return text;
}

Result<std::string> render_completion(std::string_view shell) {
    const Result<std::string> known = parse_choice(shell, "bash zsh fish tcsh");
    if (!known) return known.error();
    if (shell == "bash") return bash_completion();
    if (shell == "zsh") return zsh_completion();
    return shell == "fish" ? fish_completion() : tcsh_completion();
}

}  // namespace ddprun
