#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/io/socket.h"
#include "env/os/process_tree.h"
#include "env/os/spawn.h"
#include "env/os/system.h"

namespace ddprun::os {
namespace {

Status sent(int outcome, std::string_view attempt) {
    if (outcome == 0 || errno == ESRCH) return {};
    return Error::system(attempt);
}

ChildExit from_siginfo(const siginfo_t& info) {
    ChildExit exit;
    exit.pid = info.si_pid;
    exit.signaled = info.si_code != CLD_EXITED;
    exit.status = info.si_status;
    exit.dumped_core = info.si_code == CLD_DUMPED;
    return exit;
}

/// For a new descriptor, which has no other flags to keep.
Status make_nonblocking(const UniqueFd& fd) {
    return ::fcntl(fd.get(), F_SETFL, O_NONBLOCK) == 0 ? Status() : Error::system("fcntl O_NONBLOCK");
}

/// A larger pipe means fewer stalls of the workers and fewer wake-ups of ours.
void resize(int pipe, std::size_t bytes) {
    // The kernel refuses beyond a user's limit (pipe-user-pages-soft), and any size works. Ignoring.
    ::fcntl(pipe, F_SETPIPE_SZ, static_cast<int>(bytes));
}

/// The children from before our exec: a shell's background jobs, PBS's relay of other hosts' output.
std::vector<pid_t> children_from_before() {
    siginfo_t ignored{};
    if (::waitid(P_ALL, 0, &ignored, WEXITED | WNOHANG | WNOWAIT) != 0) return {};  // there is none
    std::vector<pid_t> children = descendants_of(::getpid());
    std::erase_if(children, [](pid_t pid) {
        const std::optional<ProcStat> stat = proc_stat_of(pid);
        return !stat || stat->parent != ::getpid();
    });
    return children;
}

}  // namespace

LinuxSystem::LinuxSystem()
    : slots_(std::make_unique<SpawnSlots>()), other_children_(children_from_before()) {}
LinuxSystem::~LinuxSystem() = default;

Result<pid_t> LinuxSystem::spawn(const SpawnSpec& spec) {
    Result<pid_t> pid = spawn_process(spec, *slots_);
    if (pid && spec.is_tool) other_children_.push_back(*pid);
    return pid;
}

Status LinuxSystem::signal_group(pid_t group, int signal) {
    return sent(::kill(-group, signal), "kill group");
}

Status LinuxSystem::signal_process(pid_t pid, int signal) { return sent(::kill(pid, signal), "kill"); }

bool LinuxSystem::group_exists(pid_t group) { return ::kill(-group, 0) == 0 || errno == EPERM; }

pid_t LinuxSystem::group_of(pid_t pid) { return ::getpgid(pid); }

std::optional<ChildExit> LinuxSystem::next_exit() {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return std::nullopt;
    return from_siginfo(info);
}

void LinuxSystem::reap(pid_t pid) {
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG);
    std::erase(other_children_, pid);
}

std::optional<ChildStop> LinuxSystem::next_stop() {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WSTOPPED | WNOHANG) != 0 || info.si_pid == 0) return std::nullopt;
    return ChildStop{info.si_pid, info.si_status};
}

std::vector<pid_t> LinuxSystem::spared() const {
    std::vector<pid_t> all = other_children_;
    for (const pid_t one : other_children_) {
        const std::vector<pid_t> its = descendants_of(one);
        all.insert(all.end(), its.begin(), its.end());
    }
    std::sort(all.begin(), all.end());
    return all;
}

std::vector<pid_t> LinuxSystem::descendants() {
    std::vector<pid_t> all = descendants_of(::getpid());
    std::erase_if(all, [spared = spared()](pid_t pid) {
        return std::binary_search(spared.begin(), spared.end(), pid);
    });
    return all;
}

Result<System::Pipe> LinuxSystem::make_pipe(std::size_t buffer_bytes) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return Error::system("pipe2");
    Pipe pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
    // The two ends have separate file descriptions: the worker's stays blocking, as programs expect.
    if (const Status set = make_nonblocking(pipe.read); !set) return set.error();
    resize(pipe.read.get(), buffer_bytes);
    return pipe;
}

Result<System::SocketPair> LinuxSystem::make_socket_pair() {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
        return Error::system("socketpair");
    SocketPair pair{UniqueFd(ends[0]), UniqueFd(ends[1])};
    if (const Status set = make_nonblocking(pair.ours); !set) return set.error();
    return pair;
}

Result<UniqueFd> LinuxSystem::make_segment(std::uint64_t bytes) {
    UniqueFd fd(::memfd_create("ddprun", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd) return Error::system("memfd_create");
    if (const Status sized = resize_memory_file(fd.get(), bytes); !sized) return sized.error();
    // Seal the size: a process that shrinks the file would kill the others by SIGBUS.
    if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return Error::system("fcntl F_ADD_SEALS");
    }
    return fd;
}

std::vector<std::string> own_environment() {
    std::vector<std::string> all;
    for (char** one = environ; *one != nullptr; ++one) all.emplace_back(*one);
    return all;
}

Status become_subreaper() {
    if (::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
        return Error::system("prctl PR_SET_CHILD_SUBREAPER");
    // Check waitid now: in a sandbox that refuses it, we would never see the end of a worker.
    siginfo_t ignored{};
    const bool can_wait = ::waitid(P_ALL, 0, &ignored, WEXITED | WNOHANG | WNOWAIT) == 0 || errno == ECHILD;
    return can_wait ? Status() : Error::system("waitid");
}

}  // namespace ddprun::os
