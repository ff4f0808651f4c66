#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/cli/option_list.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// What the options add up to before they are checked against each other.
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

/// Declares ddprun's options, whose values then go to `draft`. Only here is an option known: the command
/// line, PET_ variables, configuration files, --help, the manual page and shell completions all come from it.
/// They are declared in the order of --help, which is also the order in which values are applied.
void declare_options(OptionList& options, OptionDraft& draft);

/// ddprun's options, where only their names and texts are wanted.
struct DdprunOptions {
    OptionDraft draft;
    OptionList list{"PET_"};
    DdprunOptions() { declare_options(list, draft); }
};

/// The complete --help text, 100 columns wide.
std::string render_help();
/// A completion script for bash, zsh, fish or tcsh. Error: InvalidArgument for another shell.
Result<std::string> render_completion(std::string_view shell);

}  // namespace ddprun
