// ddprun under mpirun, mpiexec and srun, per node and per rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "tests/support/reserved_port.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"
#include "tests/system/mpi_launchers.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> ddprun(const std::vector<std::string>& options,
                                const std::vector<std::string>& program) {
    return join_words(join_words({path_of("DDPRUN")}, options), program);
}

std::vector<std::string> sum_of_ranks() { return {path_of("SUM_OF_RANKS")}; }

/// The task of a launcher that runs one task per node, which this machine cannot have.
RunOptions as_task_of_two_nodes(int node) {
    return with_environment({"OMPI_COMM_WORLD_RANK=" + std::to_string(node), "OMPI_COMM_WORLD_SIZE=2",
                             "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1",
                             "DDPRUN_TOKEN=secret of the job"});
}

TEST(DdprunPerNode, ReportsItsNodeAndAsksForTheMeetingPoint) {
    const Outcome outcome = run(ddprun_probe({}, {"say", "started"}), as_task_of_two_nodes(1));
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("node 1 of 2: launcher=openmpi rank 1/2 local 0/1"), HasSubstr("--nnodes=2"),
                      HasSubstr("--rdzv-endpoint"), Not(HasSubstr("DDPRUN_EXCHANGE_DIR"))))
        << "it would be refused: there is no job id";
}

TEST(DdprunPerNode, TwoNodesOfALauncherFormOneJob) {
    const ReservedPort port;
    const std::string endpoint = "--rdzv-endpoint=" + port.text();
    const std::vector<std::string> command =
        ddprun_probe({"--nproc-per-node=2", endpoint}, {"env", "RANK", "env", "WORLD_SIZE"});
    Program first(command, as_task_of_two_nodes(0)), second(command, as_task_of_two_nodes(1));
    const Outcome zero = first.wait(), one = second.wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.out, AllOf(HasSubstr("[2]: RANK=2\n"), HasSubstr("[3]: WORLD_SIZE=4\n"))) << zero.out;
}

TEST(DdprunPerNode, UsersOptionsOverrideTheLauncher) {
    const Outcome outcome = run(ddprun_probe({"--standalone", "--nproc-per-node=2"}, {"env", "WORLD_SIZE"}),
                                as_task_of_two_nodes(1));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("[1]: WORLD_SIZE=2\n"));
    EXPECT_EQ(said_of_its_own_job(outcome), "");
}

// ---- the variables of a launcher, without the launcher

/// A task of srun, on one of two hosts.
std::vector<std::string> as_step_task(int task, const std::vector<std::string>& command) {
    const std::string number = std::to_string(task);
    return join_words({"env", "SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_PROCID=" + number,
                       "SLURM_STEP_NUM_TASKS=2", "SLURM_LOCALID=0", "SLURM_NODEID=" + number,
                       "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_TASKS_PER_NODE=1(x2)",
                       "SLURM_STEP_NODELIST=node[00-01]", "SLURMD_NODENAME=" + Hosts::name(task)},
                      command);
}

class OnTwoHosts : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    }
};

TEST_F(OnTwoHosts, TasksOfSrunMeetAtTheStepsFirstHostWithTheUsersSecret) {
    const Hosts hosts(2);
    const std::vector<std::string> command =
        ddprun_probe({"--nproc-per-node=2"}, {"env", "RANK", "env", "MASTER_ADDR", "env", "SLURM_PROCID"});
    Program first(hosts.command(0, as_step_task(0, command))),
        second(hosts.command(1, as_step_task(1, command)));
    const Outcome zero = first.wait(), one = second.wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.out,
                AllOf(HasSubstr("[2]: RANK=2\n"), HasSubstr("[3]: RANK=3\n"),
                      HasSubstr("[3]: MASTER_ADDR=node00\n"), HasSubstr("[3]: SLURM_PROCID unset\n")))
        << zero.err;
    EXPECT_THAT(one.err, AllOf(HasSubstr("node 1 of 2: launcher=slurm"), HasSubstr("they meet at node00:"),
                               HasSubstr("the first host of SLURM_STEP_NODELIST")));
}

TEST_F(OnTwoHosts, TasksOfSrunMeetByAFileWhenADirectoryIsGiven) {
    const Hosts hosts(2);
    const std::string directory = "DDPRUN_EXCHANGE_DIR=" + hosts.shared();
    const std::vector<std::string> command =
        join_words({"env", directory}, ddprun_probe({}, {"env", "RANK", "env", "MASTER_ADDR"}));
    Program second(hosts.command(1, as_step_task(1, command)));
    Program first(hosts.command(0, as_step_task(0, command)));
    const Outcome zero = first.wait(), one = second.wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.out, AllOf(HasSubstr("RANK=1\n"), HasSubstr("MASTER_ADDR=" + Hosts::address(0) + "\n")));
    EXPECT_THAT(one.err, HasSubstr("told by a file in " + hosts.shared()));
    for (const auto& entry : std::filesystem::directory_iterator(hosts.shared())) {
        EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr(".ddprun-"))) << "left behind";
    }
}

TEST_F(OnTwoHosts, ANodeThatFindsNoHeadNamesWhereItLookedAndIsStoppedBySigterm) {
    const Hosts hosts(2);
    const std::vector<std::string> command = ddprun_probe({"--rdzv-conf=join_timeout=1"}, {"say", "started"});
    const Outcome alone = run(hosts.command(1, as_step_task(1, command)));
    EXPECT_EQ(alone.status, 69);
    EXPECT_THAT(alone.err,
                AllOf(HasSubstr("the first node"), HasSubstr("node00:2"), HasSubstr("Connection refused")));
    EXPECT_EQ(alone.out, "");

    Program waiting(hosts.command(1, as_step_task(1, ddprun_probe({}, {"say", "started"}))));
    // Wait until SIGTERM is blocked (bit 14 of the mask): an earlier one ends any process.
    const auto has_begun = [&] {
        return run(hosts.command(
                       1,
                       {"sh", "-c",
                        "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = ddprun ] && grep -q '^SigBlk:.*[4-7c-f]...$' $p/status && exit 0; done; exit 1"}))
                   .status == 0;
    };
    while (!has_begun()) {
    }
    run(hosts.command(
        1,
        {"sh", "-c",
         "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = ddprun ] && kill -TERM ${p#/proc/}; done; true"}));
    const Outcome stopped = waiting.wait();
    EXPECT_EQ(stopped.status, 75) << stopped.err;
    EXPECT_THAT(stopped.err, HasSubstr("SIGTERM while the nodes were waited for"));
}

TEST_F(OnTwoHosts, AnotherSecretOnTheOtherHostIsReportedWithTheRemedy) {
    const Hosts hosts(2);
    Program first(hosts.command(
        0, as_step_task(0, join_words({"env", "DDPRUN_TOKEN=one"}, ddprun_probe({}, {"say", "started"})))));
    ASSERT_TRUE(first.wait_for_output("they meet at node00:"));
    // The node goes on after a refusal: another job's first node could have the port.
    const Outcome one = run(hosts.command(
        1, as_step_task(1, join_words({"env", "DDPRUN_TOKEN=other"},
                                      ddprun_probe({"--rdzv-conf=join_timeout=1"}, {"say", "started"})))));
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_THAT(one.err, AllOf(HasSubstr("the first node"), HasSubstr("DDPRUN_TOKEN")));
    EXPECT_EQ(one.out, "");
    first.signal(SIGTERM);
    EXPECT_EQ(first.wait().out, "");
}

// ---- the real launchers

struct OuterLauncher {
    const char* name;
    const char* variable;  ///< of the environment, with its path
    std::vector<std::string> (*command)(int ranks, const std::vector<std::string>& program,
                                        const std::vector<std::string>& options);
    std::vector<std::string> (*on_hosts)(const Hosts& hosts, int per_host,
                                         const std::vector<std::string>& program);
    const char* channel;
};
std::string name_of_launcher(const ::testing::TestParamInfo<OuterLauncher>& tested) {
    return tested.param.name;
}

class Under : public ::testing::TestWithParam<OuterLauncher> {
  protected:
    void SetUp() override {
        if (!has(GetParam().variable)) GTEST_SKIP() << "no " << GetParam().name << " on this machine";
    }
    static Outcome launch(int ranks, const std::vector<std::string>& program) {
        return run(GetParam().command(ranks, program, {}));
    }
    static std::string scratch(const std::string& name) { return scratch_.file(name); }
    static inline TemporaryDirectory scratch_;
};
INSTANTIATE_TEST_SUITE_P(
    Launchers, Under,
    ::testing::Values(OuterLauncher{"OpenMpi", "OPEN_MPI", open_mpi, open_mpi_on, "PMIx"},
                      OuterLauncher{"Hydra", "HYDRA", hydra, hydra_on, "PMI on descriptor"}),
    name_of_launcher);

TEST_P(Under, SeveralDdprunOnANodeAreOneRankEachOfOneWorld) {
    const Outcome outcome = launch(4, ddprun({}, sum_of_ranks()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("4 workers, the sum of their ranks is 6\n"));
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("rank 0 of 4"), HasSubstr("told by " + std::string(GetParam().channel))));
}

TEST_P(Under, ARankHasTheLaunchersPlaceAndNoneOfItsVariables) {
    const Outcome outcome = launch(2, ddprun_probe({"--per-rank"}, {"rank", "1",
                                                                    "env",  "RANK",
                                                                    "env",  "LOCAL_RANK",
                                                                    "env",  "LOCAL_WORLD_SIZE",
                                                                    "env",  "GROUP_WORLD_SIZE",
                                                                    "env",  "OMPI_COMM_WORLD_RANK",
                                                                    "env",  "PMIX_RANK",
                                                                    "env",  "PMI_FD",
                                                                    "env",  "PMI_RANK",
                                                                    "fds",  "end"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* expected :
         {"RANK=1\n", "LOCAL_RANK=1\n", "LOCAL_WORLD_SIZE=2\n", "GROUP_WORLD_SIZE=1\n",
          "OMPI_COMM_WORLD_RANK unset\n", "PMIX_RANK unset\n", "PMI_FD unset\n", "PMI_RANK unset\n"}) {
        EXPECT_THAT(outcome.out, HasSubstr(expected));
    }
}

TEST_P(Under, ADeadRankIsRestartedWithTheOthersUnnoticedByTheLauncher) {
    const std::string died = scratch(std::string("died-") + GetParam().name);
    const Outcome outcome = launch(
        3, ddprun_probe({"--per-rank", "--max-restarts=1"}, {"env", "TORCHELASTIC_RESTART_COUNT", "rank", "1",
                                                             "once", died, "kill", "9", "end"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "TORCHELASTIC_RESTART_COUNT=1"), 3) << outcome.out;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 1"), HasSubstr("SIGKILL")));
}

TEST_P(Under, TheExitCodeIsThatOfTheRootCause) {
    const Outcome outcome =
        launch(3, ddprun_probe({"--per-rank"}, {"rank", "1", "exit", "5", "end", "hold"}));
    EXPECT_EQ(outcome.status, 5) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("first cause   rank 1"), HasSubstr("stopped by us 2 workers (ranks 0, 2)")));
}

TEST_P(Under, SeveralDdprunsThatWouldEachStartAllWorkersOfANodeAreRefused) {
    const Outcome outcome = launch(2, ddprun_probe({"--nproc-per-node=2"}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("2 ddprun were started on this node"), HasSubstr("--per-rank"),
                                   HasSubstr("--standalone")));
}

TEST(PerRank, RefusesContradictingOptionsAndNamesBoth) {
    const std::pair<std::vector<std::string>, const char*> lines[] = {
        {{"--per-rank", "--nproc-per-node=2"}, "--nproc-per-node 2"},
        {{"--per-rank", "--standalone"}, "--standalone"},
        {{"--per-rank", "--virtual-local-rank"}, "--virtual-local-rank"},
        {{"--pass-mpi-env", "--pmix=on"}, "--pmix"}};
    for (const auto& [options, other] : lines) {
        const Outcome outcome = run(ddprun_probe(options, {"say", "started"}));
        EXPECT_EQ(outcome.status, 64);
        EXPECT_THAT(outcome.err,
                    AllOf(HasSubstr(options.front()), HasSubstr(other), HasSubstr("contradict")));
    }
    const Outcome alone = run(ddprun_probe({"--per-rank"}, {"say", "started"}));
    EXPECT_EQ(alone.status, 64);
    EXPECT_THAT(alone.err, HasSubstr("no mpiexec or srun started this ddprun"));
}

TEST_P(Under, ADifferentNnodesIsRefusedAndBothCountsAreNamed) {
    const Outcome outcome = launch(2, ddprun_probe({"--nnodes=3"}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("--nnodes=3"), HasSubstr("2 ddpruns were started"), HasSubstr("launcher=")));
}

TEST_P(Under, AForbiddenChannelIsReportedAsNoMeetingPoint) {
    const Outcome outcome =
        launch(2, join_words({"env", "DDPRUN_EXCHANGE=none"}, ddprun_probe({}, {"say", "started"})));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("the nodes have no meeting point"),
                                   HasSubstr("DDPRUN_EXCHANGE=none"), HasSubstr("--rdzv-endpoint")));
}

TEST_P(Under, RanksWhoseProgramHasTheLaunchersChannelMeetOnOneHostByNothingMore) {
    const TemporaryDirectory temporary;
    const Outcome outcome = launch(
        3, join_words({"env", "TMPDIR=" + temporary.path()},
                      ddprun_probe({"--per-rank", "--pass-mpi-env"}, {"env", "RANK", "env", "WORLD_SIZE"})));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("RANK=2\n"), HasSubstr("WORLD_SIZE=3\n")));
    EXPECT_THAT(outcome.err, HasSubstr("told by a file in " + temporary.path()));
    EXPECT_TRUE(std::filesystem::is_empty(temporary.path())) << "something is left behind";
}

TEST_P(Under, RanksWhoseProgramHasTheLaunchersChannelMeetInTheBatchJobsDirectory) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome = run(GetParam().on_hosts(
        hosts, 1,
        join_words({"env", "--chdir=" + hosts.home(), "PBS_JOBID=12.server"},
                   ddprun_probe({"--per-rank", "--pass-mpi-env"}, {"env", "RANK", "env", "WORLD_SIZE"}))));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("RANK=0\n"), HasSubstr("RANK=1\n"), HasSubstr("WORLD_SIZE=2\n")));
    EXPECT_THAT(outcome.err, HasSubstr("told by a file in " + hosts.home()));
}

TEST_P(Under, OneNodeOnEachOfTwoHostsIsOneJobWithoutEndpointOrSecret) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome = run(GetParam().on_hosts(
        hosts, 1,
        ddprun_probe({"--nproc-per-node=2"}, {"env", "RANK", "env", "GROUP_RANK", "env", "MASTER_ADDR"})));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* expected : {"[0]: RANK=0", "[1]: GROUP_RANK=0", "[2]: GROUP_RANK=1", "[3]: RANK=3"}) {
        EXPECT_THAT(outcome.out, HasSubstr(expected)) << outcome.err;
    }
    EXPECT_EQ(occurrences(outcome.out, "MASTER_ADDR=" + Hosts::address(0)), 4);
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("node 1 of 2"), HasSubstr("they meet at " + Hosts::address(0) + ":")));
    EXPECT_FALSE(std::filesystem::exists(hosts.home() + "/.config/ddprun/secret"))
        << "the user's secret was not needed";
}

TEST_P(Under, OneRankOnEachOfTwoHostsHasItsPlaceAndSurvivesADeath) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const std::string died = hosts.shared() + "/died";
    const Outcome outcome = run(GetParam().on_hosts(
        hosts, 2,
        ddprun_probe({"--per-rank", "--max-restarts=1"},
                     {"rank", "3", "once", died, "kill", "9", "end", "env", "RANK", "env", "LOCAL_RANK",
                      "env", "LOCAL_WORLD_SIZE", "env", "TORCHELASTIC_RESTART_COUNT"})));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "TORCHELASTIC_RESTART_COUNT=1"), 4) << outcome.out;
    EXPECT_GE(occurrences(outcome.out, "LOCAL_WORLD_SIZE=2"), 4);
    EXPECT_GE(occurrences(outcome.out, "LOCAL_RANK=1"), 2);
}

TEST_P(Under, ADeadHostEndsTheJobOnTheOther) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    Hosts hosts(2);
    Program job(GetParam().on_hosts(
        hosts, 1,
        ddprun_probe({"--heartbeat-timeout=3"}, {"say", "up", "rank", "0", "hold", "end", "hold"})));
    ASSERT_TRUE(job.wait_for_output("up"));
    hosts.power_off(1);
    // Hydra waits for the host for ever, mpirun kills the other tasks; our ddprun ends by itself.
    if (std::string(GetParam().name) == "Hydra") {
        EXPECT_TRUE(job.wait_for_output("node node01: no heartbeat for 3 s") &&
                    job.wait_for_output("exit code     69"));
    } else {
        EXPECT_FALSE(job.wait().timed_out);
    }
}

TEST(UnderOpenMpi, NodesMeetByPmixAlone) {
    if (!has("OPEN_MPI")) GTEST_SKIP() << "no mpirun of Open MPI on this machine";
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome =
        run(open_mpi_on(hosts, 1, with_pmix_only(ddprun_probe({"--nproc-per-node=2"}, {"env", "RANK"}))));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[1]: RANK=1\n"), HasSubstr("[3]: RANK=3\n")));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("launcher=pmix"), HasSubstr("told by PMIx")));
}

TEST(UnderOpenMpi, AnMpiProgramTakesTheRanksPlaceWhenItIsPassedOn) {
    if (!has("OPEN_MPI") || !has("MPI_PROBE")) GTEST_SKIP() << "no Open MPI on this machine";
    const TemporaryDirectory shared;
    const Outcome outcome =
        run(open_mpi(2, join_words({"env", "DDPRUN_EXCHANGE_DIR=" + shared.path()},
                                   ddprun({"--per-rank", "--pass-mpi-env"}, {path_of("MPI_PROBE")}))));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("of 2")) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("told by a file in " + shared.path()));
    EXPECT_TRUE(std::filesystem::is_empty(shared.path())) << "something is left behind";
}

TEST(UnderHydra, ThePmiDescriptorIsPassedOnWhenTheUserAsksForIt) {
    if (!has("HYDRA")) GTEST_SKIP() << "no mpiexec.hydra on this machine";
    const Outcome without = run(hydra(1, ddprun_probe({}, {"env", "PMI_FD", "fds"})));
    EXPECT_THAT(without.out, HasSubstr("PMI_FD unset\n"));
    const Outcome with = run(hydra(1, ddprun_probe({"--pass-mpi-env"}, {"env", "PMI_FD", "fds"})));
    EXPECT_EQ(with.status, 0) << with.err;
    const std::size_t at = with.out.find("PMI_FD=");
    ASSERT_NE(at, std::string::npos) << with.out;
    const std::string number = with.out.substr(at + 7, with.out.find('\n', at) - at - 7);
    EXPECT_THAT(with.out.substr(with.out.find("fds:")), HasSubstr(" " + number)) << with.out;
    EXPECT_THAT(without.out.substr(without.out.find("fds:")), Not(HasSubstr(" " + number + " ")))
        << without.out;
}

// Hydra forwards SIGTERM to all ranks at once and waits.
TEST(UnderHydra, SigtermLetsAllRanksSaveAndIsOneStop) {
    if (!has("HYDRA")) GTEST_SKIP() << "no mpiexec.hydra on this machine";
    // Check each ddprun's exit code: Hydra's own after a SIGTERM is 75 or 0, by chance.
    std::vector<std::string> telling = {"sh", "-c", "trap : TERM; \"$@\"; echo \"ddprun ended with $?\"",
                                        "sh"};
    for (std::string& word :
         ddprun_probe({"--per-rank"}, {"note", "15", "saving", "env", "RANK", "noted", "15", "say", "saved"}))
        telling.push_back(std::move(word));
    Program job(hydra(2, telling));
    ASSERT_TRUE(job.wait_for_output("RANK=0\n") && job.wait_for_output("RANK=1\n"));
    job.signal(SIGTERM);
    const Outcome outcome = job.wait();
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_EQ(occurrences(outcome.out, "ddprun ended with 75\n"), 2) << outcome.out << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "saved\n"), 2) << outcome.err;
}

}  // namespace
}  // namespace ddprun::test
