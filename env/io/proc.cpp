#include "env/io/proc.h"

#include <fmt/core.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

pid_t read_number_in_proc() {
    char text[32] = {};
    return ::readlink("/proc/self", text, sizeof text - 1) > 0 ? std::atoi(text) : 0;
}

/// Our pid in /proc; 0 when /proc does not tell. Read once for a process, because ddprun asks several times
/// for each worker; a fork, whose /proc may be another, asks again.
pid_t number_in_proc() {
    static std::atomic<std::uint64_t> known{0};  // our pid above the number
    const auto pid = static_cast<std::uint32_t>(::getpid());
    std::uint64_t pair = known.load(std::memory_order_relaxed);
    if (pair >> 32 != pid) {
        pair = std::uint64_t{pid} << 32 | static_cast<std::uint32_t>(read_number_in_proc());
        known.store(pair, std::memory_order_relaxed);
    }
    return static_cast<pid_t>(pair & 0xffffffffU);
}

}  // namespace

bool has_own_proc() { return number_in_proc() == ::getpid(); }

const std::string& own_proc() {
    // A file can have nothing below it.
    static const std::string proc = "/proc", nothing = "/dev/null";
    return has_own_proc() ? proc : nothing;
}

pid_t own_number_in_proc() {
    const pid_t number = number_in_proc();
    return number > 0 ? number : ::getpid();
}

std::string boot_id() {
    return std::string(trim(read_file("/proc/sys/kernel/random/boot_id", 128).value_or("")));
}

namespace {

constexpr std::size_t kMaxStat = 16 * 1024;
/// Fields after the name, counted from 0: proc(5)'s number less 3.
enum Field : std::size_t {
    kState = 0,
    kParent = 1,
    kUser = 11,
    kSystem = 12,
    kChildUser = 13,
    kChildSystem = 14,
    kThreads = 17,
    kStart = 19,
    kRss = 21
};

}  // namespace

std::optional<ProcStat> parse_proc_stat(std::string_view text) {
    // "17 (name) S 4 ...": the name can hold blanks and parentheses, so count from its last one.
    const std::size_t name_end = text.rfind(')');
    if (name_end == std::string_view::npos) return std::nullopt;
    const std::vector<std::string_view> fields = split(trim(text.substr(name_end + 1)), ' ');
    if (fields.size() <= kRss || fields[kState].size() != 1) return std::nullopt;
    const Result<std::int64_t> parent = parse_int_between(fields[kParent], 0, 0x7fffffff);
    if (!parent) return std::nullopt;
    ProcStat stat{fields[kState][0], static_cast<pid_t>(*parent)};
    // Children's times are signed numbers, but never negative.
    bool complete = true;
    const auto number = [&](Field field) {
        Result<std::uint64_t> value = parse_uint(fields[field]);
        complete = complete && value;
        return std::move(value).value_or(0);
    };
    stat.threads = number(kThreads);
    stat.ticks = number(kUser) + number(kSystem);
    stat.child_ticks = number(kChildUser) + number(kChildSystem);
    stat.rss_pages = number(kRss);
    stat.start_ticks = number(kStart);
    return complete ? std::optional(stat) : std::nullopt;
}

std::optional<ProcStat> proc_stat_of(pid_t pid, const std::string& proc) {
    const Result<std::string> text = read_file(fmt::format("{}/{}/stat", proc, pid), kMaxStat);
    return text ? parse_proc_stat(*text) : std::nullopt;
}

bool is_dumping_core(pid_t pid) {
    const Result<std::string> text = read_file(fmt::format("{}/{}/status", own_proc(), pid), kMaxStat);
    return text && text->find("CoreDumping:\t1") != std::string::npos;
}

}  // namespace ddprun
