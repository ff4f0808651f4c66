#include "launcher/guard/job_mark.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

#include "env/os/proc_stat.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun {
namespace {

/// "DD" above 48 bits of the job's id: below "unlimited", above whatever anybody has set in earnest.
constexpr std::uint64_t kMarkSign = std::uint64_t{0x4444} << 48;
constexpr std::size_t kMarkDigits = 12;
constexpr std::string_view kLimitName = "Max file locks";

bool is_mark(std::uint64_t limit) { return (limit >> 48) == (kMarkSign >> 48); }

bool has_variable(std::string_view environment, std::string_view variable) {
    while (!environment.empty()) {
        const std::size_t end = environment.find('\0');
        if (environment.substr(0, end) == variable) return true;
        if (end == std::string_view::npos) break;
        environment.remove_prefix(end + 1);
    }
    return false;
}

/// "Max file locks            unlimited            unlimited            locks": the soft one is meant.
bool has_limit(std::string_view limits, std::uint64_t wanted) {
    const std::size_t at = limits.find(kLimitName);
    if (wanted == 0 || at == std::string_view::npos) return false;
    const std::string_view rest = trim(limits.substr(at + kLimitName.size()));
    const Result<std::uint64_t> soft = parse_uint(rest.substr(0, rest.find_first_of(" \n")));
    return soft && *soft == wanted;
}

/// Empty when the process is gone or not ours to read.
std::string text_of(const char* pid, const char* file) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%s/%s", pid, file);
    const UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
    std::string text;
    char piece[4096];
    ssize_t n = 0;
    while (fd && (n = ::read(fd.get(), piece, sizeof piece)) > 0) text.append(piece, static_cast<std::size_t>(n));
    return text;
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
    return has_variable(environ_text, mark.variable) || has_limit(limits_text, mark.lock_limit);
}

int kill_marked_processes(const JobMark& mark) {
    DIR* proc = ::opendir("/proc");
    if (proc == nullptr) return 0;
    int found = 0;
    while (const dirent* entry = ::readdir(proc)) {
        const pid_t pid = std::atoi(entry->d_name);
        if (pid <= 1 || pid == ::getpid()) continue;
        if (!is_marked(mark, text_of(entry->d_name, "environ"), text_of(entry->d_name, "limits"))) continue;
        if (os::proc_stat_of(pid).value_or(os::ProcStat{'X'}).is_dead()) continue;
        if (::kill(pid, SIGKILL) == 0) ++found;
    }
    ::closedir(proc);
    return found;
}

}  // namespace ddprun
