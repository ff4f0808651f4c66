#pragma once

#include <CLI/CLI.hpp>

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// Takes one value of an option to its place. The error does not name the option.
using TakeValue = std::function<Status(const std::string& value)>;

/// Moves what `parse` makes of the value to `place`.
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
    IsTheProgram,  ///< the first word that is no option begins it, and all that follow are its own; "--" does
                   ///< too
    StandsBetween  ///< such words stand among the options
};

/// A command line taken apart: "--tee=3", "--tee 3", "-t 3", "-t3" and "-t=3" are an option and its value.
struct SplitWords {
    struct Given {
        CLI::Option* option;
        std::string label;  ///< as it was written: "--log_dir", "--redir", "-r"
        std::string value;  ///< "1" of a flag
    };
    std::vector<Given> options;          ///< in the order of the command line
    std::vector<std::string> rest;       ///< the words that are no options
    std::optional<std::string> unknown;  ///< the first that looks like an option, and is none
    std::optional<Error> wrong;          ///< what is wrong with an option's value
};

/// The options of a command, declared on a CLI::App: CLI11 keeps their names (the first long one is shown),
/// variable (envname), kind of value (type_name; "" of a flag), group, text, and the words for completions
/// (option_text: "auto on off", "@file", "@directory"), collects their values and has them taken. How a
/// command line is split, and where else values stand, is torchrun's way and not CLI11's: split() and
/// options.cpp.
class OptionList {
  public:
    /// Variables are named by the prefix and the option: "PET_NNODES". "": there are none.
    explicit OptionList(std::string variable_prefix = "");
    OptionList(const OptionList&) = delete;
    OptionList& operator=(const OptionList&) = delete;

    /// What is declared from now on stands under this title in --help.
    void begin_group(const char* title);
    /// `names` as CLI11 writes them: "-r,--redirects".
    CLI::Option* flag(const char* names, std::function<void()> switch_on, const char* help);
    CLI::Option* flag(const char* names, bool& place, const char* help);
    /// The last value counts, unless take_all() is said behind it.
    CLI::Option* value(const char* names, const char* type, TakeValue take, const char* help);
    /// One of some words.
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

    struct Group {
        std::string title;
        std::vector<CLI::Option*> options;
    };
    [[nodiscard]] const std::vector<Group>& groups() const { return groups_; }
    [[nodiscard]] std::vector<CLI::Option*> options() const;
    /// By its whole name or letter, dashes or underscores: "--log_dir", "-r". nullptr: there is none.
    [[nodiscard]] CLI::Option* find_exactly(std::string_view label) const;
    /// As argparse reads it for torchrun's users: also by any beginning that one option alone has.
    [[nodiscard]] CLI::Option* find(std::string_view label) const;
    [[nodiscard]] std::vector<CLI::Option*> beginning_with(std::string_view label) const;
    /// The name that was meant by this one ("nproc-per-nods", without dashes before it); "": who knows.
    [[nodiscard]] std::string nearest_to(std::string_view name) const;

    [[nodiscard]] SplitWords split(const std::vector<std::string>& words, Rest rest) const;
    /// Of a command without a program: takes the values of the options, and returns the other words.
    /// Error: InvalidArgument, with the option.
    Result<std::vector<std::string>> read(const std::vector<std::string>& words);

  private:
    static Status not_one_of(const std::string& value, const std::string& words);

    CLI::App app_;
    CLI::App* group_ = nullptr;  ///< of CLI11
    std::deque<TakeValue> takers_;
    std::vector<Group> groups_;
    std::string variable_prefix_;
};

/// "nproc-per-node".
inline const std::string& name_of(const CLI::Option& option) { return option.get_lnames().front(); }
inline bool is_flag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
inline bool is_repeatable(const CLI::Option& option) {
    return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}
/// Takes the values that the option has been given, the last or all. Error: InvalidArgument, without the
/// option.
Status take_values(CLI::Option& option);

/// The columns of --help, and one entry of it: "  -r, --redirects STREAMS", and a text beside or below it.
inline constexpr std::size_t kHelpWidth = 100;
std::string help_entry(std::string left, std::string_view text);

/// The same with one value. Error: InvalidArgument, with the option as it was written.
Status take_value(const SplitWords::Given& given);

/// "-x" and "--x"; "-" alone is a word like any other.
bool is_option(std::string_view word);
/// Of an option word, without its value: "--tee", "-t".
std::string label_of(std::string_view word);

}  // namespace ddprun
