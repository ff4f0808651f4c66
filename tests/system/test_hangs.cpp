#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/support/fake_ras.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kHung = 124;

std::vector<std::string> ddprun_worker(const std::vector<std::string>& options,
                                       const std::vector<std::string>& worker) {
    std::vector<std::string> command{path_of("DDPRUN")};
    command.insert(command.end(), options.begin(), options.end());
    command.insert(command.end(), worker.begin(), worker.end());
    return command;
}

TEST(Hangs, AStoppedRankIsNamedAndTheJobEnds) {
    const TemporaryDirectory no_tools;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=3", "--hang-timeout=1"}, {"rank", "1", "stop", "end", "hold"}),
            with_environment({"PATH=" + no_tools.path()}));
    EXPECT_EQ(outcome.status, kHung) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("hang: rank 1 has been stopped"));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 0 (pid "), HasSubstr("; rank 2 stands alike:"),
                                   HasSubstr("rank 1 (pid ")))
        << "stacks of all ranks";
}

TEST(Hangs, TheRankThatKeepsTheOthersWaitingInACollectiveIsNamedWithIt) {
    const Outcome outcome =
        run(ddprun_worker({"--nproc-per-node=3", "--hang-timeout=1"}, {path_of("DDP_PROBE"), "lag"}));
    EXPECT_EQ(outcome.status, kHung) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("rank 1 has not called all_reduce #4 (16 B)"));
    EXPECT_THAT(outcome.err, HasSubstr("ranks 0, 2 wait for it"));
    // The ranks sent their stacks by their handlers.
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("by its own handler"), HasSubstr("pause ["),
                                   HasSubstr("ddp::cpu::Lockstep::meet()")));
}

TEST(Hangs, AHungGenerationIsStartedAgainLikeAFailedOne) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(
        ddprun_probe({"--nproc-per-node=2", "--hang-timeout=1", "--max-restarts=1"},
                     {"rank", "0", "once", directory.path() + "/hung", "stop", "end", "end", "exit", "0"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("hang: "), HasSubstr("restart 1 of 1")));
}

TEST(Hangs, APythonRankThatSpinsIsNamedWhenItHasReportedItsSteps) {
    if (!std::filesystem::exists("/usr/bin/python3")) GTEST_SKIP() << "python3 is not installed";
    // Rank 0 waits for rank 1, which has done a step less, and keeps a processor busy.
    const std::string program = R"(
import os, signal
import ddprun
rank = int(os.environ["RANK"])
for step in range(1, 4 - rank):
    ddprun.step(step)
while rank == 1: pass
signal.pause()
)";
    const TemporaryDirectory no_tools;
    const Outcome outcome =
        run(ddprun_worker({"--nproc-per-node=2", "--hang-timeout=1"}, {"/usr/bin/python3", "-c", program}),
            with_environment({"PATH=" + no_tools.path(), "PYTHONDONTWRITEBYTECODE=1"}));
    EXPECT_EQ(outcome.status, kHung) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("ranks 0-1 have reported no progress for"));
    EXPECT_THAT(outcome.err, HasSubstr("rank 1 is behind, at step 2 of 3 (it is busy with something else)"));
}

TEST(Hangs, WorkersThatMakeProgressAreLeftAlone) {
    // The silence is shorter than the timeout, the work longer.
    const Outcome outcome =
        run(ddprun_worker({"--nproc-per-node=2", "--hang-timeout=2"},
                          {"/bin/sh", "-c", "for i in 1 2 3 4 5 6 7 8; do sleep 0.5; echo $i; done"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("hang")));
}

TEST(Hangs, NcclsOwnStatusOfTheJobIsInTheReport) {
    FakeRas ras({"SERVER PROTOCOL 2\n", "OK\n", "Job summary\n  2 ranks differ\n"}, FakeRas::Then::Close);
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2", "--hang-timeout=1"}, {"stop"}),
                                with_environment({"NCCL_RAS_ADDR=" + to_string(ras.where())}));
    EXPECT_EQ(outcome.status, kHung) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("NCCL's own status of the job"), HasSubstr("      2 ranks differ")));
    EXPECT_THAT(ras.heard(), ElementsAre("CLIENT PROTOCOL 2", "TIMEOUT 2", "STATUS"));
}

TEST(Hangs, AMissingRasServiceIsNotMentioned) {
    const ReservedPort nobody;
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2", "--hang-timeout=1"}, {"stop"}),
                                with_environment({"NCCL_RAS_ADDR=" + nobody.text()}));
    EXPECT_EQ(outcome.status, kHung) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("NCCL")), Not(HasSubstr(nobody.number()))));
}

TEST(Stacks, AreShownOfARunningJobOnRequest) {
    const std::string id = unique_name("stacks");
    const Program program(
        ddprun_worker({"--nproc-per-node=2", "--rdzv-id=" + id}, {path_of("DDP_PROBE"), "lag"}));
    // Before the workers have joined, there is no handler to ask.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    Outcome stacks;
    do stacks = run({path_of("DDPRUN"), "stacks", "--job", id, "--rank", "1"});
    while (stacks.out.find("wait_for_signals") == std::string::npos &&
           stacks.out.find("pause [") == std::string::npos && std::chrono::steady_clock::now() < deadline);
    EXPECT_EQ(stacks.status, 0) << stacks.err;
    EXPECT_THAT(stacks.out, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("#0 "), Not(HasSubstr("rank 0"))));
    const Outcome nobody = run({path_of("DDPRUN"), "stacks", "--job", id, "--rank", "9"});
    EXPECT_EQ(nobody.status, 1);
    EXPECT_THAT(nobody.err, HasSubstr("no such rank"));
}

/// The stacks of a job whose ddprun finds only these programs.
std::string stacks_of(const std::vector<std::string>& worker, const std::string& path,
                      const std::string& ready) {
    const std::string id = unique_name("stacks");
    Program program(ddprun_worker({"--nproc-per-node=1", "--rdzv-id=" + id}, worker),
                    with_environment({"PATH=" + path}));
    if (!program.wait_for_output(ready)) return "the worker did not start";
    const Outcome outcome = run({path_of("DDPRUN"), "stacks", "--job", id});
    return outcome.out + outcome.err;
}

TEST(Stacks, ComeFromAnInstalledDebuggerWithoutLibddp) {
    for (const std::string tool : {"gdb", "eu-stack"}) {
        if (!std::filesystem::exists("/usr/bin/" + tool)) GTEST_SKIP() << tool << " is not installed";
        const TemporaryDirectory directory;
        std::filesystem::create_symlink("/usr/bin/" + tool, directory.file(tool));
        const std::string stacks =
            stacks_of({path_of("PROBE"), "say", "up", "hold"}, directory.path(), "up\n");
        if (stacks.find("by the kernel") != std::string::npos)
            GTEST_SKIP() << tool << " may not attach here: " << stacks;
        EXPECT_THAT(stacks,
                    AllOf(HasSubstr("by " + tool), HasSubstr("#0 "), HasSubstr("pause"), HasSubstr("main")))
            << tool;
        EXPECT_THAT(stacks, AllOf(Not(HasSubstr("No such file")), Not(HasSubstr("LWP]"))))
            << "what the debugger says of itself";
    }
}

/// Makes a program of that name from a line of shell.
void make_tool(const std::string& file, const std::string& script) {
    std::ofstream(file) << "#!/bin/sh\n" << script << "\n";
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
}

TEST(Stacks, ComeFromPySpyForPythonElseFromTheNextBestTool) {
    const std::string python = "/usr/bin/python3";
    if (!std::filesystem::exists(python)) GTEST_SKIP() << "python3 is not installed";
    const std::vector<std::string> worker = {python, "-c",
                                             "import time; print('up', flush=True); time.sleep(1000)"};
    const TemporaryDirectory directory;
    make_tool(directory.file("py-spy"),
              "echo 'Thread 7 (idle): \"MainThread\"'; echo \"    train (by $1 $2)\"");
    EXPECT_THAT(stacks_of(worker, directory.path(), "up\n"),
                AllOf(HasSubstr("by py-spy"), HasSubstr("    train (by dump --pid)")));
    // In a virtual environment it lies beside the interpreter, in no PATH.
    std::filesystem::create_symlink(python, directory.file("python3"));
    const std::vector<std::string> in_environment = {directory.file("python3"), worker[1], worker[2]};
    EXPECT_THAT(stacks_of(in_environment, directory.file("none"), "up\n"), HasSubstr("by py-spy"));
    make_tool(directory.file("py-spy"), "echo 'Error: Permission Denied'; exit 1");
    EXPECT_THAT(stacks_of(worker, directory.path(), "up\n"),
                AllOf(HasSubstr("by the kernel"), HasSubstr("state S"), Not(HasSubstr("Denied"))));
}

TEST(Stacks, AFailedDebuggerDoesNotChangeTheKernelsView) {
    const std::string python = "/usr/bin/python3";
    if (!std::filesystem::exists(python)) GTEST_SKIP() << "python3 is not installed";
    const TemporaryDirectory directory;
    make_tool(directory.file("gdb"), "kill -STOP $4; exit 1");  // -nx -batch -p PID
    EXPECT_THAT(stacks_of({python, "-c", "import time; print('up', flush=True); time.sleep(1000)"},
                          directory.path(), "up\n"),
                AllOf(HasSubstr("by the kernel"), HasSubstr("state S"), HasSubstr("py-spy")));
}

TEST(Stacks, PySpyItselfNamesTheLinesOfAPythonProgram) {
    const Outcome where = run({"/bin/sh", "-c", "command -v py-spy"});
    if (where.status != 0) GTEST_SKIP() << "py-spy is not installed";
    const std::string py_spy = where.out.substr(0, where.out.find('\n'));
    const std::vector<std::string> worker = {
        "/usr/bin/python3", "-c",
        "import time\ndef train_step():\n  print('up', flush=True)\n  time.sleep(1000)\ntrain_step()"};
    EXPECT_THAT(stacks_of(worker, std::filesystem::path(py_spy).parent_path(), "up\n"),
                AllOf(HasSubstr("by py-spy"), HasSubstr("train_step (<string>:4)")));
}

/// The rank leaves like one that has fewer batches than the others, and no Join.
TEST(ErrorReports, ARankThatLeavesEarlyIsNamedByThoseThatWaitForIt) {
    const Outcome outcome = run(ddprun_worker({"--nproc-per-node=3"}, {path_of("DDP_PROBE"), "leave"}));
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_THAT(outcome.err, HasSubstr("all_reduce #4 (4 float32, 16 B, sum): rank 1 (pid "));
    EXPECT_THAT(outcome.err, HasSubstr(") ended without taking part"));
}

const std::string kLeavesBeforeItJoins = R"(test "$RANK" = "$1" && exit 0; exec "$0" spans)";

TEST(ErrorReports, ARankThatEndsWithZeroBeforeItHasJoinedEndsTheWaitOfTheOthers) {
    const Outcome outcome = run(
        ddprun_worker({"--nproc-per-node=2"}, {"sh", "-c", kLeavesBeforeItJoins, path_of("DDP_PROBE"), "1"}));
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("(rank 1 ended with 0 before it had joined)"));
}

TEST(ErrorReports, ARankOfAnotherNodeThatEndsWithZeroBeforeItHasJoinedEndsTheWaitToo) {
    const ReservedPort port;
    const auto node = [&] {
        return ddprun_worker({"--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=" + port.text()},
                             {"sh", "-c", kLeavesBeforeItJoins, path_of("DDP_PROBE"), "1"});
    };
    Program one(node()), two(node());
    const Outcome first = one.wait(), second = two.wait();
    EXPECT_EQ(first.status, 1) << first.err;
    EXPECT_EQ(second.status, 1) << second.err;
    EXPECT_THAT(first.err + second.err, HasSubstr("(rank 1 ended with 0 before it had joined)"));
}

TEST(ErrorReports, HoldTheTextAndTheStackOfACppException) {
    const Outcome outcome = run(ddprun_worker({"--nproc-per-node=2"}, {path_of("DDP_PROBE"), "throw"}));
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("error report  | rank 1: the disk of the moon is full"),
                                   HasSubstr("probe::throw_in_a_named_function()")));
}

TEST(ErrorReports, ExistAfterACrashWithAndWithoutALogDirectory) {
    const TemporaryDirectory directory;
    for (const std::string& option : {std::string("--nproc-per-node=2"), "--log-dir=" + directory.path()}) {
        const Outcome outcome =
            run(ddprun_worker({"--nproc-per-node=2", option}, {path_of("DDP_PROBE"), "segv"}));
        EXPECT_EQ(outcome.status, 128 + SIGSEGV) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr("error report  | SIGSEGV (invalid memory access)"));
    }
}

TEST(Preemption, TrainSavesACheckpointAndTheJobAsksToBeStartedAgain) {
    const TemporaryDirectory directory;
    const std::vector<std::string> train = {path_of("TRAIN"), "--epochs=1000000",
                                            "--checkpoint-dir=" + directory.path()};
    Program program(ddprun_worker({"--nproc-per-node=2", "--signal=TERM=preempt"}, train));
    ASSERT_TRUE(program.wait_for_output("/1000000  loss"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("train: asked to stop in epoch"));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("was preempted"), HasSubstr("all workers stop after step ")));
    EXPECT_TRUE(std::filesystem::exists(directory.path() + "/latest"));
}

}  // namespace
}  // namespace ddprun::test
