// Claims about Slurm that ddprun relies on, tried on a real one over two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/system/look.h"
#include "tests/system/on_slurm.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Slurm : public OnSlurm<2> {
  protected:
    static std::string output() { return file_content(hosts_->home() + "/out"); }
};

TEST_F(Slurm, AStepRunsOnBothHosts) {
    const Outcome outcome = slurm_->run({"srun", "-N2", "--ntasks-per-node=1", "uname", "-n"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("node00", "node01"));
}

TEST_F(Slurm, ABatchScriptIsNoTaskOfAStepAndRunsOnTheFirstHost) {
    const std::string id =
        slurm_->submit("uname -n; env | grep ^SLURM; env | grep -c ^SLURM_STEP_ID; exit 0", {"-N2", "-n4"});
    EXPECT_EQ(slurm_->await_state(id, {"COMPLETED", "FAILED"}), "COMPLETED");
    EXPECT_THAT(output(), AllOf(HasSubstr("node00\n"), HasSubstr("SLURM_JOB_ID=" + id + "\n"),
                                HasSubstr("SLURM_JOB_NODELIST=node[00-01]\n"), HasSubstr("SLURM_PROCID=0\n"),
                                HasSubstr("SLURM_JOB_NUM_NODES=2\n"), HasSubstr("SLURM_NTASKS=4\n")));
    EXPECT_THAT(output(), HasSubstr("\n0\n")) << "no SLURM_STEP_ID";
}

TEST_F(Slurm, TasksOfAStepKnowTheirNodeTheListAndTheStep) {
    const Outcome outcome = slurm_->run({"srun", "-N2", "--ntasks-per-node=1", "-l", "env"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* word :
         {"0: SLURM_NODEID=0\n", "1: SLURM_NODEID=1\n", "1: SLURM_PROCID=1\n", "1: SLURM_LOCALID=0\n",
          "0: SLURM_STEP_ID=0\n", "1: SLURM_STEP_NODELIST=node[00-01]\n", "1: SLURM_STEP_NUM_TASKS=2\n",
          "1: SLURM_STEP_TASKS_PER_NODE=1(x2)\n", "1: SLURMD_NODENAME=node01\n"}) {
        EXPECT_THAT(outcome.out, HasSubstr(word));
    }
}

TEST_F(Slurm, ScancelReachesTheStepsOfAJobAndKillsAfterKillWait) {
    const std::string id = slurm_->submit("srun -N2 --ntasks-per-node=1 " + path_of("PROBE") +
                                              " note 15 asked say up noted 15 say saved exit 0",
                                          {"-N2"});
    ASSERT_TRUE(slurm_->await_text("out", "up\nup\n")) << output();
    EXPECT_EQ(slurm_->run({"scancel", id}).status, 0);
    EXPECT_EQ(slurm_->await_state(id, {"CANCELLED"}), "CANCELLED");
    EXPECT_TRUE(slurm_->await_text("out", "saved"));
    EXPECT_EQ(occurrences(output(), "saved\n"), 2) << output();
}

TEST_F(Slurm, ARequeuedJobRunsAgainWithARestartCount) {
    const std::string id = slurm_->submit(
        "echo up ${SLURM_RESTART_COUNT:-first}; [ -n \"$SLURM_RESTART_COUNT\" ] || exec sleep 600",
        {"--open-mode=append"});
    ASSERT_TRUE(slurm_->await_text("out", "up first"));
    EXPECT_EQ(slurm_->run({"scontrol", "requeue", id}).status, 0);
    EXPECT_TRUE(slurm_->await_text("out", "up 1")) << slurm_->run({"scontrol", "show", "job", id}).out;
    EXPECT_EQ(slurm_->await_state(id, {"COMPLETED"}), "COMPLETED");
}

}  // namespace
}  // namespace ddprun::test
