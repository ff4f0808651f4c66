#pragma once

#include "launcher/cli/option_list.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// A command line while its options are read, before they are checked against each other.
struct OptionDraft : CommandLine {
    bool standalone = false;
    bool module = false;
    bool no_python = false;
    bool run_path = false;
};

/// Declares ddprun's options, whose values then go to `draft`. This is the only list of options: the command
/// line, PET_ variables, configuration files, --help, the manual page and completions all use it. The values
/// are applied in the order of the declarations, which --help shows too.
void declare_options(OptionList& options, OptionDraft& draft);

/// ddprun's options with the place of their values.
struct DdprunOptions {
    OptionDraft draft;
    OptionList list{"PET_"};
    DdprunOptions() { declare_options(list, draft); }
};

}  // namespace ddprun
