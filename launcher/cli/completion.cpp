#include <fmt/core.h>
#include <glob.h>

#include <algorithm>

#include "env/print.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/cli/help.h"
#include "launcher/cli/option_table.h"

namespace ddprun {
namespace {

using Words = std::vector<std::string>;

/// Joins what bash splits: "--tee", "=", "3" become "--tee=3".
Words join_at_equals(const Words& words) {
    Words joined;
    bool is_open = false;  // an "=" waits for its value
    for (const std::string& word : words) {
        const bool is_equals = word == "=" && !joined.empty();
        if (is_equals || is_open) joined.back() += word;
        else joined.push_back(word);
        is_open = is_equals;
    }
    return joined;
}

/// Adds those of `words` that begin with `typed`.
void offer_words(std::string_view words, std::string_view typed, std::vector<Offer>& offers) {
    for (const std::string_view word : split(words, ' ')) {
        if (!word.empty() && (word.starts_with(typed) || word.starts_with('@')))
            offers.push_back({std::string(word), ""});
    }
}

/// Adds the options that begin with `typed`, in the user's spelling: dashes or underscores.
void offer_options(const OptionList& list, const std::string& typed, std::vector<Offer>& offers) {
    const char separator = typed.find('_') == typed.npos ? '-' : '_';
    for (const CLI::Option* option : list.options()) {
        const std::string help = option->get_description();
        for (std::string name : option->get_lnames()) {
            std::replace(name.begin(), name.end(), '-', separator);
            if (name.insert(0, "--"); name.starts_with(typed))
                offers.push_back({name, help.substr(0, help.find(". "))});
        }
    }
}

/// Offers for a subcommand's words that are no options; `before` are those that stand before it.
void offer_arguments(const Subcommand& row, std::size_t before, const std::string& typed,
                     std::vector<Offer>& offers) {
    const std::string_view words = row.offered;
    const std::size_t at = words.find('@');
    if (before == 0 && at > 0) offer_words(words.substr(0, at), typed, offers);
    else if (at != words.npos) offer_words(words.substr(at), typed, offers);
}

/// Offers for the word that begins the program, or a subcommand.
void offer_programs(bool is_first, const std::string& typed, std::vector<Offer>& offers) {
    for (const Subcommand& row : subcommands()) {
        if (is_first && row.name.starts_with(typed))
            offers.push_back({std::string(row.name), std::string(row.help.substr(0, row.help.find(". ")))});
    }
    offers.push_back({"@command", ""});
}

/// What `list` offers for `typed`, behind the words `before`. nullopt: it is no option and no option's value.
std::optional<std::vector<Offer>> complete_option(const OptionList& list, const SplitWords& before,
                                                  const std::string& typed) {
    std::vector<Offer> offers;
    const std::size_t equals = typed.find('=');
    const bool has_value = typed.starts_with("--") && equals != typed.npos;
    const CLI::Option* const option = before.unfinished != nullptr ? before.unfinished
                                      : has_value                  ? list.find(label_of(typed))
                                                                   : nullptr;
    if (option != nullptr)
        offer_words(option->get_option_text(), has_value ? typed.substr(equals + 1) : typed, offers);
    else if (typed.starts_with('-')) offer_options(list, typed, offers);
    else return std::nullopt;
    return offers;
}

std::vector<Offer> complete_subcommand(const Subcommand& row, Words before, const std::string& typed) {
    const SubcommandOptions options(row);
    const Rest rest = row.reads_options ? Rest::IsTheProgram : Rest::StandsBetween;
    // The verb of a batch command stands before its options.
    const std::size_t verbs = row.reads_options && !before.empty() ? 1 : 0;
    before.erase(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(verbs));
    const SplitWords split = options.list.split(before, rest);
    std::vector<Offer> offers;
    if (!row.reads_options || split.rest.empty()) {
        if (auto found = complete_option(options.list, split, typed)) return *std::move(found);
    }
    offer_arguments(row, verbs + split.rest.size(), typed, offers);
    return offers;
}

/// Offers for tcsh, which cannot add its own files to them.
void print_for_tcsh(const std::string& line) {
    Words words;
    for (const std::string_view word : split(line, ' ')) {
        if (!word.empty()) words.emplace_back(word);
    }
    if (line.ends_with(' ') || words.size() < 2) words.emplace_back();
    const std::string typed = words.back();
    for (const Offer& offer : complete({words.begin() + 1, words.end()})) {
        if (!offer.word.starts_with('@')) {
            ddprun::print("{}\n", offer.word);
            continue;
        }
        glob_t found{};
        ::glob((typed + "*").c_str(), GLOB_MARK, nullptr, &found);
        for (std::size_t at = 0; at < found.gl_pathc; ++at) ddprun::print("{}\n", found.gl_pathv[at]);
        ::globfree(&found);
    }
}

constexpr const char* kBash =
    R"(# bash completion for ddprun; put it into ~/.local/share/bash-completion/completions/ddprun
_ddprun() {
  local IFS=$'\n' line cur="${COMP_WORDS[COMP_CWORD]}"
  [[ $cur == "=" ]] && cur=""
  COMPREPLY=()
  while read -r line; do
    case "$line" in
    @command*) COMPREPLY+=($(compgen -c -- "$cur") $(compgen -f -- "$cur"));;
    @file*) COMPREPLY+=($(compgen -f -- "$cur"));;
    @directory*) COMPREPLY+=($(compgen -d -- "$cur"));;
    *) COMPREPLY+=("${line%%$'\t'*}");;
    esac
  done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o filenames -F _ddprun ddprun
)";

constexpr const char* kZsh = R"(#compdef ddprun
# zsh completion for ddprun; put it as _ddprun into a directory of $fpath
_ddprun() {
  local line; local -a offers lines
  lines=("${(@f)$("$words[1]" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  compset -P '--*='
  for line in $lines; do
    case $line in
    @command*) _command_names -e; _files;;
    @file*) _files;;
    @directory*) _files -/;;
    *) offers+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}");;
    esac
  done
  _describe ddprun offers
}
_ddprun "$@"
)";

constexpr const char* kFish =
    R"(# fish completion for ddprun; put it into ~/.config/fish/completions/ddprun.fish
function __ddprun_complete
  set -l words (commandline -opc) (commandline -ct)
  set -l option (string match -r -- '^--[^=]+=' $words[-1])
  set -l typed (string replace -r -- '^--[^=]+=' '' $words[-1])
  for line in ($words[1] __complete $words[2..-1] 2>/dev/null)
    switch $line
      case '@command*'
        __fish_complete_command
      case '@file*'
        printf "$option%s\n" (__fish_complete_path "$typed")
      case '@directory*'
        printf "$option%s\n" (__fish_complete_directories "$typed")
      case '*'
        echo "$option$line"
    end
  end
end
complete -c ddprun -f -a '(__ddprun_complete)'
)";

constexpr const char* kTcsh =
    "# tcsh completion for ddprun; source it from ~/.tcshrc\n"
    "complete ddprun 'p@*@`ddprun __complete`@'\n";

}  // namespace

std::vector<Offer> complete(std::vector<std::string> words) {
    words = join_at_equals(words);
    if (words.empty()) words.emplace_back();
    const std::string typed = std::move(words.back());
    words.pop_back();
    const Subcommand* const row = words.empty() ? nullptr : find_subcommand(words.front());
    if (row != nullptr) words.erase(words.begin());
    if (row != nullptr && row->declare != nullptr) return complete_subcommand(*row, std::move(words), typed);

    const DdprunOptions options;
    const SplitWords split = options.list.split(words, Rest::IsTheProgram);
    if (!split.rest.empty()) return {{"@file", ""}};  // behind the program everything belongs to it
    if (auto found = complete_option(options.list, split, typed)) return *std::move(found);
    std::vector<Offer> offers;
    if (row == nullptr) offer_programs(words.empty(), typed, offers);
    return offers;
}

int print_completions(const std::vector<std::string>& words) {
    if (words.empty()) {
        print_for_tcsh(process_environment("COMMAND_LINE").value_or(""));
        return 0;
    }
    for (const Offer& offer : complete(words)) ddprun::print("{}\t{}\n", offer.word, offer.text);
    return 0;
}

const Choices<std::string>& completion_scripts() {
    static const Choices<std::string> scripts = {
        {"bash", kBash}, {"zsh", kZsh}, {"fish", kFish}, {"tcsh", kTcsh}};
    return scripts;
}

}  // namespace ddprun
