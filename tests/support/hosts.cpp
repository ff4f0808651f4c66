#include "tests/support/hosts.h"

#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tests/support/kept_directories.h"
#include "tests/support/slow_switch.h"

namespace ddprun::test {

namespace {

constexpr int kNamespaces = CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID;
constexpr const char* kShared = "/srv";
constexpr const char* kRouter = "10.77.255.254";

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("hosts: " + what); }
[[noreturn]] void fail_errno(const std::string& what) { fail(what + ": " + std::strerror(errno)); }

std::string home_directory() {
    const passwd* const user = ::getpwuid(::getuid());
    return user == nullptr ? "/root" : user->pw_dir;
}

/// The directories of the sources and builds.
std::vector<std::string> directories_to_keep() {
    std::vector<std::string> paths{std::filesystem::current_path()};
    for (const char* variable : {"BUILD_ROOT", "SOURCE_ROOT"}) {
        if (const char* path = std::getenv(variable)) paths.emplace_back(path);
    }
    return paths;
}

/// Makes this process's mounts private.
void enter_own_mount_namespace() {
    static bool is_done = false;
    if (is_done) return;
    if (::unshare(CLONE_NEWNS) != 0) fail_errno("unshare mounts");
    if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) fail_errno("mount / private");
    is_done = true;
}

UniqueFd network_namespace(const char* path) { return UniqueFd(::open(path, O_RDONLY | O_CLOEXEC)); }

/// A network namespace that lives as long as its descriptor.
UniqueFd new_network() {
    const UniqueFd ours = network_namespace("/proc/thread-self/ns/net");
    if (!ours || ::unshare(CLONE_NEWNET) != 0) fail_errno("unshare the network");
    UniqueFd made = network_namespace("/proc/thread-self/ns/net");
    if (::setns(ours.get(), CLONE_NEWNET) != 0) fail_errno("back to our network");
    return made;
}

UniqueFd listen_at(const std::string& path) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(fd.get(), 1024) != 0)
        fail_errno(path);
    return fd;
}

void run_or_fail(const std::vector<std::string>& command, const std::string& input) {
    RunOptions options;
    options.input = input;
    const Outcome outcome = run(command, options);
    if (outcome.status != 0) fail(input + ": " + outcome.err);
}

}  // namespace

class Hosts::Mount {
  public:
    Mount(const char* source, const std::string& target, const char* type, unsigned long flags)
        : target_(target) {
        if (::mount(source, target.c_str(), type, flags, flags == 0 ? "mode=755" : nullptr) != 0)
            fail_errno("mount " + target);
    }
    ~Mount() { ::umount2(target_.c_str(), MNT_DETACH); }
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;

  private:
    const std::string target_;
};

/// The first process of a host; all processes of the host end with it.
class Hosts::Host {
  public:
    Host(const std::string& name, const std::string& socket_path, const std::string& hosts_file)
        : name_(name) {
        std::array<int, 2> control{};
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control.data()) != 0)
            fail_errno("socketpair");
        control_.reset(control[0]);
        const UniqueFd its_end(control[1]), listener = listen_at(socket_path);
        std::vector<std::string> words{path_of("HOST_INIT"), name, std::to_string(listener.get()),
                                       std::to_string(its_end.get()), hosts_file};
        for (const std::string& path : directories_to_keep()) words.push_back(path);
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        pid_ = static_cast<pid_t>(
            ::syscall(SYS_clone, kNamespaces | SIGCHLD, nullptr, nullptr, nullptr, nullptr));
        if (pid_ < 0) fail_errno("clone with new namespaces");
        if (pid_ > 0) return;

        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::setpgid(0, 0);
        for (const int fd : {listener.get(), its_end.get()}) ::fcntl(fd, F_SETFD, 0);
        ::execv(argv[0], argv.data());
        ::_exit(127);
    }
    ~Host() { power_off(); }
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;

    /// Throws the host's message if it cannot be made.
    void await_ready() {
        std::array<char, 512> text{};
        const ssize_t n = ::read(control_.get(), text.data(), text.size());
        const std::string said(text.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
        if (said != "ready") fail(name_ + ": " + (said.empty() ? "ended at once" : said));
    }
    [[nodiscard]] pid_t pid() const { return pid_; }
    void power_off() {
        if (pid_ < 0) return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        pid_ = -1;
    }

  private:
    const std::string name_;
    UniqueFd control_;
    pid_t pid_ = -1;
};

/// A process in the network namespace of the switch.
class Hosts::SlowSwitch {
  public:
    SlowSwitch(int network, const std::vector<std::string>& ports) : pid_(::fork()) {
        if (pid_ < 0) fail_errno("fork the slow switch");
        if (pid_ > 0) return;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::_exit(::setns(network, CLONE_NEWNET) == 0 ? be_slow_switch(ports) : 1);
    }
    ~SlowSwitch() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    SlowSwitch(const SlowSwitch&) = delete;
    SlowSwitch& operator=(const SlowSwitch&) = delete;

  private:
    const pid_t pid_;
};

std::optional<std::string> Hosts::why_not() {
    static const auto tried = []() -> std::optional<std::string> {
        try {
            const Hosts one(1);
            return std::nullopt;
        } catch (const std::runtime_error& error) {
            return std::string("no hosts of our own on this machine: ") + error.what();
        }
    }();
    return tried;
}

std::string Hosts::name(int host) { return (host < 10 ? "node0" : "node") + std::to_string(host); }

std::string Hosts::address(int host) {
    return "10.77." + std::to_string(host / 250) + "." + std::to_string(host % 250 + 1);
}

Hosts::Hosts(int count, Switch made_of) : made_of_(made_of), shared_(kShared), home_(home_directory()) {
    enter_own_mount_namespace();
    const KeptDirectories kept(directories_to_keep());
    mounts_.push_back(std::make_unique<Mount>("tmpfs", shared_, "tmpfs", 0UL));
    for (const char* directory : {"/.hosts", "/home"}) std::filesystem::create_directory(shared_ + directory);
    mounts_.push_back(std::make_unique<Mount>((shared_ + "/home").c_str(), home_, nullptr, MS_BIND));
    kept.show_again();

    const std::string hosts_file = shared_ + "/.hosts/etc_hosts";
    std::ofstream known(hosts_file);
    known << "127.0.0.1 localhost\n::1 localhost\n";
    for (int host = 0; host < count; ++host) known << address(host) << " " << name(host) << "\n";
    known.close();

    switch_ = new_network();
    for (int host = 0; host < count; ++host)
        hosts_.push_back(std::make_unique<Host>(name(host), socket_path(host), hosts_file));
    for (const auto& host : hosts_) host->await_ready();

    const bool is_bridge = made_of_ == Switch::Bridge, is_router = made_of_ == Switch::Router;
    std::string ports;
    if (is_bridge) ports = "link add switch type bridge\nlink set switch up\n";
    if (is_router) ports = "route add blackhole 10.77.0.0/16\n";
    std::vector<std::string> names;
    for (int host = 0; host < count; ++host) {
        const std::string port = "port" + std::to_string(host);
        ports += "link add " + port + " type veth peer name eth0 netns " +
                 std::to_string(hosts_[static_cast<std::size_t>(host)]->pid()) + "\n";
        names.push_back(port);
        if (is_bridge) ports += "link set " + port + " master switch\n";
        if (is_router) ports += std::string("addr add ") + kRouter + "/32 dev " + port + "\n";
        ports += port_up(host);
    }
    ip_in_switch(ports);
    if (made_of_ == Switch::Slow) slow_ = std::make_unique<SlowSwitch>(switch_.get(), names);
    if (is_router) {
        run_or_fail(
            {"nsenter", "--net=/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(switch_.get()),
             "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"},
            "");
    }
    for (int host = 0; host < count; ++host) {
        std::string cable = "link set lo up\nlink set eth0 addrgenmode none\nlink set eth0 up\n";
        if (!is_router) cable += "addr add " + address(host) + "/16 dev eth0\n";
        else
            cable += "addr add " + address(host) + "/32 dev eth0\nroute add " + kRouter +
                     "/32 dev eth0 src " + address(host) + "\nroute add 10.77.0.0/16 via " + kRouter +
                     " src " + address(host) + "\n";
        run_or_fail(command(host, {"ip", "-batch", "-"}), cable);
    }
}

Hosts::~Hosts() = default;

std::string Hosts::port_up(int host) const {
    const std::string port = "port" + std::to_string(host);
    std::string commands = "link set " + port + " up\n";
    if (made_of_ == Switch::Router) commands += "route replace " + address(host) + "/32 dev " + port + "\n";
    return commands;
}

void Hosts::ip_in_switch(const std::string& commands) const {
    const std::string network =
        "--net=/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(switch_.get());
    run_or_fail({"nsenter", network, "ip", "-batch", "-"}, commands);
}

std::vector<std::string> Hosts::command(int host, const std::vector<std::string>& argv) const {
    std::vector<std::string> words{
        path_of("ON_HOST"), socket_path(host), "env", "-u", "XDG_CONFIG_HOME", "-u",
        "TMPDIR",           "HOME=" + home_};
    words.insert(words.end(), argv.begin(), argv.end());
    return words;
}

void Hosts::cut_cable(int host) { ip_in_switch("link set port" + std::to_string(host) + " down\n"); }

void Hosts::mend_cable(int host) { ip_in_switch(port_up(host)); }

void Hosts::power_off(int host) {
    cut_cable(host);
    hosts_[static_cast<std::size_t>(host)]->power_off();
}

}  // namespace ddprun::test
