#pragma once

#include <string>
#include <vector>

#include "launcher/cli/option_values.h"
#include "launcher/cli/subcommand.h"

/// The texts about ddprun's options. All are made from the option table and the table of subcommands.
namespace ddprun {

/// The text of --help: examples and the options that are used most; 100 columns wide.
std::string render_help();
/// The text of --help=all: all options, subcommands and exit codes.
std::string render_full_help();
/// The text of `ddprun SUBCOMMAND --help`.
std::string render_subcommand_help(const Subcommand& row);
/// The manual page ddprun(1) as troff source.
std::string render_man_page();

/// One word that a shell offers. "@file", "@directory" and "@command" stand for the shell's own.
struct Offer {
    std::string word;
    std::string text;  ///< a sentence about it, or ""
};
/// What a shell offers for the last of `words`, which follow "ddprun" on the command line. For the value in
/// "--tee=3", the offers are the values alone.
std::vector<Offer> complete(std::vector<std::string> words);
/// `ddprun __complete WORDS`, which the completion scripts call: prints an offer a line, with a tab before
/// its text. Without words it completes tcsh's COMMAND_LINE. Returns the exit code.
int print_completions(const std::vector<std::string>& words);
/// The completion script of each shell.
const Choices<std::string>& completion_scripts();

}  // namespace ddprun
