// One command starts a job on several hosts: real sshds, each in a host of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/support/reserved_port.h"
#include "tests/support/ssh_hosts.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"
#include "tests/system/mpi_launchers.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class StartHosts : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = SshHosts::why_not()) GTEST_SKIP() << *reason;
        hosts_.emplace(3);
        ssh_.emplace(*hosts_);
    }
    [[nodiscard]] std::vector<std::string> on_head(std::vector<std::string> options,
                                                   const std::vector<std::string>& acts) const {
        return hosts_->command(0, ddprun_probe(options, acts));
    }
    /// The path of a file that all hosts see.
    [[nodiscard]] std::string file(const std::string& name, const std::string& content) const {
        const std::string path = hosts_->shared() + "/" + name;
        std::ofstream(path) << content;
        return path;
    }
    /// True when no worker, ddprun or warden is left on any host.
    [[nodiscard]] bool all_quiet() const {
        return comes(
            [&] {
                std::string left;
                for (int host = 0; host < hosts_->count(); ++host)
                    left += run(hosts_->command(host, {"ps", "-eo", "comm="})).out;
                return left.find("probe") == left.npos && left.find("ddprun") == left.npos &&
                       left.find("warden") == left.npos;
            },
            20s);
    }

    std::optional<Hosts> hosts_;
    std::optional<SshHosts> ssh_;
};

TEST_F(StartHosts, OneCommandRunsAJobOnAllHostsOfAHostFile) {
    const std::string hostfile = file("hosts", "node00 slots=1\nnode01 slots=2\nnode02:2\n");
    const Outcome outcome =
        run(on_head({"--hostfile=" + hostfile}, {"env", "RANK", "env", "WORLD_SIZE", "env", "GROUP_RANK",
                                                 "env", "MASTER_ADDR", "env", "WORD"}),
            with_environment({"WORD=from the head"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* line :
         {"[0]: RANK=0\n", "[1]: GROUP_RANK=1\n", "[2]: RANK=2\n", "[3]: GROUP_RANK=2\n", "[4]: RANK=4\n",
          "[4]: WORLD_SIZE=5\n", "[2]: MASTER_ADDR=node00\n", "[4]: WORD=from the head\n"}) {
        EXPECT_THAT(outcome.out, HasSubstr(line));
    }
    EXPECT_THAT(outcome.err,
                HasSubstr("ddprun: --hostfile " + hostfile +
                          ": 3 hosts node00,node01,node02; starting ddprun on the other 2 by ssh\n"));
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AnElasticJobOfHostsWithDifferentWorkerCountsGoesOnWithoutOne) {
    const std::string hostfile = file("hosts", "node00 slots=1\nnode01 slots=2\nnode02 slots=3\n");
    Program head(on_head({"--hostfile=" + hostfile, "--nnodes=2:3"},
                         {"env", "WORLD_SIZE", "say", "up", "generation", "1", "hold", "end"}));
    for (int rank = 0; rank < 6; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up")) << rank;
    ASSERT_EQ(run(hosts_->command(1, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "WORLD_SIZE=4\n"), 4) << outcome.out;
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AllHostsUseTheNetworkThatIfaceNames) {
    for (int host = 0; host < 2; ++host) {
        ASSERT_EQ(run(hosts_->command(host, {"ip", "address", "add",
                                             "10.99.0." + std::to_string(host + 1) + "/24", "dev", "eth0"}))
                      .status,
                  0);
    }
    const Outcome outcome = run(on_head({"--hosts=node[00-01]", "--nproc-per-node=1", "--iface=10.99.0.0/24"},
                                        {"env", "MASTER_ADDR", "env", "DDPRUN_STORE"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "MASTER_ADDR=10.99.0.1\n"), 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr("reach node01 at 10.99.0.2"));
}

TEST_F(StartHosts, HostsMeetAtThePortThatTheUserNames) {
    const Outcome outcome =
        run(on_head({"--hosts=node00,node01", "--nproc-per-node=1", "--rdzv-endpoint=node00:29777"},
                    {"env", "WORLD_SIZE"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "WORLD_SIZE=2\n"), 2) << outcome.out;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("controller on port 29777 "), Not(HasSubstr("--rdzv-endpoint"))));
}

TEST(StartBySsh, NamesTheExitCodeWhenALoginFileEndsTheShell) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("ssh")) << "#!/bin/sh\necho welcome\nexit 3\n";
    std::filesystem::permissions(directory.file("ssh"), std::filesystem::perms::owner_all);
    const Outcome outcome = run({path_of("DDPRUN"), "--hosts=192.0.2.1", "--nproc-per-node=1", "true"},
                                with_environment({"PATH=" + directory.path() + ":" + std::getenv("PATH")}));
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(
        outcome.err,
        HasSubstr(
            "192.0.2.1 cannot take part: welcome; ssh ended with exit code 3: does a login file of that host end the shell?"));
}

TEST(StartedDdprun, SaysOnceAndSoonWhatKeepsItFromTheHead) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("secret")) << "of the job";
    const ReservedPort closed;
    Program started({path_of("DDPRUN"), "agent", "--at", to_string(closed.endpoint()), "--job", "7",
                     "--secret", "file:" + directory.file("secret")});
    EXPECT_TRUE(started.wait_for_output("cannot reach the head: none of " + to_string(closed.endpoint()) +
                                        " answers: connect"));
    started.signal(SIGKILL);
    started.wait();
}

TEST_F(StartHosts, HostsFindAHeadThatSpeaksTls) {
    if (std::getenv("WITHOUT_TLS") != nullptr) GTEST_SKIP() << "built without OpenSSL 3";
    const Outcome outcome =
        run(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=1", "--tls"}, {"env", "WORLD_SIZE"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "WORLD_SIZE=3\n"), 3) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr("with TLS"));
}

TEST_F(StartHosts, WorkersRunInTheDirectoryOfTheCommand) {
    RunOptions options;
    options.directory = hosts_->shared();
    const Outcome outcome = run(
        hosts_->command(0, {path_of("DDPRUN"), "--hosts=node[00-01]", "--nproc-per-node=1", "pwd"}), options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: " + hosts_->shared() + "\n"),
                                   HasSubstr("[1]: " + hosts_->shared() + "\n")));
}

TEST_F(StartHosts, TheNetworkAndTheSeatsOfAllHostsAreLoggedOnce) {
    const Outcome outcome = run(on_head(
        {"--hosts=node00,node01,node02", "--nproc-per-node=1", "--numa-binding=exclusive", "--fabric=efa"},
        {"env", "FI_PROVIDER"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "FI_PROVIDER=efa\n"), 3) << outcome.out;
    EXPECT_EQ(occurrences(outcome.err, "fabric efa (--fabric efa): FI_PROVIDER=efa FI_EFA_FORK_SAFE=1\n"), 1)
        << outcome.err;
    EXPECT_EQ(occurrences(outcome.err, "seats on node00, node01, node02:\n"), 1) << outcome.err;
    EXPECT_EQ(occurrences(outcome.err, "  rank 0, 1, 2: CPUs "), 1) << outcome.err;
}

TEST_F(StartHosts, AWorkerThatFailsOnAnotherHostIsTheJobsCauseAndNothingIsLeft) {
    const Outcome outcome = run(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=2"},
                                        {"rank", "5", "err", "cannot go on", "exit", "17", "end", "hold"}));
    EXPECT_EQ(outcome.status, 17) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 5 on node02"), HasSubstr("cannot go on")));
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AHostThatCannotBeStartedIsNamedWithItsStartersOwnWords) {
    const Outcome outcome = run(on_head({"--hosts=node00,node01,nowhere", "--nproc-per-node=1"}, {"hold"}));
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("nowhere cannot take part: ssh: Could not resolve hostname nowhere"),
                      HasSubstr("1 of 3 hosts cannot take part: nowhere")));
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AHostThatDoesNotAnswerIsNamedWhenItsTimeIsOver) {
    hosts_->cut_cable(2);
    const Outcome outcome =
        run(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=1", "--start-timeout=2"}, {"hold"}));
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("node02 cannot take part: has not joined within 2 s (--start-timeout)"));
    hosts_->mend_cable(2);
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AProgramThatDiffersOnAHostIsShownWithBothIdentities) {
    // Each host has its own /tmp.
    for (const int host : {0, 1})
        ASSERT_EQ(run(hosts_->command(host, {"sh", "-c",
                                             "printf '#!/bin/sh\\necho " + std::to_string(host) +
                                                 "\\n' > /tmp/job; chmod +x /tmp/job"}))
                      .status,
                  0);
    const Outcome outcome = run(hosts_->command(
        0, {path_of("DDPRUN"), "--hosts=node00,node01,node02", "--nproc-per-node=1", "/tmp/job"}));
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("node01 cannot take part: the program differs: /tmp/job (17 bytes, sha256 "),
                      HasSubstr("on node00 /tmp/job (17 bytes, sha256 ")));
    EXPECT_THAT(outcome.err, HasSubstr("node02 cannot take part: /tmp/job: no such file"));
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AnInterruptEndsTheLookUpOfNamesOfANameServerThatDoesNotAnswer) {
    const std::string resolv = file("resolv.conf", "nameserver 127.0.0.1\n");
    ASSERT_EQ(run(hosts_->command(0, {"mount", "--bind", resolv, "/etc/resolv.conf"})).status, 0);
    Program server(hosts_->command(
        0,
        {"python3", "-B", "-c",
         "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('127.0.0.1', 53))\n"
         "print('deaf', flush=True)\ns.recv(512)\nprint('asked', flush=True)\nwhile True: s.recv(512)\n"}));
    ASSERT_TRUE(server.wait_for_output("deaf"));
    Program head(on_head({"--hosts=one.example,other.example", "--nproc-per-node=1"}, {"hold"}));
    ASSERT_TRUE(server.wait_for_output("asked"));
    head.signal(SIGINT);
    const Outcome outcome = head.wait();
    EXPECT_NE(outcome.status, 0);
    EXPECT_EQ(said_of_its_own_job(outcome), "") << "nothing had been decided yet";
    server.signal(SIGKILL);
    server.wait();
}

TEST_F(StartHosts, NothingOutlivesAKilledHead) {
    Program head(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=2"}, {"say", "up", "hold"}));
    for (int rank = 0; rank < 6; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    head.signal(SIGKILL);
    head.wait();
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, TheEndOfTheJobWaitsNeitherForTheSshToAHostWithoutPowerNorForAnotherHost) {
    Program head(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=1", "--heartbeat-timeout=3"},
                         {"say", "up", "hold"}));
    for (int rank = 0; rank < 3; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    hosts_->power_off(2);
    ASSERT_TRUE(head.wait_for_output("node node02: no heartbeat for 3 s"));
    const auto noticed = std::chrono::steady_clock::now();
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_LT(std::chrono::steady_clock::now() - noticed, 9s)
        << "10 s are for the last lines of a host that lives\n"
        << outcome.err;
}

TEST_F(StartHosts, ANodeThatIsStoppedForLongerThanTheTimeOutRejoins) {
    Program head(
        on_head({"--hosts=node00,node01", "--nproc-per-node=1", "--max-restarts=1", "--heartbeat-timeout=2"},
                {"generation", "1", "say", "up", "hold", "end", "say", "again"}));
    for (int rank = 0; rank < 2; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    ASSERT_EQ(run(hosts_->command(1, {"pkill", "-STOP", "-x", "ddprun"})).status, 0);
    ASSERT_TRUE(head.wait_for_output("node node01: no heartbeat for 2 s"));
    ASSERT_EQ(run(hosts_->command(1, {"pkill", "-CONT", "-x", "ddprun"})).status, 0);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "again"), 2) << outcome.out << outcome.err;
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AKilledNodeIsNotWaitedFor) {
    Program head(
        on_head({"--hosts=node00,node01", "--nproc-per-node=1", "--max-restarts=1"}, {"say", "up", "hold"}));
    for (int rank = 0; rank < 2; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    ASSERT_EQ(run(hosts_->command(1, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("1 of 2 nodes are left, and none can come"));
}

TEST_F(StartHosts, AnInterruptWhileAHostDoesNotAnswerEndsTheStartSoon) {
    hosts_->cut_cable(2);
    Program head(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=1"}, {"hold"}));
    ASSERT_TRUE(head.wait_for_output("[node01 agent] the controller is at"));
    head.signal(SIGINT);
    const auto asked = std::chrono::steady_clock::now();
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_LT(std::chrono::steady_clock::now() - asked, 9s) << "10 s are for the last lines of workers\n"
                                                            << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("[node00 job] the job is over")));
    hosts_->mend_cable(2);
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, TheEndOfItsStarterStopsAHost) {
    Program head(on_head({"--hosts=node00,node01", "--nproc-per-node=1"}, {"say", "up", "hold"}));
    for (int rank = 0; rank < 2; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    ASSERT_EQ(run(hosts_->command(0, {"pkill", "-9", "-x", "ssh"})).status, 0);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("[node00 job g1] node01: the program that started this ddprun has exited"));
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, TheSecretStandsOnNoCommandLineAndInNoFile) {
    Program head(on_head({"--hosts=node00,node01", "--nproc-per-node=1"},
                         {"env", "DDPRUN_TOKEN", "say", "up", "hold"}));
    ASSERT_TRUE(head.wait_for_output("[0]: up") && head.wait_for_output("[1]: up"));
    std::string commands;
    for (int host = 0; host < 2; ++host) commands += run(hosts_->command(host, {"ps", "-eo", "args="})).out;
    head.signal(SIGTERM);
    const Outcome outcome = head.wait();
    EXPECT_THAT(commands, HasSubstr("--secret stdin"));
    const std::size_t at = outcome.out.find("DDPRUN_TOKEN=");
    ASSERT_NE(at, std::string::npos) << outcome.out;
    EXPECT_THAT(commands, Not(HasSubstr(outcome.out.substr(at + 13, 16))));
    EXPECT_THAT(outcome.err, Not(HasSubstr(outcome.out.substr(at + 13, 16))));
}

/// The hosts' home directory, in which programs start, is full.
class StartInAFullHome : public StartHosts {
  protected:
    void SetUp() override {
        StartHosts::SetUp();
        if (IsSkipped()) return;
        const char* fill =
            "cp -a \"$0\" /tmp/home && mount -t tmpfs -o size=256k tmpfs \"$0\" && cp -a /tmp/home/. \"$0\" && cat /dev/zero >\"$0/fill\" 2>/dev/null; test -s \"$0/fill\"";
        for (int host = 0; host < hosts_->count(); ++host)
            ASSERT_EQ(run(hosts_->command(host, {"sh", "-c", fill, hosts_->home()})).status, 0);
    }
    [[nodiscard]] Outcome start_there(const std::vector<std::string>& options,
                                      const RunOptions& how = {}) const {
        return run(hosts_->command(0, join_words({"sh", "-c", "cd && exec \"$0\" \"$@\""},
                                                 ddprun_probe(options, {"say", "started"}))),
                   how);
    }
    [[nodiscard]] std::string left_there() const {
        return run(hosts_->command(
                       0, {"sh", "-c", "ls -A \"$0\" | grep -v -e ^.ssh$ -e ^fill$", hosts_->home()}))
            .out;
    }
};

TEST_F(StartInAFullHome, AStartBySshNeedsNoRoomAndFilesThatCannotBeWrittenAreNamedOnEachHost) {
    const Outcome outcome =
        start_there({"--hosts=node00,node01,node02", "--nproc-per-node=1", "--log-dir=logs/of/job"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "]: started\n"), 3) << outcome.out;
    EXPECT_EQ(occurrences(outcome.err, "No space left on device"), 3) << outcome.err;
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartInAFullHome, ASecretThatNeedsAFileEndsTheStartWithOneLineAndLeavesNothing) {
    const std::string mpiexec = file("mpiexec", "#!/bin/sh\necho mpiexec ran\n");
    std::filesystem::permissions(mpiexec, std::filesystem::perms::owner_all);
    const Outcome outcome =
        start_there({"--hosts=node00,node01,node02", "--nproc-per-node=1", "--start=mpiexec"},
                    with_environment({"PATH=" + hosts_->shared() + ":" + std::getenv("PATH")}));
    EXPECT_EQ(outcome.status, 70) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("ddprun: the job's secret, for the other hosts ("),
                                   HasSubstr("No space left on device"), HasSubstr("--start=ssh")));
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(left_there(), "");
    EXPECT_TRUE(all_quiet());
}

/// Each host has another number of GPUs, and its own /tmp.
class StartWithGpus : public StartHosts {
  protected:
    [[nodiscard]] Outcome start(const std::vector<int>& gpus, const std::string& count) const {
        for (std::size_t host = 0; host < gpus.size(); ++host) {
            std::vector<std::string> each;
            for (int gpu = 0; gpu < gpus[host]; ++gpu)
                each.push_back("{\"name\": \"H100\", \"uuid\": \"GPU-" + std::to_string(gpu) + "\"}");
            const std::string machine = "{\"driver\": \"580.65.06\", \"gpus\": [" + join(each, ",") + "]}";
            EXPECT_EQ(run(hosts_->command(static_cast<int>(host),
                                          {"sh", "-c", "echo \"$0\" >/tmp/machine", machine}))
                          .status,
                      0);
        }
        return run(on_head({"--hosts=node00,node01,node02", "--nproc-per-node=" + count},
                           {"env", "LOCAL_WORLD_SIZE", "env", "WORLD_SIZE"}),
                   with_environment(
                       {"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"), "FAKE_NVML=/tmp/machine"}));
    }
};

TEST_F(StartWithGpus, EachHostHasAWorkerForEachOfItsOwnGpus) {
    const Outcome outcome = start({1, 3, 2}, "gpu");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "]: WORLD_SIZE=6\n"), 6) << outcome.out;
    for (const char* line : {"[0]: LOCAL_WORLD_SIZE=1\n", "[1]: LOCAL_WORLD_SIZE=3\n",
                             "[3]: LOCAL_WORLD_SIZE=3\n", "[5]: LOCAL_WORLD_SIZE=2\n"})
        EXPECT_THAT(outcome.out, HasSubstr(line));
}

TEST_F(StartWithGpus, AHostWithoutGpusIsNamedAndNothingRuns) {
    const Outcome outcome = start({2, 2, 0}, "gpu");
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("node02 cannot take part: --nproc-per-node"),
                                   HasSubstr("1 of 3 hosts cannot take part: node02")));
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(all_quiet());
}

/// Puts Hydra's mpiexec before any other in PATH.
class StartByMpiexec : public StartHosts {
  protected:
    void SetUp() override {
        if (!has("HYDRA")) GTEST_SKIP() << "no Hydra (Debian's mpich)";
        StartHosts::SetUp();
        if (IsSkipped()) return;
        std::filesystem::create_directory(hosts_->shared() + "/bin");
        const std::string mpiexec = file("bin/mpiexec", "#!/bin/sh\nexec " + path_of("HYDRA") + " \"$@\"\n");
        std::filesystem::permissions(mpiexec, std::filesystem::perms::owner_all);
        options_ = with_environment({"PATH=" + hosts_->shared() + "/bin:" + std::getenv("PATH")});
        options_.directory = hosts_->shared();
    }
    [[nodiscard]] std::string secret_files() const {
        return run(hosts_->command(0, {"sh", "-c", "ls -A \"$0\" | grep ^.ddprun-", hosts_->shared()})).out;
    }
    RunOptions options_;
};

TEST_F(StartByMpiexec, StartsTheOthersWithASecretFileThatIsRemovedThen) {
    const Outcome outcome =
        run(on_head({"--hosts=node00,node01,node02", "--start=mpiexec", "--nproc-per-node=2"},
                    {"env", "GROUP_RANK", "env", "WORLD_SIZE", "rank", "5", "exit", "7", "end", "hold"}),
            options_);
    EXPECT_EQ(outcome.status, 7) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("starting ddprun on the other 2 by mpiexec"), HasSubstr("rank 5 on node02")));
    EXPECT_THAT(outcome.out, HasSubstr("[5]: GROUP_RANK=2\n"));
    EXPECT_EQ(secret_files(), "");
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartByMpiexec, AHostThatCannotBeStartedIsNamedAndAKilledHeadLeavesNothing) {
    const Outcome outcome = run(on_head({"--hosts=node00,node01,nowhere", "--start=mpiexec",
                                         "--start-timeout=3", "--nproc-per-node=1"},
                                        {"hold"}),
                                options_);
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("nowhere cannot take part: has not joined within 3 s (--start-timeout)"))
        << "Hydra itself waits for ever";
    Program head(on_head({"--hosts=node00,node01,node02", "--start=mpiexec", "--nproc-per-node=1"},
                         {"say", "up", "hold"}),
                 options_);
    for (int rank = 0; rank < 3; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    head.signal(SIGKILL);
    head.wait();
    EXPECT_TRUE(all_quiet());
    EXPECT_EQ(secret_files(), "");
}

TEST_F(StartHosts, AHostOutsideTheHostsIsTheHeadAndRunsNoWorkers) {
    const Outcome outcome = run(on_head({"--hosts=node02:2,node01:1"},
                                        {"env", "WORLD_SIZE", "env", "GROUP_RANK", "env", "MASTER_ADDR"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(
        outcome.err,
        HasSubstr(
            "ddprun: --hosts: 2 hosts node02,node01; this host (node00) is none of them and runs no workers; starting ddprun on all 2 by ssh\n"));
    const std::string first = Hosts::address(2);
    for (const std::string& line : {"[0]: MASTER_ADDR=" + first + "\n", "[2]: MASTER_ADDR=" + first + "\n",
                                    std::string("[1]: GROUP_RANK=0\n"), std::string("[2]: GROUP_RANK=1\n")}) {
        EXPECT_THAT(outcome.out, HasSubstr(line));
    }
    EXPECT_EQ(occurrences(outcome.out, "WORLD_SIZE=3\n"), 3) << outcome.out;
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AHeadOutsideTheHostsNeedsOneHostOnlyAndNoGpu) {
    const Outcome outcome =
        run(on_head({"--hosts=node01", "--nproc-per-node=2"},
                    {"env", "WORLD_SIZE", "rank", "1", "err", "cannot go on", "exit", "17", "end", "hold"}));
    EXPECT_EQ(outcome.status, 17) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("[1]: WORLD_SIZE=2\n"));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 1 on node01"), HasSubstr("cannot go on")));
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AHeadOutsideTheHostsPassesSignalsOnAnswersQuestionsAndLeavesNothing) {
    Program head(on_head({"--hosts=node01,node02", "--nproc-per-node=1"}, {"say", "up", "hold"}));
    for (int rank = 0; rank < 2; ++rank)
        ASSERT_TRUE(head.wait_for_output("[" + std::to_string(rank) + "]: up"));
    const Outcome ps = run(hosts_->command(0, {path_of("DDPRUN"), "ps"}));
    EXPECT_THAT(ps.out, AllOf(HasSubstr("node01"), HasSubstr("node02"))) << ps.err;
    head.signal(SIGTERM);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_TRUE(all_quiet());
}

TEST_F(StartHosts, AHeadOutsideTheHostsRestartsWorkersAfterAFailure) {
    const Outcome outcome = run(on_head({"--hosts=node01,node02", "--nproc-per-node=1", "--max-restarts=1"},
                                        {"rank", "1", "once", hosts_->shared() + "/failed", "exit", "3",
                                         "end", "env", "TORCHELASTIC_RESTART_COUNT"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "TORCHELASTIC_RESTART_COUNT=1\n"), 2) << outcome.out;
}

}  // namespace
}  // namespace ddprun::test
