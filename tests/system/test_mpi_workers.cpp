// libddp's programs under the MPI launchers that are installed, without ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include <signal.h>

#include <filesystem>

#include "env/nodes/pmix_source.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"
#include "tests/system/mpi_launchers.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

std::vector<std::string> sum_of_ranks() { return {path_of("SUM_OF_RANKS")}; }
const char* const kFourRanks = "4 workers, the sum of their ranks is 6\n";

class UnderOpenMpi : public ::testing::Test {
    void SetUp() override {
        if (!has("OPEN_MPI")) GTEST_SKIP() << "no mpirun of Open MPI on this machine";
    }
};

class UnderHydra : public ::testing::Test {
    void SetUp() override {
        if (!has("HYDRA")) GTEST_SKIP() << "no mpiexec.hydra on this machine";
    }
};

struct Launcher {
    const char* name;
    const char* variable;
    std::vector<std::string> (*command)(int ranks, const std::vector<std::string>& program,
                                        const std::vector<std::string>& options);
    std::vector<std::string> (*on_hosts)(const Hosts& hosts, int per_host,
                                         const std::vector<std::string>& program);
    const char* channel;
    const char* module;   ///< the variable with libddp's for its MPI
    const char* library;  ///< its name in backend "mpi"
};
const Launcher kOpenMpi{"OpenMpi", "OPEN_MPI",           open_mpi,    open_mpi_on,
                        "PMIx",    "MPI_MODULE_OPENMPI", "Open MPI v"};
const Launcher kHydra{"Hydra",          "HYDRA", hydra, hydra_on, "PMI on descriptor", "MPI_MODULE_MPICH",
                      "MPICH Version: "};
std::string name_of_launcher(const ::testing::TestParamInfo<Launcher>& tested) { return tested.param.name; }

/// Ranks of libddp that communicate through the MPI whose launcher started them.
class OverMpi : public ::testing::TestWithParam<Launcher> {
  protected:
    void SetUp() override {
        if (!has(GetParam().variable)) GTEST_SKIP() << "no " << GetParam().name << " on this machine";
        if (!has(GetParam().module)) GTEST_SKIP() << "built without its MPI";
    }
    static std::vector<std::string> launch(int ranks, const std::vector<std::string>& program) {
        return GetParam().command(ranks, program, {});
    }
    /// Variables by which a loader finds any of the modules. Memory that MPI never frees is not our finding.
    static std::vector<std::string> with_modules() {
        return {"LD_LIBRARY_PATH=" + path_of("MPI_MODULES"), without_leak_check()};
    }
    static RunOptions with_module(const std::string& path) {
        std::vector<std::string> variables = with_modules();
        variables.push_back("DDP_MPI_MODULE=" + path);
        return with_environment(variables);
    }
};
INSTANTIATE_TEST_SUITE_P(Launchers, OverMpi, ::testing::Values(kOpenMpi, kHydra), name_of_launcher);

TEST_P(OverMpi, EveryCollectiveIsRightForEveryTypeAndOperation) {
    for (const int ranks : {1, 3}) {
        const Outcome outcome = run(launch(ranks, {path_of("MPI_RANKS")}), with_environment(with_modules()));
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out,
                    AllOf(HasSubstr(std::to_string(ranks) + " ranks, mpi (" + GetParam().library),
                          HasSubstr("): all is well\n")));
    }
}

TEST_P(OverMpi, EveryCollectiveIsRightInTheGroupsOwnThread) {
    const Outcome outcome =
        run(launch(2, {path_of("MPI_RANKS"), "thread"}), with_environment(with_modules()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr(std::string("2 ranks, mpi (") + GetParam().library),
                                   HasSubstr(", progress thread): all is well\n")));
}

TEST_P(OverMpi, CallsInTheGroupsOwnThreadOverlapWithTheProgram) {
    const TemporaryDirectory directory;
    const std::string fifo = directory.file("rank 0 went on");
    ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
    const Outcome outcome =
        run(launch(2, {path_of("MPI_RANKS"), "progress", fifo}), with_environment(with_modules()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("all is well"));
}

TEST_P(OverMpi, AForkedChildOfARankIsRefusedAndExits) {
    for (const std::vector<std::string>& mode : {std::vector<std::string>{}, {"thread"}}) {
        const Outcome outcome = run(launch(2, join_words({path_of("MPI_RANKS"), "forked"}, mode)),
                                    with_environment(with_modules()));
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("all is well"));
    }
}

TEST_P(OverMpi, RanksThatCountSlicesDifferentlyAreBothNamed) {
    const Outcome outcome =
        run(launch(2, {path_of("MPI_RANKS"), "uneven"}), with_environment(with_modules()));
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.out, HasSubstr("all_gather_v: rank 0 counts 3, 3, rank 1 counts 2, 4"));
}

// The end is not waited for: MPICH 4.0 may hang in MPI_Finalize when UCX has connected hosts by TCP.
TEST_P(OverMpi, EveryCollectiveIsRightOverTwoHosts) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    // UCX takes these hosts, which share a kernel, for one.
    const std::vector<std::string> ranks =
        join_words({"env", "OMPI_MCA_mpi_yield_when_idle=1", "UCX_TLS=tcp,self"},
                   join_words(with_modules(), {path_of("MPI_RANKS")}));
    Program job(GetParam().on_hosts(hosts, 1, ranks));
    EXPECT_TRUE(job.wait_for_output(std::string("2 ranks, mpi (") + GetParam().library) &&
                job.wait_for_output("): all is well\n"));
}

// The first rank that times out ends, and its launcher ends the others; the launcher chooses the exit code.
TEST_P(OverMpi, AMissingRankIsATimeoutAndTheJobEnds) {
    const Outcome outcome = run(launch(3, {path_of("MPI_RANKS"), "alone"}), with_environment(with_modules()));
    EXPECT_NE(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(AnyOf(HasSubstr("rank 0: barrier #2 did not finish within 200 ms"),
                                         HasSubstr("rank 2: barrier #2 did not finish within 200 ms")),
                                   HasSubstr("so does every later call")));
}

/// A ddprun for each rank, which passes the launcher's variables on to its worker.
std::vector<std::string> by_a_ddprun_each(const ReservedPort& port, const std::vector<std::string>& program) {
    return join_words({"env", "DDPRUN_TOKEN=secret of the job", path_of("DDPRUN"), "--per-rank",
                       "--pass-mpi-env", "--rdzv-endpoint=" + port.text()},
                      program);
}

TEST_P(OverMpi, EveryCollectiveIsRightUnderADdprunForEachRank) {
    const ReservedPort port;
    const Outcome outcome =
        run(launch(2, by_a_ddprun_each(port, {path_of("MPI_RANKS")})), with_environment(with_modules()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr(std::string("2 ranks, mpi (") + GetParam().library),
                                   HasSubstr("): all is well\n")));
}

// The launcher notices the death, too, and may end the ddpruns early, so each logs to a file.
TEST_P(OverMpi, AKilledRankUnderADdprunForEachIsNamedAndEndsTheOthers) {
    const ReservedPort port;
    const TemporaryDirectory said;
    const std::vector<std::string> into_files = {
        "sh", "-c", "exec \"$@\" 2>" + said.path() + "/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}", "sh"};
    const Outcome outcome =
        run(launch(3, join_words(into_files, by_a_ddprun_each(port, {path_of("MPI_RANKS"), "killed"}))),
            with_environment(with_modules()));
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(file_content(said.file("1")), AllOf(HasSubstr("rank 1 (pid "), HasSubstr("died of SIGKILL")));
}

TEST_P(OverMpi, TheModuleOfAnotherMpiIsRefusedAndBothAreNamed) {
    const Launcher& other = std::string(GetParam().name) == kHydra.name ? kOpenMpi : kHydra;
    if (!has(other.module)) GTEST_SKIP() << "there is one MPI only";
    const Outcome outcome = run(launch(2, {path_of("MPI_RANKS")}), with_module(path_of(other.module)));
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(other.library), HasSubstr(path_of(other.module)),
                                   HasSubstr("says rank 0 of 1, the environment rank 1 of 2 (launcher="),
                                   HasSubstr("start the workers with the mpiexec of that MPI")));
}

TEST_P(OverMpi, AMissingModuleIsReportedInOneLineWithTheRemedy) {
    const TemporaryDirectory empty;
    const std::string missing = empty.file("libddp-mpi-openmpi.so");
    const Outcome outcome = run({path_of("MPI_RANKS")}, with_environment({"DDP_MPI_MODULE=" + missing}));
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("backend mpi: " + missing + ": "), HasSubstr("-Dmpi=enabled"),
                                   HasSubstr("DDP_MPI_MODULE")));
}

TEST_P(OverMpi, ARankThatMpiKnowsByAnotherNumberIsRefused) {
    RunOptions options = with_module(path_of(GetParam().module));
    for (const char* variable : {"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"})
        options.environment.emplace_back(variable);
    const Outcome outcome = run({path_of("MPI_RANKS")}, options);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(GetParam().library),
                                   HasSubstr("says rank 0 of 1, the environment rank 1 of 2")));
}

TEST_F(UnderOpenMpi, RanksAreOneWorld) {
    const Outcome outcome = run(open_mpi(4, sum_of_ranks()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderOpenMpi, VariablesOfTheBatchScriptAroundItAreNoRanks) {
    const Outcome outcome = run(open_mpi(4, sum_of_ranks()),
                                with_environment({"SLURM_JOB_ID=7", "SLURM_PROCID=0", "SLURM_LOCALID=0",
                                                  "SLURM_NTASKS=4", "PBS_JOBID=12.server", "PBS_NODENUM=0"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderOpenMpi, SizesComeFromThePmixServerWhenTheEnvironmentHasNone) {
    if (!built_with_pmix()) GTEST_SKIP() << "built without PMIx";
    const Outcome outcome = run(open_mpi(4, with_pmix_only(sum_of_ranks())));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderOpenMpi, ARankExportedByHandIsRefusedAndBothRanksAreNamed) {
    const Outcome outcome =
        run(open_mpi(2, sum_of_ranks()), with_environment({"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0"}));
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("torchrun says rank 0/1 (RANK=0)"),
                                   HasSubstr("openmpi says rank 1/2 (OMPI_COMM_WORLD_RANK=1)")));
}

TEST_F(UnderOpenMpi, WorkersOfADdprunInsideTakeItsRanks) {
    const Outcome outcome =
        run(open_mpi(1, join_words({path_of("DDPRUN"), "--nproc-per-node=4"}, sum_of_ranks())));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(kFourRanks));
}

TEST_F(UnderHydra, RanksAreOneWorld) {
    const Outcome outcome = run(hydra(4, sum_of_ranks()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderHydra, ShellsBetweenTheLauncherAndTheRanksDoNotMatter) {
    const Outcome outcome = run(hydra(4, {"sh", "-c", path_of("SUM_OF_RANKS") + "; exit $?"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderHydra, TwoJobsAtOnceDoNotMeet) {
    Program one(hydra(4, sum_of_ranks()));
    Program other(hydra(3, sum_of_ranks()));
    const Outcome first = one.wait(), second = other.wait();
    EXPECT_EQ(first.out, kFourRanks) << first.err;
    EXPECT_EQ(second.out, "3 workers, the sum of their ranks is 3\n") << second.err;
}

// ---- several hosts, without any ddprun

std::vector<std::string> ddp_probe(const std::string& act) { return {path_of("DDP_PROBE"), act}; }

/// Processes that seem alone on their hosts: each has its own host name, and shares only the fake NCCLs'
/// memory.
std::vector<std::string> each_on_its_node(const std::vector<std::string>& program) {
    return join_words({"unshare", "--uts", "sh", "-c", "hostname alone-$$ && exec \"$@\"", "sh", "env",
                       "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "MPI_LOCALRANKID=0",
                       "MPI_LOCALNRANKS=1"},
                      program);
}

class WithoutDdprun : public ::testing::TestWithParam<Launcher> {
  protected:
    void SetUp() override {
        if (!has(GetParam().variable)) GTEST_SKIP() << "no " << GetParam().name << " on this machine";
    }
};
INSTANTIATE_TEST_SUITE_P(Launchers, WithoutDdprun, ::testing::Values(kOpenMpi, kHydra), name_of_launcher);

TEST_P(WithoutDdprun, RanksOnTwoHostsMeetInTheStoreOfRankZero) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome = run(GetParam().on_hosts(hosts, 2, ddp_probe("place")));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* place : {"rank 0/4 local 0/2 node 0/2", "rank 1/4 local 1/2 node 0/2",
                              "rank 2/4 local 0/2 node 1/2", "rank 3/4 local 1/2 node 1/2"}) {
        EXPECT_THAT(outcome.out,
                    HasSubstr(std::string(place) + " master " + Hosts::address(0) + " counted 4\n"));
    }
}

TEST_P(WithoutDdprun, RanksOnTwoHostsSumThroughTheNetwork) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome = run(GetParam().on_hosts(hosts, 2, sum_of_ranks()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderOpenMpi, RanksOnTwoHostsInTurnsSumThroughTheNetwork) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome = run(open_mpi_on(hosts, 2, sum_of_ranks(), "node"));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_P(WithoutDdprun, NcclsIdsGoThroughTheStore) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const std::string worker = path_of("OVER_FAKES") + "/nccl_worker";
    const std::string library = "DDP_NCCL_LIBRARY=" + path_of("FAKE_NCCL_LIBRARY");
    const Outcome outcome = run(GetParam().command(2, each_on_its_node({"env", library, worker, "3"}), {}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("life 0 sum 7"));  // 0 + 3 and 1 + 3
}

TEST_P(WithoutDdprun, NoMeetingPointIsAnErrorAtOnceWithTheRemedy) {
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Outcome outcome = run(GetParam().command(
        2, join_words({"env", "DDPRUN_EXCHANGE=none"}, each_on_its_node(sum_of_ranks())), {}));
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("no channel carries the rendezvous address"),
                                   HasSubstr("DDPRUN_EXCHANGE=none"), HasSubstr("start them with ddprun")));
}

TEST_F(UnderOpenMpi, RanksOnTwoHostsMeetByPmixAlone) {
    if (!built_with_pmix()) GTEST_SKIP() << "built without PMIx";
    if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    const Hosts hosts(2);
    const Outcome outcome = run(open_mpi_on(hosts, 2, with_pmix_only(ddp_probe("place"))));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("rank 1/4 local 1/2 node 0/2"),
                                   HasSubstr("rank 2/4 local 0/2 node 1/2"), HasSubstr("counted 4\n")));
}

/// A task of srun, made of its variables.
std::vector<std::string> step_task(int task, int tasks, const std::vector<std::string>& command) {
    const std::string number = std::to_string(task), all = std::to_string(tasks);
    return join_words({"env", "SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_PROCID=" + number,
                       "SLURM_STEP_NUM_TASKS=" + all, "SLURM_LOCALID=0", "SLURM_NODEID=" + number,
                       "SLURM_STEP_NUM_NODES=" + all, "SLURM_STEP_TASKS_PER_NODE=1(x" + all + ")"},
                      command);
}

TEST(TasksOfSrun, MeetByAFileInTheWorkingDirectory) {
    const TemporaryDirectory shared;
    RunOptions options;
    options.directory = shared.path();
    Program second(step_task(1, 2, ddp_probe("place")), options);
    Program first(step_task(0, 2, ddp_probe("place")), options);
    const Outcome zero = first.wait(), one = second.wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.out, AllOf(HasSubstr("rank 1/2 local 0/1 node 1/2"), HasSubstr("counted 2")));
    EXPECT_TRUE(std::filesystem::is_empty(shared.path())) << "something is left behind";
}

TEST(TasksOfSrun, ATaskThatFindsNoOtherNamesWhatItWaitedForAtItsTimeout) {
    const TemporaryDirectory own;
    RunOptions options = with_environment({"DDPRUN_EXCHANGE_TIMEOUT=300ms"});
    options.directory = own.path();
    const Outcome other = run(step_task(1, 2, ddp_probe("place")), options);
    EXPECT_NE(other.status, 0);
    EXPECT_THAT(other.err, AllOf(HasSubstr(".ddprun-slurm-77.0.0"), HasSubstr("DDPRUN_EXCHANGE_DIR")));
    const Outcome first = run(step_task(0, 2, ddp_probe("place")), options);
    EXPECT_NE(first.status, 0);
    EXPECT_THAT(first.err, HasSubstr("1 of 2"));
}

TEST(TasksOfSrun, TheSameRankTwiceIsRefusedAndBothAreNamed) {
    const TemporaryDirectory shared;
    RunOptions options = with_environment({"DDPRUN_EXCHANGE_TIMEOUT=3s"});
    options.directory = shared.path();
    Program first(step_task(0, 3, ddp_probe("place")), options),
        one(step_task(1, 3, ddp_probe("place")), options),
        other(step_task(1, 3, ddp_probe("place")), options);
    // The remaining ranks wait for rank 2; the first whose timeout passes tells the other.
    const std::string said = one.wait().err + other.wait().err + first.wait().err;
    EXPECT_THAT(said, AllOf(HasSubstr("rank 1 is there twice: "), HasSubstr("2 of 3")));
}

TEST(WithoutAPmixServer, ItsAbsenceIsNoticedAtOnce) {
    if (!built_with_pmix()) GTEST_SKIP() << "built without PMIx";
    const TimePoint begin = MonotonicClock::now();
    const Result<PmixAnswer> told = ask_pmix(std::chrono::seconds(30));
    ASSERT_FALSE(told);
    EXPECT_EQ(told.error().code, Errc::NotFound) << told.error().what;
    EXPECT_LT(MonotonicClock::now() - begin, std::chrono::seconds(5));
}

TEST(WithoutAPmixServer, ALeftOverRankIsAnErrorThatNamesIt) {
    const Outcome outcome =
        run(sum_of_ranks(), with_environment({"PMIX_RANK=2", "PMIX_NAMESPACE=1176633345"}));
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("launcher=pmix rank 2/?"), HasSubstr("DDPRUN_LAUNCHER=none")));
    const Outcome alone =
        run(sum_of_ranks(),
            with_environment({"PMIX_RANK=2", "PMIX_NAMESPACE=1176633345", "DDPRUN_LAUNCHER=none"}));
    EXPECT_EQ(alone.status, 0) << alone.err;
    EXPECT_THAT(alone.out, HasSubstr("1 workers"));
}

}  // namespace
}  // namespace ddprun::test
