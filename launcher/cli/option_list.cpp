#include "launcher/cli/option_list.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>

#include "env/text.h"

namespace ddprun {
namespace {

std::string with_dashes(std::string_view label) {
    std::string dashed(label);
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    return dashed;
}

/// "PET_NPROC_PER_NODE" for "nproc-per-node".
std::string variable_of(std::string prefix, std::string_view option) {
    for (const char c : option)
        prefix += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    return prefix;
}

/// The value inside the option's own word; nullopt: none.
std::optional<std::string> attached_value(const std::string& word, const std::string& label) {
    if (word.size() == label.size()) return std::nullopt;
    const std::string value = word.substr(label.size());
    return value.starts_with('=') ? value.substr(1) : value;
}

Status take_each(const std::vector<std::string>& values, const TakeValue& take) {
    for (const std::string& value : values) {
        if (Status taken = take(value); !taken) return taken;
    }
    return {};
}

}  // namespace

OptionList::OptionList(std::string variable_prefix) : variable_prefix_(std::move(variable_prefix)) {
    app_.set_help_flag();
}

void OptionList::begin_group(const char* title) {
    group_ = title;
    groups_.push_back(app_.add_option_group(title));
}

std::vector<CLI::Option*> OptionList::options() const {
    std::vector<CLI::Option*> all;
    for (CLI::App* group : groups_) {
        const std::vector<CLI::Option*> some = group->get_options();
        all.insert(all.end(), some.begin(), some.end());
    }
    return all;
}

CLI::Option* OptionList::flag(const char* names, std::function<void()> switch_on, const char* help) {
    TakeValue take = [switch_on = std::move(switch_on)](const std::string& value) -> Status {
        const Result<bool> on = parse_bool(value);
        if (!on) return Error::invalid(fmt::format("'{}' is not true or false", excerpt(value)));
        if (*on) switch_on();
        return {};
    };
    return value(names, "", std::move(take), help)->expected(0);
}

CLI::Option* OptionList::flag(const char* names, bool& place, const char* help) {
    return flag(
        names, [&place] { place = true; }, help);
}

CLI::Option* OptionList::value(const char* names, const char* type, TakeValue take, const char* help,
                               std::string offered) {
    // CLI11 throws when a callback returns false, so the error is kept beside it.
    const auto take_all = [this, take = std::move(take)](const CLI::results_t& values) {
        applied_ = take_each(values, take);
        return true;
    };
    CLI::Option* const option = groups_.back()->add_option(names, CLI::callback_t(take_all));
    option->description(help)->type_name_fn([type] { return std::string(type); })->take_last();
    option->group(group_)->option_text(std::move(offered));
    if (!variable_prefix_.empty()) option->envname(variable_of(variable_prefix_, name_of(*option)));
    return option;
}

CLI::Option* OptionList::find_exactly(std::string_view label) const {
    return app_.get_option_no_throw(with_dashes(label));
}

CLI::Option* OptionList::find(std::string_view label) const {
    if (CLI::Option* const option = find_exactly(label)) return option;
    const std::vector<CLI::Option*> candidates = beginning_with(label);
    return candidates.size() == 1 ? candidates.front() : nullptr;
}

std::vector<CLI::Option*> OptionList::beginning_with(std::string_view label) const {
    std::vector<CLI::Option*> found;
    if (!label.starts_with("--") || label.size() == 2) return found;
    const std::string beginning = with_dashes(label.substr(2));
    for (CLI::Option* option : options()) {
        if (std::ranges::any_of(option->get_lnames(),
                                [&](const std::string& name) { return name.starts_with(beginning); }))
            found.push_back(option);
    }
    return found;
}

std::string OptionList::nearest_to(std::string_view name) const {
    std::vector<std::string> names;
    for (const CLI::Option* option : options()) names.push_back(name_of(*option));
    if (const std::string near = nearest(with_dashes(name), names); !near.empty()) return near;
    // "nproc" in a configuration file is an abbreviation, not a typing error.
    const CLI::Option* const longer = find("--" + std::string(name));
    return longer == nullptr ? "" : name_of(*longer);
}

SplitWords OptionList::split(const std::vector<std::string>& words, Rest rest) const {
    SplitWords result;
    const auto wrong = [&](const std::string& label, const std::string& what) {
        if (!result.wrong) result.wrong = Error::invalid(fmt::format("{}: {}", label, what));
    };
    for (std::size_t at = 0; at < words.size(); ++at) {
        const std::string label = label_of(words[at]);
        CLI::Option* const option = is_option(words[at]) ? find(label) : nullptr;
        if (option == nullptr) {
            const bool ends_options = rest == Rest::IsTheProgram && words[at] == "--";
            if (is_option(words[at]) && !ends_options && !result.unknown) result.unknown = words[at];
            if (rest == Rest::IsTheProgram) {
                result.rest.assign(words.begin() + static_cast<std::ptrdiff_t>(at + (ends_options ? 1 : 0)),
                                   words.end());
                break;
            }
            result.rest.push_back(words[at]);
            continue;
        }
        std::optional<std::string> value = attached_value(words[at], label);
        if (option->get_items_expected_min() == 0) {
            if (value && is_flag(*option))
                wrong(label, fmt::format("takes no value (got '{}')", excerpt(*value)));
            value = value.value_or("1");
        } else if (!value) {
            const std::string needed = fmt::format("needs a value ({})", option->get_type_name());
            if (++at == words.size()) {
                wrong(label, needed);
                result.unfinished = option;
                break;
            }
            value = words[at];
            // "--rdzv-id --standalone" forgot the value; "--prefix --" or a negative number is a value.
            if (is_option(*value) && *value != "--" && find(label_of(*value)) != nullptr)
                wrong(label, fmt::format("{}, but {} follows; write {}=VALUE if it is the value", needed,
                                         excerpt(*value), label));
        }
        result.options.push_back({option, label, *std::move(value)});
    }
    return result;
}

Status OptionList::apply(CLI::Option& option) {
    option.run_callback();
    return applied_;
}

Status OptionList::apply(const SplitWords::Given& given) {
    given.option->clear();
    given.option->add_result(given.value);
    const Status applied = apply(*given.option);
    return applied ? applied : applied.error().with(given.label);
}

Result<std::vector<std::string>> OptionList::read(const std::vector<std::string>& words) {
    SplitWords split = this->split(words, Rest::StandsBetween);
    if (split.wrong) return *split.wrong;
    if (split.unknown) return Error::invalid(fmt::format("{}: unknown option{}", *split.unknown, expected()));
    for (const SplitWords::Given& given : split.options) {
        if (const Status applied = apply(given); !applied) return applied.error();
    }
    return std::move(split.rest);
}

std::string OptionList::expected() const {
    std::vector<std::string> names;
    for (const CLI::Option* option : options()) {
        if (name_of(*option) != "help") names.push_back("--" + name_of(*option));
    }
    return names.empty() ? "" : fmt::format(" (expected {})", join(names, ", "));
}

bool is_option(std::string_view word) { return word.size() > 1 && word[0] == '-'; }

std::string label_of(std::string_view word) {
    return std::string(word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2));
}

}  // namespace ddprun
