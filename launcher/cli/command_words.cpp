#include "launcher/cli/command_words.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <ostream>

// CLI11 includes <iostream>, which constructs eight streams at every start. It only names two of them, in
// functions that nobody calls: libstdc++'s header is told that it was there already.
#ifdef __GLIBCXX__
#define _GLIBCXX_IOSTREAM 1
namespace std {
extern ostream cout, cerr;
}
#endif
#include <CLI/CLI.hpp>

#include "env/text.h"

namespace ddprun {
namespace {

/// Stands before a value that is part of its option's word: CLI11 takes "--prefix=" for an option without a
/// value, and does not tell "--role=--quiet" from a forgotten value. No word of a command line has such a
/// byte.
constexpr char kAttached = '\0';

bool is_short(const std::string& label) { return label.size() == 2; }

std::string with_mark(std::string word, const std::string& label) {
    if (word.size() > label.size()) word.insert(label.size() + (is_short(label) ? 0 : 1), 1, kAttached);
    return word;
}

std::string without_marks(std::string word) {
    std::erase(word, kAttached);
    return word;
}

/// The value as it was meant; nullopt: it is a word of its own.
std::optional<std::string> attached_value(const std::string& value, const std::string& label) {
    if (value.empty() || value.front() != kAttached) return std::nullopt;
    std::string text = without_marks(value);
    if (is_short(label) && text.starts_with('=')) text.erase(0, 1);
    return text;
}

std::string needs_value(const OptionKind& kind) {
    return kind.value_name.empty() ? "needs a value" : fmt::format("needs a value ({})", kind.value_name);
}

std::string takes_no_value(std::string_view value) {
    return fmt::format("takes no value (got '{}')", excerpt(value));
}

void add_switch(CLI::App& app, const std::string& label) {
    const auto settle = [label](std::string& value) {
        if (const std::optional<std::string> given = attached_value(value, label))
            return takes_no_value(*given);
        value = "1";
        return std::string();
    };
    app.add_flag(label)->transform(CLI::Validator(settle, ""));
}

void add_option(CLI::App& app, const std::string& label, const OptionKind& kind, const OptionKinds& kinds) {
    const auto settle = [label, kind, &kinds](std::string& value) {
        if (const std::optional<std::string> given = attached_value(value, label)) {
            value = *given;
            return std::string();
        }
        value = without_marks(std::move(value));
        // "--rdzv-id --standalone" forgot the value; "--prefix --" or a negative number is a value.
        if (!is_option(value) || value == "--" || !kinds(label_of(value))) return std::string();
        return fmt::format("{}, but {} follows; write {}=VALUE if it is the value", needs_value(kind),
                           excerpt(value), label);
    };
    app.add_option(label)->take_all()->transform(CLI::Validator(settle, ""));
}

/// What was given, in the order of the command line. Each label is an option of its own, asked for once per
/// value.
std::vector<CommandWords::Option> given_options(const CLI::App& app) {
    std::vector<CommandWords::Option> given;
    std::map<const CLI::Option*, std::size_t> seen;
    for (const CLI::Option* option : app.parse_order())
        given.push_back({option->get_name(), option->results()[seen[option]++]});
    return given;
}

}  // namespace

bool is_option(std::string_view word) { return word.size() > 1 && word[0] == '-'; }

std::string label_of(std::string_view word) {
    return std::string(word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2));
}

CommandWords split_words(const std::vector<std::string>& args, const OptionKinds& kinds, Rest rest) {
    CLI::App app;
    app.set_help_flag();
    if (rest == Rest::IsTheProgram) app.prefix_command();
    else app.allow_extras();
    // CLI11 hears only of the labels that occur: an app of all options takes longer than all the rest of the
    // parsing, and so it knows abbreviations, and errors say what was written. Those of the program's own
    // words do no harm.
    std::vector<std::string> reversed;
    for (const std::string& word : args) {
        const std::string label = label_of(word);
        const std::optional<OptionKind> kind = is_option(word) ? kinds(label) : std::nullopt;
        reversed.push_back(kind ? with_mark(word, label) : word);
        if (!kind || app.get_option_no_throw(label) != nullptr) continue;
        if (kind->takes_value) add_option(app, label, *kind, kinds);
        else add_switch(app, label);
    }
    std::reverse(reversed.begin(), reversed.end());

    CommandWords words;
    const auto wrong = [&](std::string what) {
        words.wrong = Error{Errc::InvalidArgument, std::move(what), 0};
    };
    try {
        app.parse(reversed);
    } catch (const CLI::ArgumentMismatch&) {
        // The only one that can be: the words end behind an option that needs one more.
        wrong(fmt::format("{}: {}", args.back(), needs_value(*kinds(args.back()))));
    } catch (const CLI::ParseError& error) {
        wrong(error.what());
    }
    words.options = given_options(app);
    words.rest = app.remaining();
    // "-qx": CLI11 reads a switch, and -x behind it.
    if (!words.wrong && !words.rest.empty() && words.rest.front().starts_with(std::string{'-', kAttached})) {
        const std::string label = words.options.back().label;
        wrong(fmt::format("{}: {}", label,
                          takes_no_value(*attached_value(words.rest.front().substr(1), label))));
    }
    for (std::string& word : words.rest) word = without_marks(std::move(word));
    if (rest == Rest::IsTheProgram && !words.rest.empty() && words.rest.front() == "--") {
        words.rest.erase(words.rest.begin());
        return words;
    }
    const auto end = rest == Rest::IsTheProgram
                         ? words.rest.begin() + std::min<std::ptrdiff_t>(1, std::ssize(words.rest))
                         : words.rest.end();
    const auto unknown = std::find_if(words.rest.begin(), end, is_option);
    if (unknown != end) words.unknown = *unknown;
    return words;
}

}  // namespace ddprun
