#include "tests/support/fake_system.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace ddprun::test {
namespace {

/// Signals whose default action ends a process, of those a launcher sends.
bool is_deadly(int signal) {
    constexpr int kDeadly[] = {SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGABRT, SIGUSR1, SIGUSR2};
    return std::find(std::begin(kDeadly), std::end(kDeadly), signal) != std::end(kDeadly);
}

}  // namespace

FakeSystem::~FakeSystem() = default;

bool FakeSystem::fails() { return ++calls_ == fail_.n; }

void FakeSystem::track(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) == 0) issued_[fd] = {status.st_dev, status.st_ino};
}

Result<pid_t> FakeSystem::spawn(const os::SpawnSpec& spec) {
    if (fails()) return Error::system("fork", EAGAIN);
    if (spawn_error_ != 0)
        return Error{Errc::Refused, Error::system("exec " + spec.program, spawn_error_).what, spawn_error_};
    const pid_t pid = next_pid_++;
    Child child{pid, {}, {}};
    for (const os::FdMapping& mapping : spec.descriptors) {
        child.descriptors[mapping.childs] = UniqueFd(::fcntl(mapping.ours, F_DUPFD_CLOEXEC, 3));
    }
    running_.emplace(pid, std::move(child));
    spawned_.emplace_back(pid, spec);
    if (exit_at_birth_) exit(pid, *exit_at_birth_);
    return pid;
}

void FakeSystem::deliver(pid_t pid, int signal) {
    const auto found = running_.find(pid);
    if (found == running_.end() || !is_deadly(signal)) return;
    if (signal != SIGKILL && found->second.ignored.count(signal) != 0) return;
    end({pid, true, signal, false});
}

Status FakeSystem::signal_group(pid_t group, int signal) {
    if (on_signal_group_) on_signal_group_(group, signal);
    signals_.push_back({group, signal, true});
    std::vector<pid_t> members;
    for (const auto& [pid, child] : running_) {
        if (child.group == group) members.push_back(pid);
    }
    for (const pid_t pid : members) deliver(pid, signal);
    return {};
}

Status FakeSystem::signal_process(pid_t pid, int signal) {
    signals_.push_back({pid, signal, false});
    deliver(pid, signal);
    return {};
}

std::optional<os::ChildExit> FakeSystem::next_exit() {
    if (zombies_.empty()) return std::nullopt;
    return zombies_.front();
}

void FakeSystem::reap(pid_t pid) {
    if (on_reap_) on_reap_(pid);
    std::erase_if(zombies_, [&](const os::ChildExit& zombie) { return zombie.pid == pid; });
}

pid_t FakeSystem::group_of(pid_t pid) {
    const auto found = running_.find(pid);
    return found == running_.end() ? -1 : found->second.group;
}

bool FakeSystem::group_exists(pid_t group) {
    const auto is_member = [&](const auto& entry) { return entry.second.group == group; };
    const auto is_leader = [&](const os::ChildExit& zombie) { return zombie.pid == group; };
    return std::any_of(running_.begin(), running_.end(), is_member) ||
           std::any_of(zombies_.begin(), zombies_.end(), is_leader);
}

std::vector<pid_t> FakeSystem::descendants() {
    // Grandchildren are younger than their parents and have higher numbers.
    std::vector<pid_t> pids;
    for (auto child = running_.rbegin(); child != running_.rend(); ++child) pids.push_back(child->first);
    return pids;
}

Result<os::System::Pipe> FakeSystem::make_pipe(std::size_t buffer_bytes) {
    if (fails()) return Error::system("pipe2", EMFILE);
    Result<Pipe> pipe = os::LinuxSystem().make_pipe(buffer_bytes);
    if (pipe) track(pipe->read.get());
    if (pipe) track(pipe->write.get());
    return pipe;
}

Result<os::System::SocketPair> FakeSystem::make_socket_pair() {
    if (fails()) return Error::system("socketpair", EMFILE);
    Result<SocketPair> pair = os::LinuxSystem().make_socket_pair();
    if (pair) track(pair->ours.get());
    if (pair) track(pair->theirs.get());
    return pair;
}

Result<UniqueFd> FakeSystem::make_segment(std::uint64_t bytes) {
    if (fails()) return Error::system("memfd_create", ENOMEM);
    Result<UniqueFd> segment = os::LinuxSystem().make_segment(bytes);
    if (segment) track(segment->get());
    return segment;
}

void FakeSystem::end(const os::ChildExit& how) {
    if (running_.erase(how.pid) == 0) return;
    zombies_.push_back(how);
    ::kill(::getpid(), SIGCHLD);
}

void FakeSystem::exit(pid_t pid, int code) { end({pid, false, code, false}); }

void FakeSystem::die_of(pid_t pid, int signal, bool dumped_core) { end({pid, true, signal, dumped_core}); }

void FakeSystem::ignore_signal(pid_t pid, int signal) {
    const auto found = running_.find(pid);
    if (found != running_.end()) found->second.ignored.insert(signal);
}

pid_t FakeSystem::add_grandchild(pid_t group) {
    const pid_t pid = next_pid_++;
    running_.emplace(pid, Child{group, {}, {}});
    return pid;
}

int FakeSystem::descriptor(pid_t pid, int childs_number) const {
    const auto child = running_.find(pid);
    if (child == running_.end()) return -1;
    const auto found = child->second.descriptors.find(childs_number);
    return found == child->second.descriptors.end() ? -1 : found->second.get();
}

int FakeSystem::live_children() const { return static_cast<int>(running_.size()); }

int FakeSystem::open_fds() const {
    const auto is_open = [](const auto& entry) {
        struct stat status {};
        if (::fstat(entry.first, &status) != 0) return false;
        return entry.second == std::pair(status.st_dev, status.st_ino);
    };
    return static_cast<int>(std::count_if(issued_.begin(), issued_.end(), is_open));
}

}  // namespace ddprun::test
