#include "launcher/job_cgroup.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <vector>

#include "env/spawn.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// The path behind "0::", the entry of version 2.
std::optional<std::string_view> unified_path(std::string_view cgroup) {
    for (const std::string_view line : split(cgroup, '\n')) {
        if (line.starts_with("0::")) return line.substr(3);
    }
    return std::nullopt;
}

/// Blanks and backslashes of a path stand in mountinfo as "\040" and the like.
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
    std::string root;   ///< the part of the hierarchy that is shown
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
    return Mount{unescaped(before[3]), unescaped(before[4]), has_option(before[5], "ro") || has_option(behind[2], "ro")};
}

/// Where `path` appears below the mount; nullopt: this mount shows another part of the tree.
std::optional<std::string> directory_in(const Mount& mount, std::string_view path) {
    if (path.find("/..") != std::string_view::npos) return std::nullopt;  // outside of our cgroup namespace
    if (mount.root == "/") return mount.point + (path == "/" ? "" : std::string(path));
    if (!path.starts_with(mount.root)) return std::nullopt;
    const std::string_view rest = path.substr(mount.root.size());
    if (!rest.empty() && rest[0] != '/') return std::nullopt;
    return mount.point + std::string(rest);
}

/// True when nobody is left in the directory and it is gone.
bool try_to_remove(const std::string& directory) {
    if (::rmdir(directory.c_str()) == 0 || errno == ENOENT) return true;
    // A worker may have made cgroups of its own (another ddprun, a container).
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(directory.c_str()), ::closedir);
    while (const dirent* entry = opened ? ::readdir(opened.get()) : nullptr) {
        const std::string_view name = entry->d_name;
        if (entry->d_type == DT_DIR && name != "." && name != "..") (void)try_to_remove(fmt::format("{}/{}", directory, name));
    }
    return ::rmdir(directory.c_str()) == 0;
}

void kill_at(int directory, const char* file) {
    const UniqueFd kill(::openat(directory, file, O_WRONLY | O_CLOEXEC));
    // Refused: the sweep over descendants kills one by one; ignoring.
    if (kill && ::write(kill.get(), "1", 1) != 1) return;
}

}  // namespace

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

Status JobCgroup::make() {
    if (::mkdir(directory_.c_str(), 0755) != 0) return Error::system("mkdir " + directory_);
    UniqueFd fd(::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    Status usable;
    if (!fd || ::faccessat(fd.get(), "cgroup.kill", W_OK, 0) != 0) usable = Error::system(directory_ + "/cgroup.kill");
    else if (!os::can_be_born_in(fd.get())) usable = Error::system("start a process in " + directory_, EOPNOTSUPP);
    exists_ = usable.has_value();
    if (exists_) directory_fd_ = std::move(fd);
    else ::rmdir(directory_.c_str());
    return usable;
}

JobCgroup::~JobCgroup() {
    if (exists_) remove_cgroup(directory_);
}

void JobCgroup::kill() {
    killed_ = true;
    if (directory_fd_) kill_at(directory_fd_.get(), "cgroup.kill");
}

Status JobCgroup::renew() {
    if (!killed_) return {};
    directory_fd_.reset();
    if (!try_to_remove(directory_)) return Error::system("rmdir " + directory_);
    killed_ = false;
    return make();
}

void remove_cgroup(const std::string& directory) {
    constexpr int kLooks = 500;
    const timespec pause{0, 2'000'000};
    for (int look = 0; look < kLooks && !try_to_remove(directory); ++look) {
        kill_at(AT_FDCWD, (directory + "/cgroup.kill").c_str());
        ::nanosleep(&pause, nullptr);
    }
}

}  // namespace ddprun
