#include "env/nodes/launcher_process.h"

#include <fmt/core.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "env/io/proc.h"
#include "env/io/proc_stat.h"

namespace ddprun {

namespace {

/// False also for a process that we may not read: a daemon of another user.
bool has_variable(pid_t pid, std::string_view name) {
    std::ifstream file(fmt::format("{}/{}/environ", own_proc(), pid));
    const std::string wanted = std::string(name) + "=";
    for (std::string entry; std::getline(file, entry, '\0');) {
        if (entry.starts_with(wanted)) return true;
    }
    return false;
}

struct Launcher {
    pid_t pid;
    ProcStat stat;
};
Launcher find_launcher(std::string_view rank_variable) {
    pid_t pid = ::getppid();
    ProcStat stat = proc_stat_of(pid).value_or(ProcStat{});
    while (stat.parent > 1 && has_variable(pid, rank_variable)) {
        pid = stat.parent;
        stat = proc_stat_of(pid).value_or(ProcStat{});
    }
    return {pid, stat};
}

}  // namespace

std::string launcher_process(std::string_view rank_variable) {
    const Launcher launcher = find_launcher(rank_variable);
    return fmt::format("{}-{}", launcher.pid, launcher.stat.start_ticks);
}

std::string hydra_job(std::string_view rank_variable) {
    std::ifstream file(fmt::format("{}/{}/cmdline", own_proc(), find_launcher(rank_variable).pid));
    std::string before;
    for (std::string word; std::getline(file, word, '\0'); before = word) {
        if (before == "--control-port") return word;
    }
    return "";
}

}  // namespace ddprun
