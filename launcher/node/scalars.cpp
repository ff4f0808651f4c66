#include "launcher/node/scalars.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "env/text.h"

namespace ddprun {
namespace {

constexpr Duration kScalarPause = std::chrono::seconds(1);
constexpr std::size_t kScalarsInMessage = 1024;

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

bool ScalarSender::reads() const {
    return !config_.spec.tensorboard.empty() && workers_.order.first_rank == 0 &&
           workers_.segment != nullptr && workers_.segment->scalars(0) != nullptr;
}

void ScalarSender::begin_segment() {
    if (reads()) workers_.segment->scalars(0)->is_read.store(1, std::memory_order_release);
}

void ScalarSender::send_later() {
    if (!reads()) return;
    loop_.cancel(timer_);
    timer_ = loop_.call_after(kScalarPause, [this] {
        send();
        send_later();
    });
}

void ScalarSender::send() {
    if (!reads()) return;
    for (std::size_t sent = 0; sent < kScalarRecords; sent += kScalarsInMessage) {
        const std::vector<ToldScalar> scalars =
            take_scalars(*workers_.segment->scalars(0), kScalarsInMessage);
        if (!scalars.empty())
            send_(rdzv::WorkerScalars{workers_.order.generation, rdzv::Blob(encode_scalars(scalars))});
        if (scalars.size() < kScalarsInMessage) return;
    }
}

void ScalarSender::end() {
    if (!reads()) return;
    loop_.cancel(timer_);
    send();
    if (const std::uint64_t lost = workers_.segment->scalars(0)->lost.load(std::memory_order_relaxed);
        lost > 0)
        log_.warning(
            "--tensorboard: {} scalars of rank 0 are lost: it told more than {} in a second, or of "
            "more than {} names",
            lost, kScalarRecords, kScalarTags);
}

}  // namespace ddprun
