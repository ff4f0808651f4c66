#include "launcher/death_facts.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "env/file.h"
#include "env/text.h"
#include "launcher/walltime.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxSystemFile = 64 * 1024;
constexpr std::size_t kMaxKernelLines = 4096;  ///< read after one death
/// A limit above any machine's memory is how version 1 says "none".
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
constexpr Duration kNearWalltime = std::chrono::seconds(90);

std::string oom_text(const DeathFacts& facts, const std::optional<OomKill>& kill) {
    const std::string held = kill && kill->rss_bytes > 0 ? fmt::format(" (it held {})", format_bytes(kill->rss_bytes)) : "";
    if (kill && !kill->by_cgroup) return fmt::format("out of memory: the node had none left and the kernel killed it{}", held);
    if (facts.memory_limit) return fmt::format("out of memory: the cgroup's limit of {} was hit{}", format_bytes(*facts.memory_limit), held);
    return fmt::format("out of memory: the kernel killed a process of this cgroup{}", held);
}

std::string explain_kill(const DeathFacts& facts) {
    for (const std::string& line : facts.kernel_lines) {
        const std::optional<OomKill> kill = parse_oom_kill(line);
        if (kill && kill->pid == facts.pid) return oom_text(facts, kill);
    }
    return facts.cgroup_oom_kills > 0 ? oom_text(facts, std::nullopt) : "";
}

std::string explain_bus_error(const DeathFacts& facts) {
    if (!facts.shm_free || !facts.shm_size || *facts.shm_size == 0 || *facts.shm_free > *facts.shm_size / 64) return "";
    return fmt::format("/dev/shm is full ({} of {} free): shared memory could not be given to it",
                       format_bytes(*facts.shm_free), format_bytes(*facts.shm_size));
}

/// The text behind `key` up to one of `ends`; "" when the key is not there.
std::string_view text_behind(std::string_view line, std::string_view key, std::string_view ends) {
    const std::size_t at = line.find(key);
    if (at == std::string_view::npos) return {};
    const std::string_view rest = line.substr(at + key.size());
    return rest.substr(0, rest.find_first_of(ends));
}

}  // namespace

std::string explain_death(const DeathFacts& facts) {
    if (facts.signal == SIGKILL) {
        if (std::string text = explain_kill(facts); !text.empty()) return text;
    }
    if (facts.signal == SIGBUS) {
        if (std::string text = explain_bus_error(facts); !text.empty()) return text;
    }
    const bool from_outside = facts.signal == SIGKILL || facts.signal == SIGTERM;
    if (from_outside && facts.walltime_left && *facts.walltime_left < kNearWalltime) {
        return "the scheduler's walltime was over: it ends the job's processes";
    }
    return "";
}

std::optional<OomKill> parse_oom_kill(std::string_view line) {
    const std::string_view pid = text_behind(line, "Killed process ", " (,");
    const Result<std::int64_t> number = parse_int(pid);
    if (!number) return std::nullopt;
    OomKill kill;
    kill.pid = static_cast<pid_t>(*number);
    kill.by_cgroup = line.find("Memory cgroup out of memory") != std::string_view::npos;
    kill.program = text_behind(line, "(", ")");
    for (const std::string_view part : {"anon-rss:", "file-rss:", "shmem-rss:"}) {
        kill.rss_bytes += parse_uint(text_behind(line, part, "k")).value_or(0) * 1024;
    }
    return kill;
}

std::optional<std::uint64_t> parse_counter(std::string_view text, std::string_view key) {
    for (const std::string_view line : split(text, '\n')) {
        if (!line.starts_with(key) || line.substr(key.size(), 1) != " ") continue;
        if (const Result<std::uint64_t> value = parse_uint(trim(line.substr(key.size())))) return *value;
    }
    return std::nullopt;
}

std::optional<std::uint64_t> parse_memory_limit(std::string_view text) {
    const Result<std::uint64_t> limit = parse_uint(trim(text));
    if (!limit || *limit >= kNoLimit) return std::nullopt;
    return *limit;
}

std::optional<MemoryCgroup> parse_memory_cgroup(std::string_view text) {
    std::optional<MemoryCgroup> unified;
    for (const std::string_view line : split(text, '\n')) {
        const std::size_t first = line.find(':');
        const std::size_t second = line.find(':', first + 1);
        if (first == std::string_view::npos || second == std::string_view::npos) continue;
        const std::string_view controllers = line.substr(first + 1, second - first - 1);
        const std::string path(line.substr(second + 1));
        for (const std::string_view controller : split(controllers, ',')) {
            // Where both are mounted, the memory controller is with version 1.
            if (controller == "memory") return MemoryCgroup{false, path};
        }
        if (line.starts_with("0::")) unified = MemoryCgroup{true, path};
    }
    return unified;
}

// ---- gathering

namespace {

/// Files of the cgroup and of those above it, up to the mount point: a limit may be set at any of them.
std::vector<std::string> directories_of(const MemoryCgroup& cgroup) {
    const std::string root = cgroup.version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::vector<std::string> all;
    for (std::string path = cgroup.path; path.size() > 1; path.erase(path.rfind('/'))) all.push_back(root + path);
    all.push_back(root);  // in a container its own cgroup may be mounted here
    return all;
}

std::string content_of(const std::string& path) { return read_file(path, kMaxSystemFile).value_or(""); }

}  // namespace

DeathWitness::DeathWitness()
    : cgroup_(parse_memory_cgroup(content_of("/proc/self/cgroup"))),
      kernel_log_(::open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (kernel_log_) ::lseek(kernel_log_.get(), 0, SEEK_END);
    oom_kills_seen_ = oom_kills();
}

std::uint64_t DeathWitness::oom_kills() const {
    if (!cgroup_) return 0;
    const char* const file = cgroup_->version2 ? "/memory.events" : "/memory.oom_control";
    for (const std::string& directory : directories_of(*cgroup_)) {
        if (const auto count = parse_counter(content_of(directory + file), "oom_kill")) return *count;
    }
    return 0;
}

std::optional<std::uint64_t> DeathWitness::memory_limit() const {
    if (!cgroup_) return std::nullopt;
    const char* const file = cgroup_->version2 ? "/memory.max" : "/memory.limit_in_bytes";
    std::optional<std::uint64_t> tightest;
    for (const std::string& directory : directories_of(*cgroup_)) {
        const auto limit = parse_memory_limit(content_of(directory + file));
        if (limit && (!tightest || *limit < *tightest)) tightest = limit;
    }
    return tightest;
}

std::vector<std::string> DeathWitness::new_kernel_lines() {
    std::vector<std::string> lines;
    char record[8192];
    for (std::size_t i = 0; kernel_log_ && i < kMaxKernelLines; ++i) {
        const ssize_t n = ::read(kernel_log_.get(), record, sizeof record);
        if (n < 0 && errno == EPIPE) continue;  // records were overwritten before we read them
        if (n <= 0) break;
        const std::string_view text(record, static_cast<std::size_t>(n));
        if (text.find("Killed process") != std::string_view::npos) lines.emplace_back(text.substr(text.find(';') + 1));
    }
    return lines;
}

DeathFacts DeathWitness::facts(pid_t pid, int signal) {
    DeathFacts facts;
    facts.pid = pid;
    facts.signal = signal;
    if (signal == SIGKILL) {
        const std::uint64_t kills = oom_kills();
        facts.cgroup_oom_kills = kills > oom_kills_seen_ ? kills - oom_kills_seen_ : 0;
        oom_kills_seen_ = kills;
        facts.memory_limit = memory_limit();
        facts.kernel_lines = new_kernel_lines();
    }
    struct statvfs shm {};
    if (signal == SIGBUS && ::statvfs("/dev/shm", &shm) == 0) {
        facts.shm_free = std::uint64_t{shm.f_bavail} * shm.f_frsize;
        facts.shm_size = std::uint64_t{shm.f_blocks} * shm.f_frsize;
    }
    facts.walltime_left = walltime_left();
    return facts;
}

}  // namespace ddprun
