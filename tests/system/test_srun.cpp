// ddprun, and programs of libddp without it, as tasks of a real srun on two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/system/look.h"
#include "tests/system/mpi_launchers.h"
#include "tests/system/on_slurm.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The interface between srun and its tasks (--mpi), and the channel that the tasks then meet by.
struct Speech {
    const char* name;
    const char* option;
    const char* ddprun_says;
};

class Srun : public OnSlurm<2, ::testing::TestWithParam<Speech>> {
  protected:
    void SetUp() override {
        OnSlurm::SetUp();
        if (IsSkipped()) return;
        const Outcome known = slurm_->run({"srun", "--mpi=list"});
        const std::string plugin = std::string(GetParam().option).substr(std::string("--mpi=").size());
        if ((known.out + known.err).find(plugin) == std::string::npos)
            GTEST_SKIP() << "this srun has no " << GetParam().option;
    }
    static Outcome srun(const std::vector<std::string>& options, const std::vector<std::string>& program) {
        return slurm_->run(join_words(
            join_words({"srun", GetParam().option, "--chdir=" + hosts_->home()}, options), program));
    }
};
INSTANTIATE_TEST_SUITE_P(Speaking, Srun,
                         ::testing::Values(Speech{"Nothing", "--mpi=none",
                                                  "the first host of SLURM_STEP_NODELIST"},
                                           Speech{"Pmi2", "--mpi=pmi2", "told by PMI on descriptor"},
                                           Speech{"Pmix", "--mpi=pmix", "told by PMIx"}),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(Srun, ADdprunPerHostNeedsNoEndpointAndNoSecret) {
    const Outcome outcome = srun(
        {"-N2", "--ntasks-per-node=1"},
        ddprun_probe({"--nproc-per-node=2"}, {"env", "RANK", "env", "WORLD_SIZE", "env", "SLURM_PROCID"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* line :
         {"[0]: RANK=0\n", "[3]: RANK=3\n", "[2]: WORLD_SIZE=4\n", "[3]: SLURM_PROCID unset\n"})
        EXPECT_THAT(outcome.out, HasSubstr(line));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("node 1 of 2"), HasSubstr(GetParam().ddprun_says)));
}

TEST_P(Srun, ADdprunPerTaskRestartsAllUnnoticedBySrun) {
    const std::string died = hosts_->home() + "/died-" + GetParam().name;
    const Outcome outcome =
        srun({"-N2", "-n4", "--ntasks-per-node=2"},
             ddprun_probe({"--per-rank", "--max-restarts=1"},
                          {"rank", "2", "once", died, "kill", "9", "end", "env", "LOCAL_RANK", "env",
                           "GROUP_RANK", "env", "TORCHELASTIC_RESTART_COUNT"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "TORCHELASTIC_RESTART_COUNT=1"), 4) << outcome.out;
    EXPECT_GE(occurrences(outcome.out, "LOCAL_RANK=1"), 2);
    EXPECT_GE(occurrences(outcome.out, "GROUP_RANK=1"), 2);
    EXPECT_THAT(outcome.err, HasSubstr(GetParam().ddprun_says));
}

TEST_P(Srun, TasksWithoutDdprunMeetInTheStoreOfTheFirst) {
    const Outcome outcome = srun({"-N2", "-n4", "--ntasks-per-node=2"}, {path_of("DDP_PROBE"), "place"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* place : {"rank 0/4 local 0/2 node 0/2", "rank 1/4 local 1/2 node 0/2",
                              "rank 2/4 local 0/2 node 1/2", "rank 3/4 local 1/2 node 1/2"}) {
        EXPECT_THAT(outcome.out,
                    HasSubstr(std::string(place) + " master " + Hosts::address(0) + " counted 4\n"));
    }
}

/// The digest of the parameters that all workers ended with; "" when they differ or did not print it.
std::string digest_of(const Outcome& outcome, int workers) {
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("between 2 nodes"));
    const std::string equal =
        "parameters are bitwise equal on " + std::to_string(workers) + " workers, sha256 ";
    const std::size_t at = outcome.out.find(equal);
    return at == std::string::npos ? "" : outcome.out.substr(at + equal.size(), 64);
}

TEST_P(Srun, TrainEndsWithTheSameParametersWithoutDdprunAsWithOnePerHost) {
    const std::vector<std::string> train = {path_of("TRAIN"),
                                            "--epochs",
                                            "1",
                                            "--batch-size",
                                            "128",
                                            "--checkpoint-dir",
                                            hosts_->home() + "/checkpoints-" + GetParam().name};
    const std::string alone = digest_of(srun({"-N2", "-n4", "--ntasks-per-node=2"}, train), 4);
    const std::string with_ddprun = digest_of(
        srun({"-N2", "--ntasks-per-node=1"}, join_words({path_of("DDPRUN"), "--nproc-per-node=2"}, train)),
        4);
    EXPECT_EQ(alone.size(), 64U);
    EXPECT_EQ(alone, with_ddprun);
}

}  // namespace
}  // namespace ddprun::test
