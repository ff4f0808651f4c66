#include "launcher/node/told_scalars.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "env/text.h"

namespace ddprun {
namespace {

/// Also "nan" and "inf": a loss may be.
std::optional<double> parse_number(std::string_view text) {
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return number;
}

std::optional<ToldScalar> decode_line(std::string_view line) {
    std::string_view words[3];
    for (std::string_view& word : words) {
        const std::size_t space = line.find(' ');
        if (space == std::string_view::npos) return std::nullopt;
        word = line.substr(0, space);
        line.remove_prefix(space + 1);
    }
    const Result<std::uint64_t> step = parse_uint(words[0]);
    const std::optional<double> time = parse_number(words[1]), value = parse_number(words[2]);
    if (!step || !time || !value || line.empty()) return std::nullopt;
    return ToldScalar{*step, *time, *value, std::string(line)};
}

}  // namespace

std::vector<ToldScalar> take_scalars(ScalarRing& ring, std::size_t most) {
    const std::uint64_t written = ring.written.load(std::memory_order_acquire);
    const std::uint64_t names =
        std::min<std::uint64_t>(ring.tag_count.load(std::memory_order_acquire), kScalarTags);
    std::uint64_t next = ring.taken.load(std::memory_order_relaxed);
    if (written - next > kScalarRecords) next = written - kScalarRecords;  // also when `written` is nonsense
    std::vector<ToldScalar> taken;
    for (; next != written && taken.size() < most; ++next) {
        ScalarRecord& record = ring.records[next % kScalarRecords];
        // An atomic load is done once: the tag that is tested is the one that is used.
        const std::uint64_t tag = std::atomic_ref(record.tag).load(std::memory_order_relaxed);
        if (tag >= names) continue;
        char name[kScalarTagBytes];
        std::memcpy(name, ring.tags[tag], sizeof name);
        std::string text = printable({name, ::strnlen(name, sizeof name)});
        if (!text.empty()) taken.push_back({record.step, record.time, record.value, std::move(text)});
    }
    ring.taken.store(next, std::memory_order_release);
    return taken;
}

std::string encode_scalars(const std::vector<ToldScalar>& scalars) {
    std::string lines;
    for (const ToldScalar& scalar : scalars)
        lines += fmt::format("{} {} {} {}\n", scalar.step, scalar.time, scalar.value, scalar.name);
    return lines;
}

std::vector<ToldScalar> decode_scalars(std::string_view lines) {
    std::vector<ToldScalar> scalars;
    for (const std::string_view line : split(lines, '\n')) {
        if (std::optional<ToldScalar> scalar = decode_line(line)) scalars.push_back(*std::move(scalar));
    }
    return scalars;
}

}  // namespace ddprun
