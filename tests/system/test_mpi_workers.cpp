// libddp's programs under the MPI launchers that are installed, without ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "env/nodes/pmix_source.h"
#include "tests/support/run_program.h"
#include "tests/system/mpi_launchers.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::string> sum_of_ranks() { return {path_of("SUM_OF_RANKS")}; }
const char* const kFourRanks = "4 workers, the sum of their ranks is 6\n";

/// What is left of an Open MPI rank's environment when only PMIx speaks, as under prterun.
std::vector<std::string> with_pmix_only(const std::vector<std::string>& program) {
    return join_words({"env", "-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE", "-u",
                       "OMPI_COMM_WORLD_LOCAL_RANK", "-u", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                      program);
}

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

TEST_F(UnderOpenMpi, SizesComeFromThePmixServerWhereTheEnvironmentHasNone) {
    if (!built_with_pmix()) GTEST_SKIP() << "built without PMIx";
    const Outcome outcome = run(open_mpi(4, with_pmix_only(sum_of_ranks())));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, kFourRanks);
}

TEST_F(UnderOpenMpi, ARankExportedByHandIsRefusedWithBothSides) {
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

TEST(WithoutAPmixServer, ItsAbsenceIsNoticedAtOnce) {
    if (!built_with_pmix()) GTEST_SKIP() << "built without PMIx";
    const TimePoint begin = MonotonicClock::now();
    const Result<Placement> told = ask_pmix(std::chrono::seconds(30));
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
