#include "tests/support/slurm_hosts.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tests/support/comes.h"
#include "tests/system/look.h"

namespace ddprun::test {

namespace {

using namespace std::chrono_literals;

/// The waits are short, because these programs live for seconds.
std::string slurm_conf(const Hosts& hosts, const std::string& directory, const std::string& more) {
    return "ClusterName=test\nSlurmctldHost=node00\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nAuthInfo=cred_expire=5\n"
           "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n"
           "SlurmdParameters=config_overrides\nReturnToService=2\nMpiDefault=none\nJobRequeue=1\nKillWait=5\nCompleteWait=0\n"
           "InactiveLimit=0\nSchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1\n"
           "StateSaveLocation=" +
           directory +
           "/state\nSlurmdSpoolDir=/run/slurmd\n"
           "SlurmctldPidFile=/run/slurmctld.pid\nSlurmdPidFile=/run/slurmd.pid\n"
           "NodeName=node[00-" +
           Hosts::name(hosts.count() - 1).substr(4) +
           "] CPUs=4 State=UNKNOWN\n"
           "PartitionName=main Nodes=ALL Default=YES OverSubscribe=YES MaxTime=INFINITE State=UP\n" +
           more;
}

}  // namespace

std::optional<std::string> SlurmHosts::why_not() {
    if (const auto reason = Hosts::why_not()) return reason;
    for (const char* program :
         {"/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged", "/usr/bin/srun"}) {
        if (::access(program, X_OK) != 0)
            return std::string("no ") + program + " on this machine (Debian's slurm-wlm and munge)";
    }
    if (::access("/etc/slurm", F_OK) != 0) return "no /etc/slurm on this machine";
    return std::nullopt;
}

SlurmHosts::SlurmHosts(const Hosts& hosts, const std::string& more)
    : hosts_(hosts), directory_(hosts.shared() + "/slurm") {
    std::filesystem::create_directories(directory_ + "/state");
    std::ofstream(directory_ + "/munge.key") << std::string(64, 'k') << unique_name("key");
    ::chmod((directory_ + "/munge.key").c_str(), 0600);
    // slurmd needs a version even if nothing uses cgroups.
    std::ofstream(directory_ + "/cgroup.conf") << "CgroupPlugin=cgroup/v1\n";
    std::ofstream(directory_ + "/slurm.conf") << slurm_conf(hosts, directory_, more);
    for (int host = 0; host < hosts.count(); ++host) {
        // Mounted in the host's namespace, so that every later program of the host sees it.
        const Outcome mounted = test::run(hosts.command(
            host,
            {"sh", "-c", "mkdir -p /run/munge /run/slurmd && mount --bind \"$0\" /etc/slurm", directory_}));
        if (mounted.status != 0) throw std::runtime_error("slurm: " + mounted.err);
        start(host, {"/usr/sbin/munged", "--foreground", "--force", "--key-file=" + directory_ + "/munge.key",
                     "--num-threads=1", "--seed-file=/run/munge/seed", "--pid-file=/run/munge/pid",
                     "--log-file=/run/munge/log"});
    }
    for (int host = 0; host < hosts.count(); ++host) {
        const bool is_up = comes([&] { return test::run(hosts.command(host, {"munge", "-n"})).status == 0; });
        if (!is_up) throw std::runtime_error("slurm: munged does not answer on " + Hosts::name(host));
        if (host == 0) start(0, {"/usr/sbin/slurmctld", "-D"});
        start(host, {"/usr/sbin/slurmd", "-D", "-N", Hosts::name(host)});
    }
    const std::string all_idle = std::to_string(hosts.count()) + " idle\n";
    const bool is_ready = comes([&] { return run({"sinfo", "-h", "-o", "%D %T"}).out == all_idle; });
    if (is_ready) return;
    std::string logs = run({"sinfo", "-h", "-o", "%D %T %E"}).out;
    for (int host = 0; host < hosts.count(); ++host)
        logs += file_content(directory_ + "/log." + Hosts::name(host));
    throw std::runtime_error("slurm: its nodes are not idle: " + logs);
}

SlurmHosts::~SlurmHosts() = default;

void SlurmHosts::start(int host, const std::vector<std::string>& daemon) {
    // The daemons write much, and no one reads the pipes.
    std::vector<std::string> quiet{
        "sh", "-c", "exec \"$@\" >>" + directory_ + "/log." + Hosts::name(host) + " 2>&1", "sh"};
    quiet.insert(quiet.end(), daemon.begin(), daemon.end());
    daemons_.push_back(std::make_unique<Program>(hosts_.command(host, quiet)));
}

Outcome SlurmHosts::run(const std::vector<std::string>& command, const std::string& input) const {
    RunOptions options;
    options.directory = hosts_.home();
    options.input = input;
    return test::run(hosts_.command(0, command), options);
}

std::string SlurmHosts::submit(const std::string& script, const std::vector<std::string>& options) const {
    const std::string path = hosts_.home() + "/job.sh";
    std::ofstream(path) << "#!/bin/bash\n" << script << "\n";
    std::vector<std::string> command{"sbatch", "--parsable", "--output=out"};
    command.insert(command.end(), options.begin(), options.end());
    command.push_back(path);
    const Outcome outcome = run(command);
    if (outcome.status != 0) throw std::runtime_error("sbatch: " + outcome.err);
    return outcome.out.substr(0, outcome.out.find('\n'));
}

std::string SlurmHosts::await_state(const std::string& id, const std::vector<std::string>& states) const {
    std::string state;
    (void)comes([&] {
        const std::string told = run({"scontrol", "-o", "show", "job", id}).out;
        const std::size_t at = told.find("JobState=");
        state = at == std::string::npos ? "" : told.substr(at + 9, told.find(' ', at) - at - 9);
        return std::count(states.begin(), states.end(), state) > 0;
    });
    return state;
}

bool SlurmHosts::await_text(const std::string& file, const std::string& text) const {
    return comes([&] { return file_content(hosts_.home() + "/" + file).find(text) != std::string::npos; });
}

}  // namespace ddprun::test
