#include "tests/support/ssh_hosts.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace ddprun::test {

namespace {

constexpr const char* kSshd = "/usr/sbin/sshd";

void make_key(const std::string& path) {
    const Outcome outcome = run({"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path});
    if (outcome.status != 0) throw std::runtime_error("ssh-keygen: " + outcome.err);
}

void write_file(const std::string& path, const std::string& content) {
    std::ofstream(path) << content;
    ::chmod(path.c_str(), 0600);
}

}  // namespace

std::optional<std::string> SshHosts::why_not() {
    if (const auto reason = Hosts::why_not()) return reason;
    if (::access(kSshd, X_OK) != 0) return "no sshd on this machine (Debian's openssh-server)";
    return std::nullopt;
}

SshHosts::SshHosts(Hosts& hosts) {
    const std::string directory = hosts.home() + "/.ssh";
    std::filesystem::create_directory(directory);
    make_key(directory + "/id_ed25519");
    make_key(directory + "/host_key");
    std::filesystem::copy(directory + "/id_ed25519.pub", directory + "/authorized_keys");
    write_file(directory + "/config",
               "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n");
    // PAM would need the machine's accounts and login records. The limits allow the start of many hosts.
    write_file(
        directory + "/sshd_config",
        "HostKey " + directory + "/host_key\nAuthorizedKeysFile " + directory + "/authorized_keys\n" +
            "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nUseDNS no\nStrictModes no\nPidFile none\nMaxStartups 1000\nMaxSessions 1000\n");
    for (int host = 0; host < hosts.count(); ++host) {
        const std::vector<std::string> daemon{"sh", "-c", "mkdir -p /run/sshd && exec \"$0\" -D -e -f \"$1\"",
                                              kSshd, directory + "/sshd_config"};
        daemons_.push_back(std::make_unique<Program>(hosts.command(host, daemon)));
    }
    for (auto& daemon : daemons_) {
        if (!daemon->wait_for_output("Server listening on 0.0.0.0"))
            throw std::runtime_error("sshd: " + daemon->wait().err);
    }
}

std::string SshHosts::log(int host) {
    Program& daemon = *daemons_[static_cast<std::size_t>(host)];
    daemon.signal(SIGTERM);
    return daemon.wait().err;
}

}  // namespace ddprun::test
