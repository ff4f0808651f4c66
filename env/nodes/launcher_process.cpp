#include "env/nodes/launcher_process.h"

#include <fmt/core.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include "env/io/proc.h"

namespace ddprun {

namespace {

struct Stat {
    pid_t parent = 0;
    std::string start_time;
};

/// The name in parentheses may hold anything, so fields count from the last one.
Stat read_stat(pid_t pid) {
    std::ifstream file(fmt::format("{}/{}/stat", own_proc(), pid));
    std::string text{std::istreambuf_iterator<char>(file), {}};
    const std::size_t close = text.rfind(')');
    if (close == std::string::npos) return {};
    std::istringstream rest(text.substr(close + 1));
    const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
    constexpr std::size_t kParent = 1, kStartTime = 19;  // proc(5): fields 4 and 22
    if (fields.size() <= kStartTime) return {};
    return {static_cast<pid_t>(std::stol(fields[kParent])), fields[kStartTime]};
}

/// What cannot be read belongs to somebody else: a daemon.
bool has_variable(pid_t pid, std::string_view name) {
    std::ifstream file(fmt::format("{}/{}/environ", own_proc(), pid));
    const std::string wanted = std::string(name) + "=";
    for (std::string entry; std::getline(file, entry, '\0');) {
        if (entry.starts_with(wanted)) return true;
    }
    return false;
}

}  // namespace

std::string launcher_process(std::string_view rank_variable) {
    pid_t pid = ::getppid();
    Stat stat = read_stat(pid);
    while (stat.parent > 1 && has_variable(pid, rank_variable)) {
        pid = stat.parent;
        stat = read_stat(pid);
    }
    return fmt::format("{}-{}", pid, stat.start_time);
}

}  // namespace ddprun
