#include "env/os/process_tree.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <unordered_map>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/text.h"

namespace ddprun::os {
namespace {

constexpr std::size_t kMaxProcFile = std::size_t{1} << 20;

using ChildrenOf = std::function<std::vector<pid_t>(pid_t)>;

/// Collects the processes level by level and reverses them, so that every process comes before its parent.
std::vector<pid_t> children_first(pid_t root, const ChildrenOf& children_of) {
    // A tree that changes while it is read could, with reused pids, show a loop.
    constexpr std::size_t kMaxProcesses = std::size_t{1} << 22;
    std::vector<pid_t> found{root};
    for (std::size_t at = 0; at < found.size() && found.size() < kMaxProcesses; ++at) {
        const std::vector<pid_t> children = children_of(found[at]);
        found.insert(found.end(), children.begin(), children.end());
    }
    found.erase(found.begin());
    std::reverse(found.begin(), found.end());
    return found;
}

/// nullopt when the kernel has no such list, or the thread has ended.
std::optional<std::vector<pid_t>> children_of_thread(pid_t pid, pid_t thread, const std::string& proc) {
    const Result<std::string> text =
        read_file(fmt::format("{}/{}/task/{}/children", proc, pid, thread), kMaxProcFile);
    if (!text) return std::nullopt;
    std::vector<pid_t> children;
    for (const std::string_view piece : split(*text, ' ')) {
        const Result<std::int64_t> child = parse_int_between(trim(piece), 1, 0x7fffffff);
        if (child) children.push_back(static_cast<pid_t>(*child));
    }
    return children;
}

}  // namespace

std::vector<pid_t> descendants_of(pid_t root, const std::string& proc) {
    std::optional<std::vector<pid_t>> listed = descendants_from_children_lists(root, proc);
    return listed ? *std::move(listed) : descendants_from_parents(root, proc);
}

std::vector<pid_t> process_numbers(const std::string& proc) { return numbers_in(proc); }

std::optional<std::vector<pid_t>> descendants_from_children_lists(pid_t root, const std::string& proc) {
    const std::optional<std::vector<pid_t>> first = children_of_thread(root, root, proc);
    if (!first) return std::nullopt;
    std::vector<pid_t> found = children_first(root, [&](pid_t pid) {
        std::vector<pid_t> children;
        for (const pid_t thread : numbers_in(fmt::format("{}/{}/task", proc, pid))) {
            const auto some = thread == root ? first : children_of_thread(pid, thread, proc);
            if (some) children.insert(children.end(), some->begin(), some->end());
        }
        return children;
    });
    std::erase_if(found, [&](pid_t pid) {
        const std::optional<ProcStat> stat = proc_stat_of(pid, proc);
        return !stat || stat->is_dead();
    });
    return found;
}

std::vector<pid_t> descendants_from_parents(pid_t root, const std::string& proc) {
    std::unordered_map<pid_t, std::vector<pid_t>> children;
    for (const pid_t pid : numbers_in(proc)) {
        const std::optional<ProcStat> stat = proc_stat_of(pid, proc);
        if (stat && !stat->is_dead()) children[stat->parent].push_back(pid);
    }
    return children_first(root, [&](pid_t pid) { return children[pid]; });
}

}  // namespace ddprun::os
