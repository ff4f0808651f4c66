#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

/// An older kernel, as on many clusters: without close_range, clone3, pidfd_open and later calls.
namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class OldKernel : public ::testing::Test {
  protected:
    void SetUp() override {
        if (run(there({"true"})).status != 0) GTEST_SKIP() << "no seccomp filters here";
    }
    static std::vector<std::string> there(std::vector<std::string> command) {
        constexpr long kFirstNewCall = 424, kLast = 100'000;
        return with_refused_calls(kFirstNewCall, kLast, ENOSYS, std::move(command));
    }
    const std::string mark_ = "PROBE_JOB=" + unique_name("old");
    const RunOptions options_ = with_environment({mark_});
};

TEST_F(OldKernel, AJobEndsAndLeavesNothing) {
    const Outcome outcome =
        run(there(ddprun_probe({"--nproc-per-node=3"}, {"child", "daemon", "fds", "exit", "0"})), options_);
    EXPECT_FALSE(outcome.timed_out) << outcome.err;
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_LT(outcome.took, 10s);
    EXPECT_TRUE(all_gone(mark_, 0ms));
}

TEST_F(OldKernel, AFailureIsRestartedAndExplained) {
    const Outcome outcome = run(there(ddprun_probe({"--nproc-per-node=2", "--max-restarts=1"},
                                                   {"rank", "1", "exit", "17", "end", "hold"})),
                                options_);
    EXPECT_EQ(outcome.status, 17) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("the one restart is used up"));
    EXPECT_TRUE(all_gone(mark_, 0ms));
}

TEST_F(OldKernel, SigkillOfDdprunLeavesNoProcess) {
    Program program(there(ddprun_probe({"--nproc-per-node=2"}, {"child", "daemon", "say", "up", "hold"})),
                    options_);
    ASSERT_TRUE(program.wait_for_output("[1]: up"));
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(all_gone(mark_));
}

TEST_F(OldKernel, WorkersTrain) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(there({path_of("DDPRUN"), "--nproc-per-node=2", path_of("TRAIN"),
                                       "--device=cpu", "--epochs=2", "--checkpoint-dir=" + directory.path()}),
                                options_);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("bitwise equal on 2 workers"));
}

}  // namespace
}  // namespace ddprun::test
