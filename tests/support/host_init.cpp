// host_init NAME LISTENER CONTROL HOSTS_FILE [KEPT...]
// The first process of a host (tests/support/hosts.h), born in namespaces of its own: gives the host its name
// and its own /tmp, /var/tmp, /run, /dev/shm, /proc and /sys, then starts what on_host asks for. All
// processes of the host end with it, and it ends with the test. LISTENER and CONTROL are descriptors; KEPT
// are directories that stay visible where a mount hides them.
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include "env/unique_fd.h"
#include "tests/support/host_request.h"
#include "tests/support/kept_directories.h"

namespace {

using namespace ddprun;
using namespace ddprun::test;

/// Reports why the host cannot be made.
[[noreturn]] void give_up(int control, const std::string& what) {
    const std::string text = what + ": " + std::strerror(errno);
    (void)!::write(control, text.data(), text.size());
    ::_exit(1);
}

void make_places(int control, const char* hosts_file, KeptDirectories& kept) {
    const auto mount_new = [&](const char* type, const char* where, const char* options) {
        if (::mount(type, where, type, 0, options) != 0) give_up(control, std::string("mount ") + where);
    };
    if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
        give_up(control, "mount / private");
    for (const char* where : {"/tmp", "/var/tmp", "/run", "/dev/shm"})
        mount_new("tmpfs", where, std::strcmp(where, "/run") == 0 ? "mode=755" : "mode=1777");
    kept.show_again();
    ::umount2("/sys", MNT_DETACH);  // with the cgroups, which separate hosts do not share
    mount_new("sysfs", "/sys", nullptr);
    mount_new("proc", "/proc", nullptr);
    if (::mount(hosts_file, "/etc/hosts", nullptr, MS_BIND, nullptr) != 0)
        give_up(control, "mount /etc/hosts");
}

[[noreturn]] void become(const HostRequest& request, const StandardStreams& streams) {
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::setsid();
    for (int fd = 0; fd < 3; ++fd) ::dup2(streams[static_cast<std::size_t>(fd)], fd);
    std::vector<char*> arguments, environment;
    for (const std::string& one : request.arguments) arguments.push_back(const_cast<char*>(one.c_str()));
    for (const std::string& one : request.environment) environment.push_back(const_cast<char*>(one.c_str()));
    arguments.push_back(nullptr);
    environment.push_back(nullptr);
    const bool is_there = ::chdir(request.directory.c_str()) == 0;
    if (is_there) ::execvpe(arguments[0], arguments.data(), environment.data());
    ::dprintf(2, "on_host: %s: %s\n", is_there ? arguments[0] : request.directory.c_str(),
              std::strerror(errno));
    ::_exit(is_there ? 127 : 126);
}

/// A program that a client has requested and waits for.
struct Started {
    UniqueFd asker;
    pid_t pid = 0;  ///< 0: has ended
};

class Host {
  public:
    Host(int listener, int control, int children)
        : listener_(listener), control_(control), children_(children) {}

    /// Runs until the test has ended.
    void serve() {
        for (;;) {
            std::vector<pollfd> ready{{listener_, POLLIN, 0}, {control_, POLLIN, 0}, {children_, POLLIN, 0}};
            for (const Started& one : started_) ready.push_back({one.asker.get(), POLLIN, 0});
            if (::poll(ready.data(), ready.size(), -1) < 0) continue;
            if (ready[1].revents != 0) return;
            for (std::size_t i = 3; i < ready.size(); ++i) {
                if (ready[i].revents != 0) hear(started_[i - 3]);
            }
            if (ready[2].revents != 0) reap();
            std::erase_if(started_, [](const Started& one) { return one.pid == 0; });
            if (ready[0].revents != 0) start();
        }
    }

  private:
    void start() {
        Started one{UniqueFd(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)), 0};
        StandardStreams streams{-1, -1, -1};
        const HostRequest request = unpacked(receive_request(one.asker.get(), streams));
        const std::array<UniqueFd, 3> owned{UniqueFd(streams[0]), UniqueFd(streams[1]), UniqueFd(streams[2])};
        if (request.arguments.empty() || streams[2] < 0) return;
        one.pid = ::fork();
        if (one.pid == 0) become(request, streams);
        if (one.pid < 0) return;
        ::send(one.asker.get(), &one.pid, sizeof one.pid, MSG_NOSIGNAL);
        started_.push_back(std::move(one));
    }

    void hear(Started& one) {
        int signal = 0;
        if (::recv(one.asker.get(), &signal, sizeof signal, 0) == sizeof signal) {
            ::kill(one.pid, signal);
        } else {
            ::kill(one.pid, SIGKILL);
            one.pid = 0;  // reaped with the orphans
        }
    }

    void reap() {
        signalfd_siginfo ignored{};
        (void)!::read(children_, &ignored, sizeof ignored);
        int status = 0;
        for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
            for (Started& one : started_) {
                if (one.pid != pid) continue;
                ::send(one.asker.get(), &status, sizeof status, MSG_NOSIGNAL);
                one.pid = 0;
            }
        }
    }

    int listener_, control_, children_;
    std::vector<Started> started_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) return 64;
    const std::string name = argv[1];
    const int listener = std::atoi(argv[2]), control = std::atoi(argv[3]);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (const int fd : {listener, control}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    sigset_t children;
    ::sigemptyset(&children);
    ::sigaddset(&children, SIGCHLD);
    ::sigprocmask(SIG_BLOCK, &children, nullptr);
    {
        KeptDirectories kept({argv + 5, argv + argc});
        if (::sethostname(name.data(), name.size()) != 0) give_up(control, "sethostname");
        make_places(control, argv[4], kept);
    }
    if (::write(control, "ready", 5) != 5) return 1;
    Host(listener, control, ::signalfd(-1, &children, SFD_CLOEXEC)).serve();
}
