// Runs a program on a file system that hangs at times: seccomp hands its calls to this process, which delays
// some of them.
//
//   slow_calls MILLISECONDS DIRECTORY REPORT PROGRAM [ARGUMENT...]
//
// It delays, once for each kind, calls of a process named ddprun on files below DIRECTORY: exec, the second
// write, and in an attempt's directory mkdir, stat, inotify_add_watch and open (for each ending of a name).
// So no delay happens before the nodes have met. REPORT gets a line for each: "open .log". While the file
// REPORT.all exists, every call on such a file is delayed. Exit code 77 if seccomp cannot do this.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kSkipped = 77;
using Clock = std::chrono::steady_clock;

struct Call {
    long number;
    const char* kind;
    int path;  ///< the argument that has it; -1: the first is a descriptor
};
constexpr Call kCalls[] = {
#ifdef SYS_open
    {SYS_open, "open", 0},    {SYS_mkdir, "mkdir", 0},      {SYS_stat, "stat", 0},
    {SYS_lstat, "stat", 0},   {SYS_access, "access", 0},
#endif
    {SYS_openat, "open", 1},  {SYS_mkdirat, "mkdir", 1},    {SYS_newfstatat, "stat", 1},
    {SYS_statx, "stat", 1},   {SYS_execve, "exec", 0},      {SYS_inotify_add_watch, "watch", 1},
    {SYS_write, "write", -1}, {SYS_faccessat, "access", 1},
};

/// The descriptor that reports this process's calls of these kinds; -1: none.
int divert_calls() {
    std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
    for (const Call& call : kCalls) {
        filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call.number), 0, 1));
        filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
    }
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
    return static_cast<int>(
        ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program));
}

bool send_descriptor(int socket, int fd) {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return ::sendmsg(socket, &message, 0) == 1;
}

/// -1 if the other side has ended.
int receive_descriptor(int socket) {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message) == nullptr) return -1;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

std::string text_of(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// The path in the caller's arguments; "": none.
std::string path_of(const Call& call, const seccomp_notif& request) {
    const std::string proc = "/proc/" + std::to_string(request.pid);
    std::error_code ignored;
    if (call.path < 0)
        return std::filesystem::read_symlink(proc + "/fd/" + std::to_string(request.data.args[0]), ignored);
    const int memory = ::open((proc + "/mem").c_str(), O_RDONLY | O_CLOEXEC);
    char text[512] = {};
    (void)!::pread(memory, text, sizeof text - 1, static_cast<off_t>(request.data.args[call.path]));
    ::close(memory);
    return text;
}

class SlowFiles {
  public:
    SlowFiles(int listener, std::chrono::milliseconds delay, std::string directory, const char* report)
        : listener_(listener),
          delay_(delay),
          directory_(std::move(directory) + "/"),
          report_(report),
          all_(std::string(report) + ".all") {}

    /// Serves until the child has ended, and returns its exit code.
    int serve(pid_t child) {
        for (;;) {
            int status = 0;
            if (::waitpid(child, &status, WNOHANG) == child)
                return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            pollfd calls{listener_, POLLIN, 0};
            if (::poll(&calls, 1, 20) == 1 && (calls.revents & POLLIN) != 0) take_one();
            while (!held_up_.empty() && held_up_.begin()->first <= Clock::now()) {
                let_pass(held_up_.begin()->second);
                held_up_.erase(held_up_.begin());
            }
        }
    }

  private:
    void take_one() {
        seccomp_notif request{};
        if (::ioctl(listener_, SECCOMP_IOCTL_NOTIF_RECV, &request) != 0) return;
        if (is_to_wait(request)) held_up_.emplace(Clock::now() + delay_, request.id);
        else let_pass(request.id);
    }
    bool is_to_wait(const seccomp_notif& request) {
        if (text_of("/proc/" + std::to_string(request.pid) + "/comm") != "ddprun\n") return false;
        for (const Call& call : kCalls) {
            if (call.number != request.data.nr) continue;
            const std::string path = path_of(call, request);
            if (!path.starts_with(directory_)) return false;
            const std::string name = call.kind;
            if (::access(all_.c_str(), F_OK) == 0) {
                report_ << name << std::endl;
                return true;
            }
            if (name == "access") return false;
            if (name == "write" && ++writes_ != 2) return false;
            if (name != "write" && name != "exec" && path.find("/attempt_") == path.npos) return false;
            const std::string ending =
                name == "open" ? " " + std::filesystem::path(path).extension().string() : "";
            if (!seen_.insert(name + ending).second) return false;
            report_ << name << ending << std::endl;
            return true;
        }
        return false;
    }
    void let_pass(std::uint64_t id) const {
        seccomp_notif_resp answer{};
        answer.id = id;
        answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        ::ioctl(listener_, SECCOMP_IOCTL_NOTIF_SEND,
                &answer);  // ignoring: it fails if the caller was killed
    }

    int listener_;
    std::chrono::milliseconds delay_;
    std::string directory_;
    std::ofstream report_;
    std::string all_;
    std::set<std::string> seen_;
    int writes_ = 0;
    std::multimap<Clock::time_point, std::uint64_t> held_up_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: slow_calls MILLISECONDS DIRECTORY REPORT PROGRAM [ARGUMENT...]\n");
        return 64;
    }
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) return kSkipped;
    const pid_t child = ::fork();
    if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int listener = divert_calls();
        if (listener < 0 || !send_descriptor(sockets[1], listener)) ::_exit(kSkipped);
        ::close(listener);
        ::execvp(argv[4], argv + 4);
        ::_exit(127);
    }
    ::close(sockets[1]);
    const int listener = receive_descriptor(sockets[0]);
    if (listener < 0) {
        std::perror("slow_calls: seccomp");
        return kSkipped;
    }
    SlowFiles files(listener, std::chrono::milliseconds(std::atoi(argv[1])), argv[2], argv[3]);
    return files.serve(child);
}
