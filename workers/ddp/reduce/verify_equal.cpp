#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "ddp/ddp.h"
#include "env/hmac.h"
#include "env/text.h"

namespace ddp {
namespace {

/// Longest value shown; one line must hold two.
constexpr std::size_t kShownBytes = 200;

/// Includes every length, so that different lists differ.
std::string digest_of(std::span<const NamedValue> values) {
    std::string text;
    for (const NamedValue& one : values)
        text += fmt::format("{} {} {}{}", one.name.size(), one.value.size(), one.name, one.value);
    return ddprun::to_hex(ddprun::hmac_sha256("ddprun", text));
}

bool all_equal(const std::vector<std::string>& texts) {
    return std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0]; });
}

std::string shown(std::string_view value) {
    if (value.empty()) return "empty";
    return ddprun::excerpt(value, kShownBytes);
}

/// "0.1 on rank 2, 0.02 on rank 0": the first other value with all its ranks, and rank 0's.
std::string both_values(const std::vector<std::string>& texts) {
    const auto other =
        std::find_if(texts.begin(), texts.end(), [&](const auto& text) { return text != texts[0]; });
    std::vector<int> others;
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        if (texts[rank] == *other) others.push_back(static_cast<int>(rank));
    }
    return fmt::format("{} on rank{} {}, {} on rank 0", shown(*other), others.size() == 1 ? "" : "s",
                       ddprun::format_ranges(others), shown(texts[0]));
}

/// Every rank has seen that the lists differ, so all take part in locating the difference.
[[noreturn]] void throw_difference(ProcessGroup& group, std::span<const NamedValue> values) {
    const std::vector<std::string> counts = group.all_gather_bytes(fmt::format("{}", values.size()));
    if (!all_equal(counts))
        throw MismatchError(fmt::format("verify_equal: the number of values is {}", both_values(counts)));
    for (const NamedValue& one : values) {
        const std::vector<std::string> names = group.all_gather_bytes(one.name);
        if (!all_equal(names))
            throw MismatchError(fmt::format("verify_equal: the name of a value is {}", both_values(names)));
        const std::vector<std::string> all = group.all_gather_bytes(one.value);
        if (!all_equal(all)) throw MismatchError(fmt::format("{} is {}", shown(one.name), both_values(all)));
    }
    throw MismatchError("verify_equal: the values changed while they were compared");
}

}  // namespace

void verify_equal(ProcessGroup& group, std::span<const NamedValue> values) {
    if (!all_equal(group.all_gather_bytes(digest_of(values)))) throw_difference(group, values);
}

void verify_equal(ProcessGroup& group, std::initializer_list<NamedValue> values) {
    verify_equal(group, std::span(values.begin(), values.size()));
}

void verify_equal(ProcessGroup& group, std::string_view name, std::string_view value) {
    verify_equal(group, {NamedValue{std::string(name), std::string(value)}});
}

}  // namespace ddp
