// ddprun in jobs of a real Slurm, over two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <optional>

#include "tests/system/look.h"
#include "tests/system/on_slurm.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class StartSlurm : public OnSlurm<2> {
  protected:
    std::string submit(const std::string& options, const std::string& acts) {
        return slurm_->submit("export PROBE_JOB=" + mark_ + "\nexec " + path_of("DDPRUN") + " " + options +
                                  " " + path_of("PROBE") + " " + acts,
                              {"-N2", "--output=" + mark_});
    }
    std::string output() { return file_content(hosts_->home() + "/" + mark_); }
    bool await_ranks(int count, const std::string& text) {
        for (int rank = 0; rank < count; ++rank) {
            if (!slurm_->await_text(mark_, "[" + std::to_string(rank) + "]: " + text)) return false;
        }
        return true;
    }
    static const std::vector<std::string> kEnds;

    const std::string mark_ = unique_name("slurm");
};
const std::vector<std::string> StartSlurm::kEnds{"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"};

TEST_F(StartSlurm, TheLastLineOfAScriptRunsOnAllHostsOfTheAllocation) {
    const std::string id =
        submit("--nproc-per-node=2", "env RANK env WORLD_SIZE env GROUP_RANK env MASTER_ADDR env PROBE_JOB");
    EXPECT_EQ(slurm_->await_state(id, kEnds), "COMPLETED") << output();
    for (const char* line : {"[0]: RANK=0\n", "[3]: RANK=3\n", "[3]: WORLD_SIZE=4\n", "[2]: GROUP_RANK=1\n",
                             "[3]: MASTER_ADDR=node00\n"}) {
        EXPECT_THAT(output(), HasSubstr(line));
    }
    EXPECT_THAT(output(), AllOf(HasSubstr("[3]: PROBE_JOB=" + mark_), HasSubstr("srun")));
}

TEST_F(StartSlurm, AFailureOnTheOtherHostIsTheJobsExitCode) {
    const std::string id = submit("--nproc-per-node=2", "rank 3 err 'cannot go on' exit 17 end hold");
    EXPECT_EQ(slurm_->await_state(id, kEnds), "FAILED");
    EXPECT_THAT(slurm_->run({"scontrol", "show", "job", id}).out, HasSubstr("ExitCode=17:0"));
    EXPECT_THAT(output(), AllOf(HasSubstr("rank 3 on node01"), HasSubstr("cannot go on")));
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartSlurm, ScancelWhileWorkersSaveLetsAllOfThemSave) {
    const std::string id =
        submit("--nproc-per-node=2", "note 15 asked say up noted 15 sleep 500 say saved exit 0");
    ASSERT_TRUE(await_ranks(4, "up")) << output();
    EXPECT_EQ(slurm_->run({"scancel", id}).status, 0);
    EXPECT_EQ(slurm_->await_state(id, {"CANCELLED"}), "CANCELLED");
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
    EXPECT_EQ(occurrences(output(), "]: saved\n"), 4) << output();
}

TEST_F(StartSlurm, ASignalAheadOfTheEndLetsAllOfThemSaveAndAsksToBeRequeued) {
    const std::string id =
        submit("--nproc-per-node=2", "note 15 asked say up noted 15 sleep 500 say saved exit 0");
    ASSERT_TRUE(await_ranks(4, "up")) << output();
    EXPECT_EQ(slurm_->run({"scancel", "--batch", "--signal=TERM", id}).status, 0);
    EXPECT_EQ(slurm_->await_state(id, kEnds), "FAILED");
    EXPECT_THAT(slurm_->run({"scontrol", "show", "job", id}).out, HasSubstr("ExitCode=75:0"));
    EXPECT_EQ(occurrences(output(), "]: saved\n"), 4) << output();
}

TEST_F(StartSlurm, ARequeuedJobStartsOnAllHostsAgain) {
    const std::string id =
        slurm_->submit("exec " + path_of("DDPRUN") + " --nproc-per-node=1 " + path_of("PROBE") +
                           " env SLURM_RESTART_COUNT once " + hosts_->home() + "/" + mark_ +
                           ".once note 15 asked say up noted 15 exit 0 end env WORLD_SIZE",
                       {"-N2", "--output=" + mark_, "--open-mode=append"});
    ASSERT_TRUE(slurm_->await_text(mark_, "]: up")) << output();
    EXPECT_EQ(slurm_->run({"scontrol", "requeue", id}).status, 0);
    EXPECT_TRUE(slurm_->await_text(mark_, "SLURM_RESTART_COUNT=1")) << output();
    EXPECT_EQ(slurm_->await_state(id, {"COMPLETED"}), "COMPLETED") << output();
    EXPECT_THAT(output(), AllOf(HasSubstr("[0]: WORLD_SIZE=2"), HasSubstr("[1]: WORLD_SIZE=2")));
}

TEST_F(StartSlurm, AKilledHeadLeavesNothingOnAnyHost) {
    const std::string id = submit("--nproc-per-node=2", "ignore 15 say up hold");
    ASSERT_TRUE(await_ranks(4, "up")) << output();
    EXPECT_EQ(run(hosts_->command(0, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    EXPECT_EQ(slurm_->await_state(id, kEnds), "FAILED") << output();
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartSlurm, AKilledDdprunOfTheOtherHostEndsTheJobAndLeavesNothing) {
    const std::string id = submit("--nproc-per-node=2", "say up hold");
    ASSERT_TRUE(await_ranks(4, "up")) << output();
    EXPECT_EQ(run(hosts_->command(1, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    EXPECT_EQ(slurm_->await_state(id, kEnds), "FAILED") << output();
    EXPECT_THAT(output(), HasSubstr("node01"));
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartSlurm, SallocsShellOnAHostOfItsOwnIsTheHeadAndRunsNoWorkers) {
    std::vector<std::string> command{"salloc", "-N1", "-w", "node01"};
    for (const std::string& word :
         ddprun_probe({"--nproc-per-node=2"}, {"env", "WORLD_SIZE", "env", "SLURMD_NODENAME"}))
        command.push_back(word);
    const Outcome outcome = slurm_->run(command);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(
        outcome.err,
        HasSubstr("this host (node00) is none of them and runs no workers; starting ddprun on it by srun"));
    EXPECT_EQ(occurrences(outcome.out, "WORLD_SIZE=2\n"), 2) << outcome.out;
    EXPECT_EQ(occurrences(outcome.out, "SLURMD_NODENAME=node01\n"), 2) << outcome.out;
}

TEST_F(StartSlurm, OneDdprunPerNodeUnderSrunIsOneJobWhateverSrunOffers) {
    for (const char* mpi : {"none", "pmi2", "pmix"}) {
        std::vector<std::string> command{"srun", "-N2", "--ntasks-per-node=1", std::string("--mpi=") + mpi};
        for (const std::string& word :
             ddprun_probe({"--nproc-per-node=2"}, {"env", "RANK", "env", "WORLD_SIZE"}))
            command.push_back(word);
        const Outcome outcome = slurm_->run(command);
        EXPECT_EQ(outcome.status, 0) << mpi << outcome.err;
        for (const char* line : {"[0]: RANK=0\n", "[3]: RANK=3\n", "[2]: WORLD_SIZE=4\n"})
            EXPECT_THAT(outcome.out, HasSubstr(line)) << mpi << outcome.err;
    }
}

}  // namespace
}  // namespace ddprun::test
