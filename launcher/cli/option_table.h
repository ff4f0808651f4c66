#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/result.h"
#include "launcher/cli/option_list.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The result of all options, before they are checked against each other.
struct OptionDraft {
    JobSpec spec;
    bool standalone = false;
    bool module = false;
    bool no_python = false;
    bool run_path = false;
    std::string shell;  ///< of --print-completion
    bool print_man = false;
    std::vector<std::string> remarks;
};

/// Declares ddprun's options, whose values then go to `draft`. This is the only list of options: the command
/// line, PET_ variables, configuration files, --help, the manual page and shell completions all use it.
/// Options are declared in the order of --help, in which their values are also applied.
void declare_options(OptionList& options, OptionDraft& draft);

/// ddprun's options, for callers that need only names and texts.
struct DdprunOptions {
    OptionDraft draft;
    OptionList list{"PET_"};
    DdprunOptions() { declare_options(list, draft); }
};

/// The text of --help: examples and the options that are used most; 100 columns wide.
std::string render_help();
/// The text of --help=all: all options and subcommands.
std::string render_full_help();
/// The examples of --help and of the manual page.
struct Example {
    const char* what;
    const char* command;
};
extern const std::array<Example, 6> kExamples;
/// The exit codes of ddprun with their meaning, for both too.
extern const std::array<std::pair<const char*, const char*>, 10> kExitCodes;
/// A completion script for bash, zsh, fish or tcsh. Error: InvalidArgument for another shell.
Result<std::string> render_completion(std::string_view shell);

}  // namespace ddprun
