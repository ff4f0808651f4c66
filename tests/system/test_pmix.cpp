// Programs of MPI and PMIx as workers, with ddprun as their PMIx server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/ssh_hosts.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

bool has(const char* program) { return std::getenv(program) != nullptr; }

/// Runs without prefixes, so that a rank's line is what it wrote. MPI traffic within a host uses the
/// loopback.
std::vector<std::string> ddprun_with(const std::vector<std::string>& options, const char* program,
                                     const std::vector<std::string>& acts) {
    std::vector<std::string> command = {path_of("DDPRUN"), "--prefix=none"};
    command.insert(command.end(), options.begin(), options.end());
    command.push_back(path_of(program));
    command.insert(command.end(), acts.begin(), acts.end());
    return command;
}

RunOptions over_loopback(const std::string& marker = "PROBE=0") {
    return with_environment({marker, "OMPI_MCA_btl_tcp_if_include=lo", "DDPRUN_TOKEN=secret of the job"});
}

const auto kRingOfFour = ElementsAre("rank 0 of 4: ring 4, sum 6", "rank 1 of 4: ring 2, sum 6",
                                     "rank 2 of 4: ring 3, sum 6", "rank 3 of 4: ring 4, sum 6");
const auto kDoneOfFour =
    ElementsAre("rank 0 of 4 is done", "rank 1 of 4 is done", "rank 2 of 4 is done", "rank 3 of 4 is done");

/// Two ddprun on this host, with two workers each.
class TwoNodes {
  public:
    TwoNodes(const std::vector<std::string>& options, const char* program,
             const std::vector<std::string>& acts, const std::string& marker = "PROBE=0") {
        for (int node = 0; node < 2; ++node) {
            std::vector<std::string> all = {"--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1",
                                            "--master-port=" + port_.number(),
                                            "--node-rank=" + std::to_string(node)};
            all.insert(all.end(), options.begin(), options.end());
            nodes_[static_cast<std::size_t>(node)] =
                std::make_unique<Program>(ddprun_with(all, program, acts), over_loopback(marker));
        }
    }
    Program& operator[](int node) { return *nodes_[static_cast<std::size_t>(node)]; }
    /// The lines of all ranks; both nodes must succeed.
    std::vector<std::string> lines() {
        const Outcome zero = nodes_[0]->wait(), one = nodes_[1]->wait();
        EXPECT_EQ(zero.status, 0) << zero.err;
        EXPECT_EQ(one.status, 0) << one.err;
        return sorted_lines(zero.out + one.out);
    }

  private:
    ReservedPort port_;
    std::array<std::unique_ptr<Program>, 2> nodes_;
};

/// PMIX_SERVER_TMPDIR of a worker that carries the marker; "" when no worker has one.
std::string directory_of_workers(const std::string& marker) {
    for (const pid_t pid : processes_with(marker)) {
        const std::string environment = file_content("/proc/" + std::to_string(pid) + "/environ");
        for (const std::string_view variable : split(environment, '\0')) {
            if (variable.starts_with("PMIX_SERVER_TMPDIR=")) return std::string(variable.substr(19));
        }
    }
    return "";
}

class MpiWorkers : public ::testing::Test {
    void SetUp() override {
        if (!has("MPI_PROBE")) GTEST_SKIP() << "no Open MPI to compile with on this machine";
    }
};

class PmixWorkers : public ::testing::Test {
    void SetUp() override {
        if (!has("PMIX_PROBE")) GTEST_SKIP() << "built without PMIx";
    }
};

// ---- Open MPI

TEST_F(MpiWorkers, OfOneNodeAreOneWorldWithoutAnOption) {
    const Outcome outcome = run(ddprun_with({"--nproc-per-node=4"}, "MPI_PROBE", {}), over_loopback());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), kRingOfFour);
    EXPECT_EQ(said_of_its_own_job(outcome), "");
}

TEST_F(MpiWorkers, OfTwoNodesAreOneWorld) {
    TwoNodes nodes({}, "MPI_PROBE", {});
    EXPECT_THAT(nodes.lines(), kRingOfFour);
}

TEST_F(MpiWorkers, OfTwoHostsAreOneWorld) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    std::vector<std::unique_ptr<Program>> nodes;
    for (int node = 0; node < 2; ++node) {
        const std::vector<std::string> options = {"--nnodes=2", "--nproc-per-node=2",
                                                  "--master-addr=" + Hosts::name(0), "--master-port=29500",
                                                  "--node-rank=" + std::to_string(node)};
        nodes.push_back(std::make_unique<Program>(hosts.command(node, ddprun_with(options, "MPI_PROBE", {})),
                                                  with_environment({"DDPRUN_TOKEN=secret of the job"})));
    }
    const Outcome zero = nodes[0]->wait(), one = nodes[1]->wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(sorted_lines(zero.out + one.out), kRingOfFour);
    // Hosts also see a checkout that lies in /tmp.
    const std::string left =
        "ls -d /dev/shm/* /tmp/*openmpi* /tmp/*ompi* /tmp/*pmix* /tmp/*vader* /tmp/ddprun-* /tmp/prte* 2>/dev/null";
    for (int host = 0; host < 2; ++host) EXPECT_EQ(run(hosts.command(host, {"sh", "-c", left})).out, "");
}

TEST_F(MpiWorkers, OfTwoHostsThatOneCommandHasStartedAreStartedAgainWhenOneIsKilled) {
    if (const auto reason = SshHosts::why_not()) GTEST_SKIP() << *reason;
    Hosts hosts(2);
    const SshHosts ssh(hosts);
    const std::string file = hosts.shared() + "/killed";
    const Outcome outcome =
        run(hosts.command(0, ddprun_with({"--hosts=node00,node01", "--nproc-per-node=2", "--max-restarts=1"},
                                         "MPI_PROBE", {"kill-once", "3", file})));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_TRUE(std::filesystem::exists(file));
    EXPECT_THAT(sorted_lines(outcome.out), kRingOfFour);
}

TEST_F(MpiWorkers, RunWithoutDaemonsOfMpi) {
    const std::string marker = "PROBE_JOB=" + unique_name("mpi");
    Program job(ddprun_with({"--nproc-per-node=2"}, "MPI_PROBE", {"hold"}), over_loopback(marker));
    for (const char* rank : {"up: 0 of 2", "up: 1 of 2"}) ASSERT_TRUE(job.wait_for_output(rank));
    std::vector<std::string> names;
    for (const pid_t pid : processes_with(marker)) {
        const std::string name(trim(file_content("/proc/" + std::to_string(pid) + "/comm")));
        if (pid != job.pid() && name != "warden") names.push_back(name);
    }
    EXPECT_THAT(names, ElementsAre("mpi_probe", "mpi_probe"));
    job.signal(SIGTERM);
    EXPECT_EQ(job.wait().status, 75);
}

TEST_F(MpiWorkers, AreStartedAgainWhenOneIsKilled) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_with({"--nproc-per-node=4", "--max-restarts=1"}, "MPI_PROBE",
                                            {"kill-once", "2", directory.file("x")}),
                                over_loopback());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), kRingOfFour);
    EXPECT_THAT(outcome.err, HasSubstr("rank 2"));
}

TEST_F(MpiWorkers, OfTwoNodesAreStartedAgainWhenOneIsKilled) {
    const TemporaryDirectory directory;
    TwoNodes nodes({"--max-restarts=1"}, "MPI_PROBE", {"kill-once", "3", directory.file("x")});
    EXPECT_THAT(nodes.lines(), kRingOfFour);
}

TEST_F(MpiWorkers, AnMpiAbortFailsTheJobWithItsCode) {
    TwoNodes nodes({}, "MPI_PROBE", {"abort", "3", "42"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 42) << zero.err;
    EXPECT_EQ(one.status, 42) << one.err;
    EXPECT_THAT(zero.err, AllOf(HasSubstr("root cause: rank 3"), HasSubstr("it called MPI_Abort with 42")));
}

TEST_F(MpiWorkers, LeavingWithoutFinalizeFailTheJobInsteadOfHangingIt) {
    const Outcome outcome =
        run(ddprun_with({"--nproc-per-node=3"}, "MPI_PROBE", {"leave", "1"}), over_loopback());
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("root cause: rank 1"), HasSubstr("exit code 0 but without MPI_Finalize")));
}

TEST_F(MpiWorkers, LeaveNoFileBehindWhenDdprunIsKilled) {
    const std::string marker = "PROBE_JOB=" + unique_name("mpi");
    Program job(ddprun_with({"--nproc-per-node=2"}, "MPI_PROBE", {"hold"}), over_loopback(marker));
    for (const char* rank : {"up: 0 of 2", "up: 1 of 2"}) ASSERT_TRUE(job.wait_for_output(rank));
    const std::filesystem::path directory = directory_of_workers(marker);
    ASSERT_TRUE(std::filesystem::exists(directory / "1")) << "where MPI's shared memory lies";
    EXPECT_FALSE(std::filesystem::is_empty(directory / "1"));
    job.signal(SIGKILL);
    job.wait();
    EXPECT_TRUE(all_gone(marker));  // the warden too, which removes it last
    EXPECT_FALSE(std::filesystem::exists(directory));
}

TEST_F(MpiWorkers, LeaveNoFileBehindWhenTheyAreStopped) {
    const std::string marker = "PROBE_JOB=" + unique_name("mpi");
    Program job(ddprun_with({"--nproc-per-node=2"}, "MPI_PROBE", {"hold"}), over_loopback(marker));
    for (const char* rank : {"up: 0 of 2", "up: 1 of 2"}) ASSERT_TRUE(job.wait_for_output(rank));
    const std::filesystem::path directory = directory_of_workers(marker);
    ASSERT_TRUE(std::filesystem::exists(directory));
    job.signal(SIGTERM);
    EXPECT_EQ(job.wait().status, 75);
    EXPECT_FALSE(std::filesystem::exists(directory));
}

TEST_F(MpiWorkers, OfADdprunUnderMpirunAreItsOwnWorld) {
    if (!has("OPEN_MPI")) GTEST_SKIP() << "no mpirun of Open MPI on this machine";
    std::vector<std::string> command = {path_of("OPEN_MPI"), "--allow-run-as-root", "-n", "1"};
    for (const std::string& word : ddprun_with({"--nproc-per-node=4"}, "MPI_PROBE", {}))
        command.push_back(word);
    const Outcome outcome = run(command, over_loopback());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), kRingOfFour);
}

TEST_F(MpiWorkers, WithTheOuterLaunchersVariablesUseItsServer) {
    if (!has("OPEN_MPI")) GTEST_SKIP() << "no mpirun of Open MPI on this machine";
    std::vector<std::string> command = {path_of("OPEN_MPI"), "--allow-run-as-root", "--oversubscribe", "-n",
                                        "4"};
    for (const std::string& word : ddprun_with({"--per-rank", "--pass-mpi-env"}, "MPI_PROBE", {}))
        command.push_back(word);
    const TemporaryDirectory directory;  // the ddpruns meet here: PMIx is for the workers
    RunOptions options = over_loopback();
    options.environment.push_back("DDPRUN_EXCHANGE_DIR=" + directory.path());
    const Outcome outcome = run(command, options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), kRingOfFour);
}

TEST_F(MpiWorkers, OfADdprunPerRankAreOneWorldToo) {
    if (!has("OPEN_MPI")) GTEST_SKIP() << "no mpirun of Open MPI on this machine";
    std::vector<std::string> command = {path_of("OPEN_MPI"), "--allow-run-as-root", "--oversubscribe", "-n",
                                        "4"};
    for (const std::string& word : ddprun_with({"--per-rank"}, "MPI_PROBE", {})) command.push_back(word);
    const Outcome outcome = run(command, over_loopback());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), kRingOfFour);
}

/// Two workers without a PMIx server: each is a world of its own.
Outcome run_one_each(const std::string& option, const std::string& variable) {
    const TemporaryDirectory directory;
    RunOptions options = over_loopback();
    options.environment.push_back("TMPDIR=" + directory.path());
    options.environment.push_back(variable);
    Outcome outcome = run(ddprun_with({"--nproc-per-node=2", option}, "MPI_PROBE", {"apart"}), options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out),
                ElementsAre("rank 0 of 1: ring 1, sum 0", "rank 0 of 1: ring 1, sum 0"));
    return outcome;
}

TEST_F(MpiWorkers, WithPmixOffAreOneEach) { run_one_each("--pmix=off", "PROBE=0"); }

TEST_F(MpiWorkers, OfAScriptGetALineAboutTheMissingServer) {
    const char* const script = "exec env LD_PRELOAD=libmpi.so.40 sleep 600";
    Program program(
        {path_of("DDPRUN"), "--nproc-per-node=2", "--shutdown-timeout=0", "/bin/sh", "-c", script},
        over_loopback());
    EXPECT_TRUE(program.wait_for_output("has loaded libmpi.so.40"))
        << "by its first look, a second after the start";
    program.signal(SIGTERM);
    EXPECT_THAT(program.wait().err, HasSubstr("each worker is rank 0 of 1; say --pmix on"));
}

TEST_F(MpiWorkers, WithoutLibpmixAreOneEachAndTheReasonIsLogged) {
    const TemporaryDirectory empty;
    const std::string missing = empty.file("libpmix.so.2");
    EXPECT_THAT(run_one_each("--pmix=auto", "DDPRUN_PMIX_LIBRARY=" + missing).err,
                AllOf(HasSubstr("linked with libmpi.so"), HasSubstr(missing), HasSubstr("--pmix off")));
}

// ---- PMIx itself

TEST_F(PmixWorkers, AFenceCollectsTheValuesOfAllRanksOfAllNodes) {
    TwoNodes nodes({}, "PMIX_PROBE", {"fence"});
    EXPECT_THAT(nodes.lines(), kDoneOfFour);
}

TEST_F(PmixWorkers, ARanksValuesAreFoundWithoutAFence) {
    TwoNodes nodes({}, "PMIX_PROBE", {"modex"});
    EXPECT_THAT(nodes.lines(), kDoneOfFour);
}

TEST_F(PmixWorkers, AFenceOfSomeRanksIsCompleteWithoutTheOthers) {
    TwoNodes nodes({}, "PMIX_PROBE", {"part"});
    EXPECT_THAT(nodes.lines(), kDoneOfFour);
}

TEST_F(PmixWorkers, AFenceEndsWhenARankOfItIsDead) {
    TwoNodes nodes({"--shutdown-timeout=60", "--failure-grace=60"}, "PMIX_PROBE", {"widow"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 3) << zero.err;
    EXPECT_EQ(one.status, 3) << one.err;
    EXPECT_THAT(zero.err, HasSubstr("root cause: rank 1"));
    EXPECT_EQ(occurrences(zero.out + one.out, "the fence ended"), 3) << "they ignore SIGTERM";
    EXPECT_LT(zero.took, 50s) << "before anybody's grace was over";
}

TEST_F(PmixWorkers, AnAbortEndsAWorkerThatGoesOnAndItsMessageIsReported) {
    const Outcome outcome = run(
        ddprun_with({"--nproc-per-node=2", "--failure-grace=1"}, "PMIX_PROBE", {"abort"}), over_loopback());
    EXPECT_EQ(outcome.status, 9) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 1"), HasSubstr("the sea is too rough")));
}

TEST_F(PmixWorkers, MissingValuesAreRefusedAndNoRankHangs) {
    TwoNodes nodes({}, "PMIX_PROBE", {"absent"});
    const std::vector<std::string> lines = nodes.lines();
    EXPECT_EQ(lines.size(), 8U);
    for (const std::string& line : lines) {
        if (line.find("publish") == std::string::npos) continue;
        EXPECT_THAT(line, AllOf(Not(HasSubstr("get SUCCESS")), HasSubstr("publish NOT-SUPPORTED")));
    }
}

TEST_F(PmixWorkers, ADisagreementOfNodesOnPmixIsReported) {
    const ReservedPort port;
    const auto node = [&](int rank, const char* pmix) {
        return ddprun_with({"--nnodes=2", "--master-addr=127.0.0.1", "--master-port=" + port.number(),
                            "--node-rank=" + std::to_string(rank), std::string("--pmix=") + pmix,
                            "--rdzv-conf=join_timeout=20"},
                           "PMIX_PROBE", {});
    };
    Program head(node(0, "on"), over_loopback()), other(node(1, "off"), over_loopback());
    const Outcome refused = other.wait();
    EXPECT_NE(refused.status, 0);
    EXPECT_THAT(refused.err, HasSubstr("--pmix  on             off"));
    head.signal(SIGTERM);
    head.wait();
}

TEST_F(PmixWorkers, AProgramWithoutMpiIgnoresTheServer) {
    const Outcome outcome =
        run(ddprun_with({"--nproc-per-node=2", "--pmix=on"}, "PROBE", {"env", "WORLD_SIZE", "exit", "0"}),
            over_loopback());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "WORLD_SIZE=2\nWORLD_SIZE=2\n");
    EXPECT_EQ(said_of_its_own_job(outcome), "");
}

TEST(WithoutPmix, AProgramHasNoServerUnlessItIsWanted) {
    const Outcome outcome = run({path_of("DDPRUN"), "env"}, over_loopback());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, Not(HasSubstr("PMIX_")));
}

TEST(WithoutPmix, PmixOnIsAnErrorThatNamesTheLibrary) {
    const TemporaryDirectory empty;
    RunOptions options = over_loopback();
    options.environment.push_back("DDPRUN_PMIX_LIBRARY=" + empty.file("libpmix.so.2"));
    const Outcome outcome = run(ddprun_with({"--pmix=on"}, "PROBE", {"say", "up"}), options);
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr("ddprun: --pmix on: "));
}

}  // namespace
}  // namespace ddprun::test
