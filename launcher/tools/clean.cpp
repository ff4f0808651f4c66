#include "launcher/tools/commands.h"

#include <fmt/core.h>
#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/guard/job_directory.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxTable = 16 << 20;
constexpr int kFailed = 1;

/// Gives this process the rights of `user`, and no others.
Status become(const std::string& user) {
    if (user.empty()) return {};
    const Result<std::int64_t> number = parse_int_between(user, 0, 0x7fffffff);
    const passwd* const entry = number ? ::getpwuid(static_cast<uid_t>(*number)) : ::getpwnam(user.c_str());
    if (entry == nullptr && !number) return Error::invalid(fmt::format("--user: there is no user {}", user));
    // A user of a container, or of a deleted account, has a number only.
    const uid_t uid = entry != nullptr ? entry->pw_uid : static_cast<uid_t>(*number);
    const gid_t gid = entry != nullptr ? entry->pw_gid : uid;
    if (uid == ::geteuid()) return {};
    if (::geteuid() != 0) return Error::invalid("--user: only root may remove what another user's jobs left");
    const bool has_groups =
        (entry != nullptr ? ::initgroups(entry->pw_name, gid) : ::setgroups(0, nullptr)) == 0;
    const bool is_done = has_groups && ::setgid(gid) == 0 && ::setuid(uid) == 0;
    return is_done ? Status() : Status(Error::system("--user: become " + user));
}

std::string proc_text(pid_t pid, std::string_view file) {
    return read_file(fmt::format("{}/{}/{}", own_proc(), pid, file), kMaxTable).value_or("");
}

void add_jobs(const std::string& proc_net_unix, LiveJobs& live) {
    for (RunningJob& job : jobs_in(proc_net_unix)) live.ids.push_back(std::move(job.id));
}

/// The caller lists the processes first, because a ddprun opens its socket before it starts workers.
LiveJobs find_live_jobs(const std::vector<MarkedProcess>& all, const std::vector<std::string>& cgroups) {
    LiveJobs live;
    add_jobs(read_file("/proc/net/unix", kMaxTable).value_or(""), live);
    std::set<pid_t> adopters;
    for (const MarkedProcess& process : all) adopters.insert(adopter_of(process, all));
    for (const pid_t adopter : adopters) {
        add_jobs(proc_text(adopter, "net/unix"), live);  // it may be in another network namespace
        if (trim(proc_text(adopter, "comm")) == "ddprun") live.ddpruns.push_back(adopter);
    }
    for (const std::string& cgroup : cgroups) {
        if (!is_abandoned_cgroup(cgroup)) live.ids.push_back(cgroup.substr(cgroup.rfind('-') + 1));
    }
    return live;
}

std::vector<std::string> cgroups_of_this_user() {
    std::vector<std::string> found;
    for (const std::string& root :
         cgroup2_mounts(read_file("/proc/self/mountinfo", kMaxTable).value_or(""))) {
        for (std::string& path : find_job_cgroups(root)) found.push_back(std::move(path));
    }
    return found;
}

std::vector<MarkedProcess> find_abandoned(const std::vector<std::string>& cgroups) {
    const std::vector<MarkedProcess> all = processes_of_all_jobs();
    std::vector<MarkedProcess> found = abandoned_processes(all, find_live_jobs(all, cgroups));
    std::erase_if(found, [](const MarkedProcess& process) {
        return process.user != ::getuid() || process.pid == ::getpid();
    });
    return found;
}

/// Names such as "4171 python3", by job.
using NamesByJob = std::map<std::string, std::set<std::string>>;

void add_names(const std::vector<MarkedProcess>& processes, NamesByJob& names) {
    for (const MarkedProcess& process : processes) {
        names[process.job].insert(
            fmt::format("{} {}", process.pid, printable(trim(proc_text(process.pid, "comm")))));
    }
}

/// Kills the abandoned processes until two searches in a row find nothing (a process can fork meanwhile).
/// Returns those that are left after five seconds.
std::vector<MarkedProcess> end_processes(const std::vector<std::string>& cgroups, NamesByJob& ended) {
    const timespec pause{0, 5'000'000};
    std::vector<MarkedProcess> left;
    int quiet = 0;
    for (int look = 0; look < 1000 && quiet < 2; ++look) {
        left = find_abandoned(cgroups);
        add_names(left, ended);
        for (const MarkedProcess& process : left) ::kill(process.pid, SIGKILL);
        quiet = left.empty() ? quiet + 1 : 0;
        if (quiet < 2) ::nanosleep(&pause, nullptr);
    }
    return left;
}

/// All directories in which a ddprun of this user makes job directories.
std::set<std::string> places_of_job_directories() {
    std::error_code none;
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(none);
    return {"/dev/shm", "/tmp", none ? "/tmp" : temporary.lexically_normal().string()};
}

void show_processes(const NamesByJob& by_job, std::string_view done) {
    for (const auto& [job, names] : by_job) {
        ddprun::print("{} {} of job {}: {}\n", done,
                      names.size() == 1 ? "1 process" : fmt::format("{} processes", names.size()), job,
                      join(std::vector<std::string>(names.begin(), names.end()), ", "));
    }
}

/// Returns how many lines were printed.
std::size_t show_remains(const std::vector<std::string>& cgroups) {
    NamesByJob names;
    add_names(find_abandoned(cgroups), names);
    show_processes(names, "would end");
    std::size_t shown = names.size();
    const auto show = [&](const std::string& path) {
        ddprun::print("would remove {}\n", printable(path));
        ++shown;
    };
    for (const std::string& path : cgroups) {
        if (is_abandoned_cgroup(path)) show(path);
    }
    for (const std::string& place : places_of_job_directories()) {
        for (const std::string& name : abandoned_job_directories(place)) show(place + "/" + name);
    }
    return shown;
}

}  // namespace

pid_t adopter_of(const MarkedProcess& process, const std::vector<MarkedProcess>& all) {
    pid_t parent = process.parent;
    for (std::size_t steps = 0; steps <= all.size();
         ++steps) {  // a tree that changes while it is read could show a loop
        const auto above = std::find_if(all.begin(), all.end(), [&](const MarkedProcess& one) {
            return one.pid == parent && one.job == process.job;
        });
        if (above == all.end()) return parent;
        parent = above->parent;
    }
    return 0;
}

std::vector<MarkedProcess> abandoned_processes(const std::vector<MarkedProcess>& all, const LiveJobs& live) {
    std::vector<MarkedProcess> found;
    for (const MarkedProcess& process : all) {
        const pid_t adopter = adopter_of(process, all);
        const bool has_ddprun = adopter == 0 || std::find(live.ddpruns.begin(), live.ddpruns.end(),
                                                          adopter) != live.ddpruns.end();
        const bool runs = std::any_of(live.ids.begin(), live.ids.end(),
                                      [&](const std::string& id) { return id.starts_with(process.job); });
        if (!has_ddprun && !runs) found.push_back(process);
    }
    return found;
}

int clean(const CleanOptions& options) {
    if (const Status became = become(options.user); !became) return complain("clean", became.error());
    const std::vector<std::string> cgroups = cgroups_of_this_user();
    if (!has_own_proc())
        ddprun::print(stderr,
                      "ddprun clean: /proc does not show this pid namespace: processes outside of cgroups "
                      "are not found\n");
    if (options.dry_run) {
        if (show_remains(cgroups) == 0) ddprun::print("nothing is left of killed jobs\n");
        return 0;
    }
    NamesByJob ended;
    const std::vector<MarkedProcess> left = end_processes(cgroups, ended);
    show_processes(ended, "ended");
    std::size_t shown = ended.size();
    int code = 0;
    for (const MarkedProcess& process : left) {
        ddprun::print(stderr, "ddprun clean: process {} of job {} cannot be ended\n", process.pid,
                      process.job);
        code = kFailed;
    }
    for (const std::string& path : cgroups) {
        if (!is_abandoned_cgroup(path)) continue;
        const bool is_gone = remove_abandoned_cgroup(path);
        if (is_gone) ddprun::print("removed {}\n", printable(path));
        else ddprun::print(stderr, "ddprun clean: {} cannot be removed\n", printable(path));
        if (!is_gone) code = kFailed;
        ++shown;
    }
    for (const std::string& place : places_of_job_directories()) {
        for (const std::string& name :
             remove_abandoned_job_directories(place, static_cast<std::size_t>(-1))) {
            ddprun::print("removed {}/{}\n", printable(place), name);
            ++shown;
        }
    }
    if (shown == 0) ddprun::print("nothing is left of killed jobs\n");
    return code;
}

}  // namespace ddprun
