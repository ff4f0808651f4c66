#include "launcher/output/lines.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

namespace ddprun {
namespace {

struct PrefixVariable {
    std::string_view name;
    std::string PrefixValues::*value;
};
constexpr std::array kPrefixVariables = {
    PrefixVariable{"rank", &PrefixValues::rank},
    PrefixVariable{"local_rank", &PrefixValues::local_rank},
    PrefixVariable{"role_name", &PrefixValues::role_name},
    PrefixVariable{"host", &PrefixValues::host},
    PrefixVariable{"hostname", &PrefixValues::host},
    PrefixVariable{"time", &PrefixValues::time},
};

std::string PrefixValues::*variable_named(std::string_view name) {
    for (const PrefixVariable& variable : kPrefixVariables) {
        if (variable.name == name) return variable.value;
    }
    return nullptr;
}

bool is_name_character(char c) {
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

/// A reference at a dollar: its length and the variable's name ("" when it names none).
struct Reference {
    std::size_t length = 1;
    std::string_view name;
};

Reference reference_at(std::string_view text) {
    if (text.starts_with("${")) {
        const std::size_t end = text.find('}');
        if (end == std::string_view::npos) return {2, ""};
        return {end + 1, text.substr(2, end - 2)};
    }
    std::size_t end = 1;
    while (end < text.size() && is_name_character(text[end])) ++end;
    return {end, text.substr(1, end - 1)};
}

}  // namespace

std::string LineAssembler::take() {
    std::string line = std::exchange(partial_, {});
    if (std::exchange(continued_, false)) line.insert(0, kContinuedMark);
    return line;
}

std::string LineAssembler::cut() {
    // A progress bar draws over itself: a terminal would show the text after the last carriage return.
    const std::size_t drawn = partial_.rfind('\r');
    if (drawn != std::string::npos && drawn + 1 < partial_.size()) partial_.erase(0, drawn + 1);
    std::string line = take();
    continued_ = true;
    line += kUnfinishedMark;
    line += '\n';
    return line;
}

std::string LineAssembler::finish() {
    if (partial_.empty()) {
        continued_ = false;
        return "";
    }
    return take() + '\n';
}

std::string_view default_prefix(const PrefixPlace& place) {
    if (place.ranks > 1) return "[${rank}]: ";
    return place.is_whole_job || !place.is_terminal ? "" : "[${rank}]: ";
}

bool is_prefix_variable(std::string_view name) { return variable_named(name) != nullptr; }

std::string prefix_variables() {
    std::string text;
    for (const PrefixVariable& variable : kPrefixVariables)
        text += fmt::format("{}${{{}}}", text.empty() ? "" : ", ", variable.name);
    return text;
}

PrefixTemplate::PrefixTemplate(std::string_view text) {
    std::string literal;
    while (!text.empty()) {
        if (text.front() != '$') {
            const std::size_t end = std::min(text.find('$'), text.size());
            literal += text.substr(0, end);
            text.remove_prefix(end);
        } else if (text.starts_with("$$")) {
            literal += '$';
            text.remove_prefix(2);
        } else {
            const Reference reference = reference_at(text);
            if (const auto variable = variable_named(reference.name)) {
                if (!literal.empty()) parts_.push_back({std::exchange(literal, ""), nullptr});
                parts_.push_back({"", variable});
                names_time_ = names_time_ || variable == &PrefixValues::time;
            } else {
                literal += text.substr(0, reference.length);
            }
            text.remove_prefix(reference.length);
        }
    }
    if (!literal.empty()) parts_.push_back({std::move(literal), nullptr});
}

std::string PrefixTemplate::render(const PrefixValues& values) const {
    std::string prefix;
    for (const Part& part : parts_) prefix += part.variable == nullptr ? part.literal : values.*part.variable;
    return prefix;
}

std::string colored_prefix(const std::string& prefix, int rank) {
    // Twelve of the 16 colours are readable on black and on white; neighbours differ well.
    constexpr std::array kColors = {32, 36, 33, 35, 34, 31, 92, 96, 93, 95, 94, 91};
    const int color = kColors[static_cast<std::size_t>(rank) % kColors.size()];
    return fmt::format("\x1b[{}m{}\x1b[0m", color, prefix);
}

}  // namespace ddprun
