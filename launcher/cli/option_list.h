#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// Stores one value of an option. The error does not name the option.
using TakeValue = std::function<Status(const std::string& value)>;

/// Returns a TakeValue that stores the parsed value in `place`.
template <class Place, class Parse>
TakeValue into(Place& place, Parse parse) {
    return [&place, parse](const std::string& value) -> Status {
        Result parsed = parse(value);
        if (!parsed) return parsed.error();
        place = *std::move(parsed);
        return {};
    };
}
/// Any text but "".
Result<std::string> parse_text(std::string_view text);

enum class Rest {
    IsTheProgram,  ///< the program begins at the first word that is no option, or after "--"; all later words
                   ///< are its own
    StandsBetween  ///< words that are no options may stand among the options
};

/// A command line split up: "--tee=3", "--tee 3", "-t 3", "-t3" and "-t=3" are an option and its value.
struct SplitWords {
    struct Given {
        CLI::Option* option;
        std::string label;  ///< as the user wrote it: "--log_dir", "--redir", "-r"
        std::string value;  ///< "1" for a flag, and where an optional value is missing
    };
    std::vector<Given> options;          ///< in the order of the command line
    std::vector<std::string> rest;       ///< the words that are no options
    std::optional<std::string> unknown;  ///< the first word that looks like an option, and is none
    std::optional<Error> wrong;          ///< what is wrong with an option's value
};

/// The options of a command, declared on a CLI::App. CLI11 keeps their names (the first long one is shown),
/// variable (envname), kind of value (type_name; "" of a flag), group, text, and words for completions
/// (option_text: "auto on off", "@file", "@directory"). It also collects the values and calls their
/// TakeValue. Splitting a command line, and the other sources of values, follow torchrun and not CLI11:
/// split() and options.cpp.
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
    /// The last value counts, unless take_all() is called on the returned option.
    CLI::Option* value(const char* names, const char* type, TakeValue take, const char* help);
    /// Declares an option whose value is one of `words`.
    template <class Place>
    CLI::Option* choice(const char* names, const char* type, Place& place,
                        std::vector<std::pair<const char*, std::type_identity_t<Place>>> words,
                        const char* help) {
        std::string all;
        for (const auto& [word, meaning] : words) all.append(all.empty() ? "" : " ").append(word);
        TakeValue take = [&place, words = std::move(words), all](const std::string& value) -> Status {
            for (const auto& [word, meaning] : words) {
                if (value != word) continue;
                place = meaning;
                return {};
            }
            return not_one_of(value, all);
        };
        return this->value(names, type, std::move(take), help)->option_text(all);
    }

    [[nodiscard]] const std::vector<CLI::App*>& groups() const { return groups_; }
    [[nodiscard]] std::vector<CLI::Option*> options() const;
    /// Finds an option by its whole name or letter, with dashes or underscores: "--log_dir", "-r". nullptr:
    /// none.
    [[nodiscard]] CLI::Option* find_exactly(std::string_view label) const;
    /// Finds an option as argparse does for torchrun's users: also by a beginning that only one option has.
    [[nodiscard]] CLI::Option* find(std::string_view label) const;
    [[nodiscard]] std::vector<CLI::Option*> beginning_with(std::string_view label) const;
    /// The existing name most similar to this one ("nproc-per-nods", without dashes before it); "": none.
    [[nodiscard]] std::string nearest_to(std::string_view name) const;

    [[nodiscard]] SplitWords split(const std::vector<std::string>& words, Rest rest) const;
    /// Takes the values of the options of a command without a program; returns the other words. Error:
    /// InvalidArgument, with the option.
    Result<std::vector<std::string>> read(const std::vector<std::string>& words);

  private:
    static Status not_one_of(const std::string& value, const std::string& words);

    CLI::App app_;
    std::vector<CLI::App*> groups_{&app_};  ///< the last one gets the next options
    std::string variable_prefix_;
};

/// "nproc-per-node".
inline const std::string& name_of(const CLI::Option& option) { return option.get_lnames().front(); }
inline bool is_flag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
inline bool is_repeatable(const CLI::Option& option) {
    return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}
/// Takes the values that were given to the option, the last or all. Error: InvalidArgument, without the
/// option.
Status take_values(CLI::Option& option);

/// The columns of --help, and one entry of it: "  -r, --redirects STREAMS", with a text beside or below it.
inline constexpr std::size_t kHelpWidth = 100;
std::string help_entry(std::string left, std::string_view text);

/// An option's names and its kind of value: "  -r, --redirects STREAMS".
std::string left_of_help(const CLI::Option& option);
/// The entries of all options, below the titles of their groups.
std::string render_options(const OptionList& list);

/// Takes one value. Error: InvalidArgument, with the option as it was written.
Status take_value(const SplitWords::Given& given);

/// True for "-x" and "--x"; "-" alone is a word like any other.
bool is_option(std::string_view word);
/// The option of a word, without its value: "--tee", "-t".
std::string label_of(std::string_view word);

}  // namespace ddprun
