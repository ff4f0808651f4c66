#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/result.h"
#include "launcher/cli/option_values.h"

namespace ddprun {

/// Stores one value of an option. The error does not name the option.
using TakeValue = std::function<Status(const std::string& value)>;

/// Returns a TakeValue that stores the parsed value in `place`.
template <class Place, class Parse>
TakeValue into(Place& place, Parse parse) {
    return [&place, parse = std::move(parse)](const std::string& value) -> Status {
        Result parsed = parse(value);
        if (!parsed) return parsed.error();
        place = *std::move(parsed);
        return {};
    };
}

/// Where the words stand that are no options.
enum class Rest {
    IsTheProgram,  ///< the first word that is no option, or the word after "--", begins the program
    StandsBetween  ///< words that are no options may stand among the options
};

/// A command line split up: "--tee=3", "--tee 3", "-t 3", "-t3" and "-t=3" are an option and its value.
struct SplitWords {
    struct Given {
        CLI::Option* option;
        std::string label;  ///< as the user wrote it: "--log_dir", "--redir", "-r"
        std::string value;  ///< "1" for a flag, and for a missing optional value
    };
    std::vector<Given> options;          ///< in the order of the command line
    std::vector<std::string> rest;       ///< the words that are no options
    std::optional<std::string> unknown;  ///< the first word that looks like an option, and is none
    std::optional<Error> wrong;          ///< the first error in an option's value
    CLI::Option* unfinished = nullptr;   ///< the option of the last word, when its value is missing
};

/// The options of a command.
///
/// CLI11 declares them: names (the first long one is shown), variable (envname), kind of value (type_name; ""
/// of a flag), group, text, and what completions offer (option_text). It also keeps the values until apply().
/// Its parser is not used. torchrun's names may be shortened and have '_' for '-', which CLI11 does not
/// accept; CLI11 takes "--prefix=" for a missing value, ranks a configuration file above variables, and
/// throws.
class OptionList {
  public:
    /// An option's variable is the prefix and the option's name: "PET_NNODES". "": no variables.
    explicit OptionList(std::string variable_prefix = "");
    OptionList(const OptionList&) = delete;
    OptionList& operator=(const OptionList&) = delete;

    /// Options declared from now on stand under this title in --help.
    void begin_group(const char* title);
    /// `names` are written as for CLI11: "-r,--redirects".
    CLI::Option* flag(const char* names, std::function<void()> switch_on, const char* help);
    CLI::Option* flag(const char* names, bool& place, const char* help);
    /// The last value counts, unless take_all() is called on the returned option. `offered` are the words
    /// that completions offer: "auto gpu", or "@file", "@directory".
    CLI::Option* value(const char* names, const char* type, TakeValue take, const char* help,
                       std::string offered = "");
    /// Declares an option whose value is one of `words`.
    template <class Place>
    CLI::Option* choice(const char* names, const char* type, Place& place,
                        Choices<std::type_identity_t<Place>> words, const char* help) {
        std::string offered = join(words, " ", [](const auto& word) { return word.first; });
        const auto parse = [words = std::move(words)](const std::string& value) {
            return parse_choice<Place>(value, words);
        };
        return this->value(names, type, into(place, parse), help, std::move(offered));
    }

    /// In the order of their declaration.
    [[nodiscard]] std::vector<CLI::Option*> options() const;
    /// Finds an option by its whole name or letter, with dashes or underscores: "--log_dir", "-r". nullptr:
    /// there is none.
    [[nodiscard]] CLI::Option* find_exactly(std::string_view label) const;
    /// Finds an option as torchrun does: also by a beginning that only one option has.
    [[nodiscard]] CLI::Option* find(std::string_view label) const;
    [[nodiscard]] std::vector<CLI::Option*> beginning_with(std::string_view label) const;
    /// The existing name most similar to this one ("nproc-per-nods", without dashes before it); "": none.
    [[nodiscard]] std::string nearest_to(std::string_view name) const;

    [[nodiscard]] SplitWords split(const std::vector<std::string>& words, Rest rest) const;
    /// Takes the values that were added to the option, the last or all. Error: InvalidArgument, without the
    /// option.
    Status apply(CLI::Option& option);
    /// Takes one value. Error: InvalidArgument, with the option as it was written.
    Status apply(const SplitWords::Given& given);
    /// Takes the values of the options of a command without a program; returns the other words. Error:
    /// InvalidArgument, with the option.
    Result<std::vector<std::string>> read(const std::vector<std::string>& words);
    /// " (expected --job, --json)", for an error; "" when there is no option but --help.
    [[nodiscard]] std::string expected() const;

  private:
    mutable CLI::App app_;  ///< mutable: its const search returns const options
    std::string variable_prefix_;
    /// The last one gets the next options. CLI11 compares a new option with all of its group: one group of
    /// all options would cost each start a tenth of a millisecond.
    std::vector<CLI::App*> groups_{&app_};
    std::string group_;  ///< the title of the last one
    Status applied_;     ///< of the option whose values are being taken
};

/// "nproc-per-node".
inline const std::string& name_of(const CLI::Option& option) { return option.get_lnames().front(); }
inline bool is_flag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
inline bool is_repeatable(const CLI::Option& option) {
    return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}

/// True for "-x" and "--x"; "-" alone is a word like any other.
bool is_option(std::string_view word);
/// The option of a word, without its value: "--tee", "-t".
std::string label_of(std::string_view word);

}  // namespace ddprun
