// on_host [--pid-file=FILE] SOCKET PROGRAM [ARGUMENT...]
// Runs a program on the host (tests/support/hosts.h) whose first process listens at SOCKET, with this
// process's standard streams, directory and environment, in a session of its own. Ends like the program and
// forwards signals; if this process is killed, the program gets SIGKILL. FILE receives the program's process
// id on the host, which is also its session's.
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "tests/support/host_request.h"

extern char** environ;

namespace {

using namespace ddprun::test;

int connect_to_host(const std::string& path) {
    const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    const int bytes = kMaxRequestBytes;
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    return ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? fd : -1;
}

HostRequest request_of(char** arguments) {
    HostRequest request;
    std::array<char, 4096> directory{};
    if (::getcwd(directory.data(), directory.size()) != nullptr) request.directory = directory.data();
    for (; *arguments != nullptr; ++arguments) request.arguments.emplace_back(*arguments);
    for (char** one = environ; *one != nullptr; ++one) request.environment.emplace_back(*one);
    return request;
}

/// Blocks the signals that are forwarded.
int signals_to_pass_on() {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGALRM, SIGWINCH})
        ::sigaddset(&set, signal);
    ::sigprocmask(SIG_BLOCK, &set, nullptr);
    return ::signalfd(-1, &set, SFD_CLOEXEC);
}

int fail(const std::string& what) {
    std::fprintf(stderr, "on_host: %s: %s\n", what.c_str(), std::strerror(errno));
    return 125;
}

int end_as(int status) {
    if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
    ::prctl(PR_SET_DUMPABLE, 0);  // only the program may dump a core
    sigset_t all;
    ::sigfillset(&all);
    ::signal(WTERMSIG(status), SIG_DFL);
    ::sigprocmask(SIG_UNBLOCK, &all, nullptr);
    ::raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);
}

}  // namespace

int main(int argc, char** argv) {
    std::string pid_file;
    constexpr std::string_view kPidFile = "--pid-file=";
    if (argc > 1 && std::string_view(argv[1]).starts_with(kPidFile)) {
        pid_file = argv[1] + kPidFile.size();
        ++argv, --argc;
    }
    if (argc < 3) return 64;
    const int signals = signals_to_pass_on();
    const int host = connect_to_host(argv[1]);
    if (host < 0) return fail(std::string("connect ") + argv[1]);
    if (!send_request(host, packed(request_of(argv + 2)), {0, 1, 2})) return fail("sendmsg");
    int pid = 0;
    if (::recv(host, &pid, sizeof pid, 0) != sizeof pid) return fail("no process");
    if (!pid_file.empty()) std::ofstream(pid_file) << pid << "\n";
    for (;;) {
        std::array<pollfd, 2> ready{{{host, POLLIN, 0}, {signals, POLLIN, 0}}};
        if (::poll(ready.data(), ready.size(), -1) < 0) continue;
        if (ready[1].revents != 0) {
            signalfd_siginfo signal{};
            if (::read(signals, &signal, sizeof signal) != sizeof signal) return fail("read a signal");
            const int number = static_cast<int>(signal.ssi_signo);
            if (::send(host, &number, sizeof number, MSG_NOSIGNAL) < 0 && errno != EPIPE)
                return fail("send a signal");
        }
        if (ready[0].revents != 0) {
            int status = 0;
            if (::recv(host, &status, sizeof status, 0) == sizeof status) return end_as(status);
            errno = EHOSTDOWN;
            return fail("the host is gone");
        }
    }
}
