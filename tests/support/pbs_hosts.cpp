#include "tests/support/pbs_hosts.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>

namespace ddprun::test {

namespace {

std::string program_path(const std::string& name) { return path_of("FAKE_PBS_PROGRAMS") + "/" + name; }

std::string in_seconds(std::chrono::milliseconds time) {
    return std::to_string(std::chrono::duration<double>(time).count());
}

}  // namespace

std::optional<std::string> PbsHosts::why_not() {
    if (const auto reason = Hosts::why_not()) return reason;
    if (::access("/usr/bin/python3", X_OK) != 0) return "no /usr/bin/python3 on this machine";
    return std::nullopt;
}

PbsHosts::PbsHosts(const Hosts& hosts, const Settings& settings)
    : home_(hosts.home()), state_(hosts.shared() + "/pbs") {
    for (const char* directory : {"", "/bin", "/jobs"}) std::filesystem::create_directory(state_ + directory);
    for (const char* name : {"qsub", "qstat", "qdel", "qrerun", "pbsdsh", "pbs_tmrsh", "pbs_attach"}) {
        std::filesystem::create_symlink(program_path("commands.py"), bin() + "/" + name);
    }
    // Sites do this in /etc/profile.d.
    std::ofstream(home_ + "/.bash_profile") << "PATH=$PATH:" << bin() << "\n";
    std::string facts;
    for (int host = 0; host < hosts.count(); ++host) {
        facts += std::string(host == 0 ? "" : ", ") + "\"" + Hosts::name(host) + "\": {\"socket\": \"" +
                 hosts.socket_path(host) + "\", \"ncpus\": " + std::to_string(settings.cpus) +
                 ", \"ngpus\": " + std::to_string(settings.gpus) + "}";
    }
    std::ofstream(state_ + "/config.json")
        << "{\"name\": \"server\", \"queues\": [\"workq\", \"main\", \"preempt\", \"debug\"], \"kill_delay\": "
        << in_seconds(settings.kill_delay) << ", \"poll\": " << in_seconds(settings.poll) << ", \"hosts\": {"
        << facts << "}}\n";
    RunOptions own;
    own.timeout = std::chrono::hours(1);
    server_ = std::make_unique<Program>(
        std::vector<std::string>{"setpriv", "--pdeathsig", "KILL", program_path("server.py"), state_}, own);
    if (!server_->wait_for_output("serving"))
        throw std::runtime_error("the fake PBS does not start: " + server_->wait().err);
}

PbsHosts::~PbsHosts() {
    server_->signal(SIGKILL);
    std::cerr << server_->wait().err;  // an error of the fake server itself
}

RunOptions PbsHosts::options() const {
    RunOptions options = with_environment({"HOME=" + home_, "PATH=" + bin() + ":" + std::getenv("PATH")});
    options.unset = {"XDG_CONFIG_HOME", "TMPDIR"};
    options.directory = home_;
    return options;
}

}  // namespace ddprun::test
