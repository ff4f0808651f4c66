#include "launcher/warden.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "launcher/descriptors.h"
#include "launcher/job_cgroup.h"

namespace ddprun {

/// Shared between ddprun and its warden, so that a worker is in it from the moment it exists.
struct Warden::Table {
    std::atomic<bool> farewell{false};
    std::atomic<pid_t> groups[1];
};

namespace {

std::size_t table_bytes(int max_groups) {
    return sizeof(std::atomic<pid_t>) * (static_cast<std::size_t>(max_groups) + 4);
}

/// True when the NUL-separated list in /proc/<pid>/environ holds the marker. Gone or foreign processes: false.
bool has_marker(const char* pid, const std::string& marker) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%s/environ", pid);
    const UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
    if (!fd) return false;
    std::string environment;
    char piece[4096];
    ssize_t n = 0;
    while ((n = ::read(fd.get(), piece, sizeof piece)) > 0) environment.append(piece, static_cast<std::size_t>(n));
    std::string_view rest = environment;
    while (!rest.empty()) {
        const std::size_t end = rest.find('\0');
        if (rest.substr(0, end) == marker) return true;
        if (end == std::string_view::npos) break;
        rest.remove_prefix(end + 1);
    }
    return false;
}

/// A process can fork while we look, so we look until two looks in a row find nothing, for five seconds at most.
void sweep_marked(const std::string& marker) {
    const timespec pause{0, 5'000'000};
    int quiet = 0;
    for (int look = 0; look < 1000 && quiet < 2; ++look) {
        quiet = kill_marked_processes(marker) == 0 ? quiet + 1 : 0;
        if (quiet < 2) ::nanosleep(&pause, nullptr);
    }
}

/// Among them is our copy of the pipe's other end: while it is open, ddprun's death is not seen.
void close_from(int first) {
    if (::syscall(SYS_close_range, static_cast<unsigned>(first), ~0U, 0U) == 0) return;
    for (const int fd : open_descriptors()) {  // before Linux 5.9
        if (fd >= first) ::close(fd);
    }
}

void detach_from_everything(int pipe_read) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_NAME, "warden");
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2, SIGTSTP}) {
        ::signal(signal, SIG_IGN);
    }
    const int null = ::open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; ++fd) ::dup2(null, fd);
    ::dup2(pipe_read, 3);
    close_from(4);
}

}  // namespace

int kill_marked_processes(const std::string& marker) {
    DIR* proc = ::opendir("/proc");
    if (proc == nullptr) return 0;
    int found = 0;
    while (const dirent* entry = ::readdir(proc)) {
        const pid_t pid = std::atoi(entry->d_name);
        if (pid <= 1 || pid == ::getpid() || !has_marker(entry->d_name, marker)) continue;
        if (::kill(pid, SIGKILL) == 0) ++found;
    }
    ::closedir(proc);
    return found;
}

Result<std::unique_ptr<Warden>> Warden::start(std::string marker, std::string cgroup, int max_groups) {
    void* memory = ::mmap(nullptr, table_bytes(max_groups), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return Error::system("mmap the warden's table");
    std::unique_ptr<Warden> warden(
        new Warden(std::move(marker), std::move(cgroup), static_cast<Table*>(memory), max_groups));
    const Status forked = warden->fork_child();
    if (!forked) return forked.error();
    return warden;
}

Status Warden::fork_child() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe2");
    UniqueFd read_end(ends[0]);
    alive_.reset(ends[1]);
    pid_ = ::fork();
    if (pid_ < 0) return Error::system("fork the warden");
    if (pid_ > 0) {
        // It does so itself as well, but on a busy machine long after workers run: a signal to our group would hit it.
        ::setpgid(pid_, pid_);
        return {};
    }

    detach_from_everything(read_end.get());
    char byte = 0;
    while (::read(3, &byte, 1) < 0 && errno == EINTR) {
    }
    if (table_->farewell.load()) ::_exit(0);
    for (int i = 0; i < max_groups_; ++i) {
        const pid_t group = table_->groups[i].load();
        if (group > 1) ::kill(-group, SIGKILL);
    }
    if (!cgroup_.empty()) remove_cgroup(cgroup_);
    sweep_marked(marker_);
    ::_exit(0);
}

Warden::~Warden() {
    table_->farewell.store(true);
    alive_.reset();
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
    ::munmap(table_, table_bytes(max_groups_));
}

void Warden::set_group(int local_rank, pid_t group) {
    if (local_rank < max_groups_) table_->groups[local_rank].store(group);
}

Status Warden::restart() {
    pid_ = 0;
    return fork_child();
}

}  // namespace ddprun
