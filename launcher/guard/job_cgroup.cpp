#include "launcher/guard/job_cgroup.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <vector>

#include "env/io/file.h"
#include "env/os/spawn.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// The path after "0::", the entry of version 2.
std::optional<std::string_view> unified_path(std::string_view cgroup) {
    for (const std::string_view line : split(cgroup, '\n')) {
        if (line.starts_with("0::")) return line.substr(3);
    }
    return std::nullopt;
}

/// Undoes the escapes of mountinfo: "\040" for a blank and the like.
std::string unescaped(std::string_view text) {
    std::string plain;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const bool octal = text[i] == '\\' && i + 3 < text.size() &&
                           text.substr(i + 1, 3).find_first_not_of("01234567") == std::string_view::npos;
        if (!octal) {
            plain += text[i];
            continue;
        }
        plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
        i += 3;
    }
    return plain;
}

struct Mount {
    std::string root;  ///< the part of the hierarchy that is shown
    std::string point;
    bool read_only = false;
};

bool has_option(std::string_view options, std::string_view wanted) {
    const std::vector<std::string_view> all = split(options, ',');
    return std::find(all.begin(), all.end(), wanted) != all.end();
}

/// proc_pid_mountinfo(5): id parent device root point options [optional...] - type source super-options.
std::optional<Mount> cgroup2_mount(std::string_view line) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string_view::npos) return std::nullopt;
    const std::vector<std::string_view> before = split(line.substr(0, dash), ' ');
    const std::vector<std::string_view> behind = split(line.substr(dash + 3), ' ');
    if (before.size() < 6 || behind.size() < 3 || behind[0] != "cgroup2") return std::nullopt;
    return Mount{unescaped(before[3]), unescaped(before[4]),
                 has_option(before[5], "ro") || has_option(behind[2], "ro")};
}

/// The directory of `path` below the mount; nullopt: this mount shows another part of the tree.
std::optional<std::string> directory_in(const Mount& mount, std::string_view path) {
    if (path.find("/..") != std::string_view::npos) return std::nullopt;  // outside of our cgroup namespace
    if (mount.root == "/") return mount.point + (path == "/" ? "" : std::string(path));
    if (!path.starts_with(mount.root)) return std::nullopt;
    const std::string_view rest = path.substr(mount.root.size());
    if (!rest.empty() && rest[0] != '/') return std::nullopt;
    return mount.point + std::string(rest);
}

/// True when the directory is gone; false while processes are left in it.
bool try_to_remove(const std::string& directory) {
    if (::rmdir(directory.c_str()) == 0 || errno == ENOENT) return true;
    // A worker may have made cgroups of its own (another ddprun, a container).
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(directory.c_str()), ::closedir);
    while (const dirent* entry = opened ? ::readdir(opened.get()) : nullptr) {
        const std::string_view name = entry->d_name;
        if (entry->d_type == DT_DIR && name != "." && name != "..")
            (void)try_to_remove(fmt::format("{}/{}", directory, name));
    }
    return ::rmdir(directory.c_str()) == 0;
}

void kill_at(int directory, const char* file) {
    const UniqueFd kill(::openat(directory, file, O_WRONLY | O_CLOEXEC));
    // When the write is refused, the sweep over descendants kills one by one; ignoring.
    if (kill && ::write(kill.get(), "1", 1) != 1) return;
}

/// True when no living process is in the cgroup or below; false when the kernel does not tell.
bool is_empty(int directory) {
    const UniqueFd events(::openat(directory, "cgroup.events", O_RDONLY | O_CLOEXEC));
    char text[256] = {};
    return events && ::read(events.get(), text, sizeof text - 1) > 0 &&
           std::string_view(text).find("populated 0") != std::string_view::npos;
}

int open_directory(int where, const std::string& name) {
    return ::openat(where, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/// True when the directory has not been removed, or made anew, since it was opened.
bool is_same_directory(int opened, const std::string& path) {
    struct stat ours {
    }, there{};
    return ::fstat(opened, &ours) == 0 && ::stat(path.c_str(), &there) == 0 && ours.st_ino == there.st_ino &&
           ours.st_dev == there.st_dev;
}

/// The lock, which proves that the cgroup's ddprun has ended, and keeps others away that look for abandoned
/// cgroups. Empty: the cgroup is in use.
UniqueFd lock_abandoned_cgroup(const std::string& path) {
    UniqueFd directory(open_directory(AT_FDCWD, path));
    const bool is_ours = directory && ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0 &&
                         is_same_directory(directory.get(), path);
    return is_ours ? std::move(directory) : UniqueFd();
}

constexpr std::string_view kJobCgroup = "ddprun-job-";

std::vector<SiblingCgroup> cgroups_below(const std::string& parent) {
    std::vector<SiblingCgroup> found;
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(parent.c_str()), ::closedir);
    while (const dirent* entry = opened ? ::readdir(opened.get()) : nullptr) {
        struct stat status {};
        if (!std::string_view(entry->d_name).starts_with(kJobCgroup)) continue;
        if (::fstatat(::dirfd(opened.get()), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISDIR(status.st_mode)) {
            found.push_back({entry->d_name, status.st_uid});
        }
    }
    return found;
}

}  // namespace

OwnCgroup look_for_own_cgroup() {
    constexpr std::size_t kMaxText = 4 << 20;  // hosts of many containers have thousands of mounts
    return find_own_cgroup(read_file("/proc/self/cgroup", kMaxText).value_or(""),
                           read_file("/proc/self/mountinfo", kMaxText).value_or(""));
}

std::string job_cgroup_name(std::string_view id) { return fmt::format("{}{}", kJobCgroup, id); }

std::vector<std::string> cgroups_of_jobs(const std::vector<SiblingCgroup>& siblings, uid_t user) {
    constexpr std::size_t kIdDigits = 16;
    std::vector<std::string> names;
    for (const SiblingCgroup& sibling : siblings) {
        const std::string_view name = sibling.name;
        const bool is_job =
            name.size() == kJobCgroup.size() + kIdDigits && name.starts_with(kJobCgroup) &&
            name.substr(kJobCgroup.size()).find_first_not_of("0123456789abcdef") == std::string_view::npos;
        if (is_job && sibling.owner == user) names.push_back(sibling.name);
    }
    return names;
}

bool is_abandoned_cgroup(const std::string& path) { return static_cast<bool>(lock_abandoned_cgroup(path)); }

bool remove_abandoned_cgroup(const std::string& path) {
    const UniqueFd lock = lock_abandoned_cgroup(path);
    if (lock) remove_cgroup(path);
    return lock && ::access(path.c_str(), F_OK) != 0;
}

std::vector<std::string> remove_abandoned_cgroups(const std::string& parent) {
    std::vector<std::string> removed;
    std::size_t tried = 0;
    for (const std::string& name : cgroups_of_jobs(cgroups_below(parent), ::geteuid())) {
        const std::string path = parent + "/" + name;
        if (!is_abandoned_cgroup(path)) continue;
        if (++tried > kMaxAbandoned) break;
        if (remove_abandoned_cgroup(path)) removed.push_back(name);
    }
    return removed;
}

std::vector<std::string> cgroup2_mounts(std::string_view mountinfo) {
    std::vector<std::string> points;
    for (const std::string_view line : split(mountinfo, '\n')) {
        std::optional<Mount> mount = cgroup2_mount(line);
        if (mount && !mount->read_only) points.push_back(std::move(mount->point));
    }
    return points;
}

std::vector<std::string> find_job_cgroups(const std::string& root) {
    std::vector<std::string> found;
    for (const std::string& name : cgroups_of_jobs(cgroups_below(root), ::geteuid()))
        found.push_back(root + "/" + name);
    for (const std::string& name : names_in(root)) {
        const std::string path = root + "/" + name;
        struct stat status {};
        if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) continue;
        for (std::string& below : find_job_cgroups(path)) found.push_back(std::move(below));
    }
    return found;
}

OwnCgroup find_own_cgroup(std::string_view cgroup, std::string_view mountinfo) {
    const std::optional<std::string_view> path = unified_path(cgroup);
    if (!path) return {"", "this kernel has cgroup version 1 only"};
    std::string why = "cgroup version 2 is not mounted";
    for (const std::string_view line : split(mountinfo, '\n')) {
        const std::optional<Mount> mount = cgroup2_mount(line);
        if (!mount) continue;
        std::optional<std::string> directory = directory_in(*mount, *path);
        if (!directory) why = fmt::format("{} does not show our cgroup {}", mount->point, *path);
        else if (mount->read_only) why = fmt::format("{} is mounted read-only", mount->point);
        else return {*std::move(directory), ""};
    }
    return {"", std::move(why)};
}

Result<std::unique_ptr<JobCgroup>> JobCgroup::create(const std::string& directory) {
    std::unique_ptr<JobCgroup> cgroup(new JobCgroup(directory));
    if (const Status made = cgroup->make(); !made) return made.error();
    return cgroup;
}

/// Tries again when another ddprun, looking for abandoned cgroups, has seen the new directory before our
/// lock, locked it and removed it.
Status JobCgroup::make_locked() {
    constexpr int kTries = 100;
    const timespec pause{0, 1'000'000};
    for (int attempt = 0; attempt < kTries; ++attempt) {
        if (::mkdir(directory_.c_str(), 0755) != 0 && errno != EEXIST)
            return Error::system("mkdir " + directory_);
        directory_fd_.reset(open_directory(AT_FDCWD, directory_));
        if (directory_fd_ && is_same_directory(directory_fd_.get(), directory_)) {
            // Where directories cannot be locked, no other ddprun can take it for abandoned either.
            const bool taken = ::flock(directory_fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
            if (!taken && is_same_directory(directory_fd_.get(), directory_)) return {};
        }
        ::nanosleep(&pause, nullptr);
    }
    directory_fd_.reset();
    ::rmdir(directory_.c_str());
    return Error::system("lock " + directory_, EBUSY);
}

Status JobCgroup::make() {
    if (const Status made = make_locked(); !made) return made;
    UniqueFd fd = std::move(directory_fd_);
    Status usable;
    if (::faccessat(fd.get(), "cgroup.kill", W_OK, 0) != 0)
        usable = Error::system(directory_ + "/cgroup.kill");
    else if (!os::can_be_born_in(fd.get()))
        usable = Error::system("start a process in " + directory_, EOPNOTSUPP);
    exists_ = usable.has_value();
    if (exists_) directory_fd_ = std::move(fd);
    else ::rmdir(directory_.c_str());
    return usable;
}

JobCgroup::~JobCgroup() {
    if (exists_) remove_cgroup(directory_);
}

void JobCgroup::kill() {
    if (!directory_fd_ || is_empty(directory_fd_.get())) return;  // the next generation can use it
    killed_ = true;
    kill_at(directory_fd_.get(), "cgroup.kill");
}

Status JobCgroup::renew() {
    if (!killed_) return {};
    directory_fd_.reset();
    if (!try_to_remove(directory_)) return Error::system("rmdir " + directory_);
    killed_ = false;
    return make();
}

void kill_cgroup(const std::string& directory) { kill_at(AT_FDCWD, (directory + "/cgroup.kill").c_str()); }

void remove_cgroup(const std::string& directory) {
    constexpr int kLooks = 500;
    const timespec pause{0, 2'000'000};
    for (int look = 0; look < kLooks && !try_to_remove(directory); ++look) {
        kill_cgroup(directory);
        ::nanosleep(&pause, nullptr);
    }
}

}  // namespace ddprun
