#include "launcher/line_prefix.h"

#include <array>
#include <utility>

#include <fmt/core.h>

namespace ddprun {
namespace {

std::string PrefixValues::*variable_named(std::string_view name) {
    if (name == "rank") return &PrefixValues::rank;
    if (name == "local_rank") return &PrefixValues::local_rank;
    if (name == "role_name") return &PrefixValues::role_name;
    if (name == "host") return &PrefixValues::host;
    if (name == "time") return &PrefixValues::time;
    return nullptr;
}

}  // namespace

PrefixTemplate::PrefixTemplate(std::string_view text) {
    while (!text.empty()) {
        const std::size_t start = text.find("${");
        const std::size_t end = start == std::string_view::npos ? start : text.find('}', start);
        if (end == std::string_view::npos) {
            parts_.push_back({std::string(text), nullptr});
            return;
        }
        const auto variable = variable_named(text.substr(start + 2, end - start - 2));
        const std::size_t literal = variable == nullptr ? end + 1 : start;
        if (literal > 0) parts_.push_back({std::string(text.substr(0, literal)), nullptr});
        if (variable != nullptr) parts_.push_back({"", variable});
        names_time_ = names_time_ || variable == &PrefixValues::time;
        text.remove_prefix(end + 1);
    }
}

std::string PrefixTemplate::render(const PrefixValues& values) const {
    std::string prefix;
    for (const Part& part : parts_) prefix += part.variable == nullptr ? part.literal : values.*part.variable;
    return prefix;
}

std::string colored_prefix(const std::string& prefix, int rank) {
    // The twelve of 16 colours that are readable on black and on white; neighbours differ well.
    constexpr std::array kColors = {32, 36, 33, 35, 34, 31, 92, 96, 93, 95, 94, 91};
    const int color = kColors[static_cast<std::size_t>(rank) % kColors.size()];
    return fmt::format("\x1b[{}m{}\x1b[0m", color, prefix);
}

}  // namespace ddprun
