#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
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

/// One option. The table is the only place that knows an option: parsing, PET_ variables, configuration
/// files,
/// --help and shell completions all come from it.
struct OptionRow {
    std::string_view name;     ///< long name with dashes; underscores are accepted as well
    char letter;               ///< short name, or 0
    std::string_view value;    ///< how --help calls the value; "" for a switch
    std::string_view choices;  ///< for completion: words, or "@file", "@directory", or ""
    std::string_view help;
    /// Takes one value, or is called once for a switch that is on. The error does not name the option.
    Status (*apply)(OptionDraft& draft, std::string_view value);
    std::string_view alias = "";  ///< a second long name
    bool repeatable = false;      ///< every value counts, not only the last
};

struct OptionGroup {
    std::string_view title;
    std::vector<OptionRow> rows;
};

/// In the order of --help, which is also the order in which values are applied.
const std::vector<OptionGroup>& option_groups();

/// By long name or alias, dashes or underscores, without the leading "--". nullptr: there is none.
const OptionRow* find_option(std::string_view name);
const OptionRow* find_option(char letter);
/// Those whose name or alias begins so, in the order of --help: one of them is what an abbreviation means,
/// several make it ambiguous.
std::vector<const OptionRow*> options_beginning_with(std::string_view name);
/// The name the user may have meant, or "".
std::string nearest_option(std::string_view name);
/// "PET_NPROC_PER_NODE" for "nproc-per-node".
std::string environment_name(std::string_view option);

/// The complete --help text, 100 columns wide.
std::string render_help();
/// A completion script for bash, zsh, fish or tcsh. Error: InvalidArgument for another shell.
Result<std::string> render_completion(std::string_view shell);

}  // namespace ddprun
