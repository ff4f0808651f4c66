#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Signals, TermStopsTheWorkersGracefullyAndSaysRequeueMe) {
    Program program(ddprun_probe({"--nproc-per-node=2"}, {"note", "15", "saving", "say", "up", "noted", "15", "exit", "0"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: saving"), HasSubstr("[1]: saving")));
    EXPECT_THAT(outcome.err, HasSubstr("SIGTERM: stopping 2 workers"));
}

TEST(Signals, TheFirstInterruptIsGracefulAndTheSecondKillsNow) {
    Program program(ddprun_probe({"--nproc-per-node=2"}, {"ignore", "2", "ignore", "15", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGINT);
    ASSERT_TRUE(program.wait_for_output("SIGINT: stopping 2 workers"));
    const auto second = std::chrono::steady_clock::now();
    program.signal(SIGINT);
    const Outcome outcome = program.wait();
    EXPECT_LT(std::chrono::steady_clock::now() - second, 1s);
    EXPECT_EQ(outcome.status, 75) << outcome.err;
}

TEST(Signals, WorkersThatIgnoreTheStopAreKilledWhenTheGraceIsOver) {
    Program program(ddprun_probe({"--nproc-per-node=2", "--shutdown-timeout=1"}, {"ignore", "15", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    const auto sent = std::chrono::steady_clock::now();
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    const auto took = std::chrono::steady_clock::now() - sent;
    EXPECT_GE(took, 950ms);
    EXPECT_LT(took, 3s);
    EXPECT_EQ(outcome.status, 75);
}

TEST(Signals, Usr1IsForwardedAndTheJobGoesOn) {
    Program program(ddprun_probe({"--nproc-per-node=2"}, {"note", "10", "got it", "on", "12", "0", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGUSR1);
    ASSERT_TRUE(program.wait_for_output("[0]: got it") && program.wait_for_output("[1]: got it"));
    program.signal(SIGUSR2);
    EXPECT_EQ(program.wait().status, 0);
}

TEST(Signals, WorkersReceiveTheSignalThatWasSent) {
    Program program(ddprun_probe({"--nproc-per-node=1"}, {"note", "2", "an interrupt", "note", "15", "a termination", "say", "up", "noted", "2"}));
    ASSERT_TRUE(program.wait_for_output("up"));
    program.signal(SIGINT);
    const Outcome outcome = program.wait();
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("an interrupt"), Not(HasSubstr("a termination"))));
}

TEST(Signals, ASurvivorThatIgnoresTermDelaysAFailedJobOnlyByTheGrace) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2", "--shutdown-timeout=1"},
                                             {"rank", "0", "await", directory.file("deaf"), "exit", "6", "end",
                                              "ignore", "15", "once", directory.file("deaf"), "end", "hold"}));
    EXPECT_EQ(outcome.status, 6) << outcome.err;
    EXPECT_GE(outcome.took, 1s);
    EXPECT_LT(outcome.took, 4s);
}

}  // namespace
}  // namespace ddprun::test
