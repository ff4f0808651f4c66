#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// What splitting a command line has to know of an option.
struct OptionKind {
    bool takes_value = false;
    std::string_view value_name = {};  ///< as --help calls the value, for errors
};
/// By label, "--log_dir", "--redir" or "-r"; nullopt: there is no such option.
using OptionKinds = std::function<std::optional<OptionKind>(std::string_view label)>;

/// A command line taken apart: "--tee=3", "--tee 3", "-t 3", "-t3" and "-t=3" are an option and its value.
struct CommandWords {
    struct Option {
        std::string label;  ///< as it was written
        std::string value;  ///< "1" of a switch
    };
    std::vector<Option> options;         ///< in the order of the command line
    std::vector<std::string> rest;       ///< the words that are no options
    std::optional<std::string> unknown;  ///< the first that looks like an option, and is none
    /// What is wrong with an option's value, in one line; the options are then there, but not all of their
    /// values.
    std::optional<Error> wrong;
};

enum class Rest {
    IsTheProgram,  ///< the first word that is no option begins it, and all that follow are its own; "--" does
                   ///< too
    StandsBetween  ///< such words stand among the options
};

/// Splits the words with CLI11, which nobody else sees.
CommandWords split_words(const std::vector<std::string>& args, const OptionKinds& kinds, Rest rest);

/// "-x" and "--x"; "-" alone is a word like any other.
bool is_option(std::string_view word);
/// Of an option word, without its value: "--tee", "-t".
std::string label_of(std::string_view word);

}  // namespace ddprun
