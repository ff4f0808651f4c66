#include "launcher/guard/job_mark.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/os/process_tree.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun {
namespace {

/// "DD" above 48 bits of the job's id: below "unlimited", above any real limit.
constexpr std::uint64_t kMarkSign = std::uint64_t{0x4444} << 48;
constexpr std::size_t kMarkDigits = 12;
constexpr std::string_view kLimitName = "Max file locks";

bool is_mark(std::uint64_t limit) { return (limit >> 48) == (kMarkSign >> 48); }

/// The rest of the first entry that starts so; nullopt: none does.
std::optional<std::string_view> rest_of_entry(std::string_view environment, std::string_view start) {
    while (!environment.empty()) {
        const std::size_t end = std::min(environment.find('\0'), environment.size());
        const std::string_view entry = environment.substr(0, end);
        if (entry.starts_with(start)) return entry.substr(start.size());
        environment.remove_prefix(std::min(end + 1, environment.size()));
    }
    return std::nullopt;
}

bool has_variable(std::string_view environment, std::string_view variable) {
    const std::size_t name = variable.find('=') + 1;
    return rest_of_entry(environment, variable.substr(0, name)) == variable.substr(name);
}

/// The soft limit in "Max file locks            unlimited            unlimited            locks"; 0: no
/// number.
std::uint64_t lock_limit_in(std::string_view limits) {
    const std::size_t at = limits.find(kLimitName);
    if (at == std::string_view::npos) return 0;
    const std::string_view rest = trim(limits.substr(at + kLimitName.size()));
    return parse_uint(rest.substr(0, rest.find_first_of(" \n"))).value_or(0);
}

/// The text of /proc/<pid>/<file>; empty when the process is gone or not ours to read.
std::string text_of(pid_t pid, const char* file) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    const UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
    std::string text;
    char piece[4096];
    ssize_t n = 0;
    while (fd && (n = ::read(fd.get(), piece, sizeof piece)) > 0)
        text.append(piece, static_cast<std::size_t>(n));
    return text;
}

std::vector<pid_t> marked_in_proc(const JobMark& mark) {
    std::vector<pid_t> found;
    for (const pid_t pid : os::process_numbers()) {
        if (pid == 1 || !is_marked(mark, text_of(pid, "environ"), text_of(pid, "limits"))) continue;
        if (!proc_stat_of(pid).value_or(ProcStat{'X'}).is_dead()) found.push_back(pid);
    }
    return found;
}

/// The real user id, from the text of /proc/<pid>/status.
uid_t user_in(std::string_view status) {
    constexpr std::string_view kName = "\nUid:";
    const std::size_t at = status.find(kName);
    if (at == std::string_view::npos) return static_cast<uid_t>(-1);
    const std::string_view rest = trim(status.substr(at + kName.size()));
    return static_cast<uid_t>(parse_uint(rest.substr(0, rest.find_first_of("\t \n"))).value_or(0xffffffff));
}

/// True when the process has ended and was not reaped; always false before Linux 5.3.
bool is_zombie(pid_t pid) {
    const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    pollfd ended{process.get(), POLLIN, 0};
    return process && ::poll(&ended, 1, 0) == 1;
}

/// For hosts without /proc: asks the kernel about every possible process number, which takes up to a second.
std::vector<pid_t> marked_by_limit(std::uint64_t wanted) {
    constexpr std::int64_t kHighest = 1 << 22;  // PID_MAX_LIMIT
    const std::string said = read_file("/proc/sys/kernel/pid_max", 64).value_or("");
    const std::int64_t end = parse_int_between(trim(said), 1, kHighest).value_or(kHighest);
    std::vector<pid_t> found;
    rlimit limit{};
    for (pid_t pid = 2; wanted != 0 && pid < end; ++pid) {
        const bool is_known = ::prlimit(pid, RLIMIT_LOCKS, nullptr, &limit) == 0;
        if (is_known && limit.rlim_cur == wanted && !is_zombie(pid)) found.push_back(pid);
    }
    return found;
}

}  // namespace

JobMark make_job_mark(std::string_view id, std::uint64_t own_lock_limit) {
    JobMark mark{fmt::format("DDPRUN_JOB={}", id), 0};
    if (is_mark(own_lock_limit)) return mark;
    std::uint64_t number = 0;
    for (const char digit : id.substr(0, kMarkDigits)) {
        number = number * 16 + static_cast<std::uint64_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
    mark.lock_limit = kMarkSign | number;
    return mark;
}

std::uint64_t own_lock_limit() {
    rlimit limit{};
    return ::getrlimit(RLIMIT_LOCKS, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

bool is_marked(const JobMark& mark, std::string_view environ_text, std::string_view limits_text) {
    return has_variable(environ_text, mark.variable) ||
           (mark.lock_limit != 0 && lock_limit_in(limits_text) == mark.lock_limit);
}

bool is_marked(const WorkerMark& mark, std::string_view environ_text) {
    const std::optional<std::string_view> generation = rest_of_entry(environ_text, "DDPRUN_GENERATION=");
    return !mark.error_path.empty() && has_variable(environ_text, mark.job.variable) &&
           has_variable(environ_text, "TORCHELASTIC_ERROR_FILE=" + mark.error_path) && generation &&
           parse_uint(*generation).value_or(mark.generation + 1) <= mark.generation;
}

std::vector<pid_t> marked_among(const std::vector<pid_t>& processes, const WorkerMark& mark) {
    std::vector<pid_t> found;
    std::ranges::copy_if(processes, std::back_inserter(found),
                         [&](pid_t pid) { return is_marked(mark, text_of(pid, "environ")); });
    return found;
}

std::string job_in_limits(std::string_view limits_text) {
    const std::uint64_t limit = lock_limit_in(limits_text);
    return is_mark(limit) ? fmt::format("{:0{}x}", limit ^ kMarkSign, kMarkDigits) : "";
}

std::vector<MarkedProcess> processes_of_all_jobs() {
    std::vector<MarkedProcess> found;
    if (!has_own_proc()) return found;
    for (const pid_t pid : os::process_numbers()) {
        const std::string job = job_in_limits(text_of(pid, "limits"));
        const std::optional<ProcStat> stat = job.empty() ? std::nullopt : proc_stat_of(pid);
        if (stat && !stat->is_dead())
            found.push_back({pid, stat->parent, user_in(text_of(pid, "status")), job});
    }
    return found;
}

std::vector<pid_t> marked_processes(const JobMark& mark) {
    std::vector<pid_t> found = has_own_proc() ? marked_in_proc(mark) : marked_by_limit(mark.lock_limit);
    std::erase(found, ::getpid());
    return found;
}

int kill_marked_processes(const JobMark& mark) {
    int found = 0;
    for (const pid_t pid : marked_processes(mark)) {
        if (::kill(pid, SIGKILL) == 0) ++found;
    }
    return found;
}

}  // namespace ddprun
