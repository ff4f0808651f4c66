// What is started again, what never is, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include "env/io/file.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// Acts that fail as told the first `times` times, and then succeed.
std::vector<std::string> failing(const TemporaryDirectory& directory, int times,
                                 std::vector<std::string> how) {
    std::vector<std::string> acts;
    for (int n = 0; n < times; ++n) {
        acts.insert(acts.end(), {"once", directory.file("attempt" + std::to_string(n)), "say", "try"});
        acts.insert(acts.end(), how.begin(), how.end());
        acts.push_back("end");
    }
    acts.insert(acts.end(), {"say", "done"});
    return acts;
}

TEST(Restarts, AFailureRestartsEveryWorkerAndTheJobSucceeds) {
    const TemporaryDirectory directory;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=3", "--max-restarts=1"},
                         {"env", "TORCHELASTIC_RESTART_COUNT", "rank", "1", "once", directory.file("x"),
                          "exit", "7", "end", "end", "env", "DDPRUN_GENERATION"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "TORCHELASTIC_RESTART_COUNT=1"), 3);
    EXPECT_EQ(occurrences(outcome.out, "DDPRUN_GENERATION=2"), 3);
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("rank 1"), HasSubstr("exit code 7"), HasSubstr("restart 1 of 1")));
}

TEST(Restarts, SurvivorsHearTermBeforeTheNextAttempt) {
    const TemporaryDirectory directory;
    Program program(ddprun_probe({"--nproc-per-node=2", "--max-restarts=1"}, {"note",
                                                                              "15",
                                                                              "saved",
                                                                              "rank",
                                                                              "0",
                                                                              "once",
                                                                              directory.file("x"),
                                                                              "noted",
                                                                              "15",
                                                                              "exit",
                                                                              "0",
                                                                              "end",
                                                                              "end",
                                                                              "rank",
                                                                              "1",
                                                                              "once",
                                                                              directory.file("y"),
                                                                              "await",
                                                                              directory.file("x"),
                                                                              "exit",
                                                                              "7",
                                                                              "end",
                                                                              "end",
                                                                              "say",
                                                                              "again"}));
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "[0]: saved"), 1);
    EXPECT_EQ(occurrences(outcome.out, "again"), 2);
}

TEST(Restarts, ADeathBySignalIsRestartedToo) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe({"--max-restarts=2"}, failing(directory, 2, {"kill", "9"})));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("done", "try", "try"));
}

TEST(Restarts, AnUsedUpBudgetEndsTheJobWithTheLastCauseAndSaysSo) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe({"--max-restarts=2/1h"}, failing(directory, 5, {"exit", "6"})));
    EXPECT_EQ(outcome.status, 6);
    EXPECT_EQ(occurrences(outcome.out, "try"), 3);
    EXPECT_THAT(outcome.err, HasSubstr("all 2 restarts within 1 h are used up"));
}

TEST(Restarts, ASignalDuringTheBackOffEndsTheJobAtOnce) {
    Program program(ddprun_probe({"--max-restarts=5", "--restart-backoff=1h:1h"}, {"exit", "6"}));
    ASSERT_TRUE(program.wait_for_output("restart 2 of 5 in "));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_LT(outcome.took, 10s);
}

TEST(Restarts, AProgramThatCannotBeExecutedIsFinal) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("script")) << "#!" + directory.file("interpreter") + "\n";
    ::chmod(directory.file("script").c_str(), 0755);
    const Outcome outcome =
        run({path_of("DDPRUN"), "--nproc-per-node=2", "--max-restarts=3", directory.file("script")});
    EXPECT_EQ(outcome.status, 127) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("script"), HasSubstr("interpreter"), Not(HasSubstr("restart 1"))));
}

TEST(Restarts, AWorkerThatSucceededBeforeTheFailureStartsAgainWithTheOthers) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(
        ddprun_probe({"--nproc-per-node=2", "--max-restarts=1"},
                     {"say", "here", "rank", "0", "once", directory.file("y"), "end", "end", "rank", "1",
                      "once", directory.file("x"), "await", directory.file("y"), "exit", "6", "end", "end"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "[0]: here"), 2);
}

TEST(Restarts, NothingOfTheLastAttemptIsLeftWhenTheNextBegins) {
    const TemporaryDirectory directory;
    const std::string marker = unique_name("PROBE_JOB=restarts");
    const Outcome outcome = run(
        ddprun_probe({"--max-restarts=1"},
                     {"once", directory.file("x"), "child", "daemon", "exit", "6", "end", "say", "second"}),
        with_environment({marker}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_TRUE(processes_with(marker).empty());
}

// ---- the last workers' GPU memory, on a machine whose NVML is the fake one

/// Describes itself as the process that holds the GPU and fails, once; then says "again".
struct GpuHolder {
    TemporaryDirectory directory;
    RunOptions options = with_environment({"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"),
                                           "FAKE_NVML=" + directory.file("machine.json")});

    GpuHolder() { is(""); }
    void is(const std::string& processes) const {
        ASSERT_TRUE(write_file_atomically(
            directory.file("machine.json"),
            R"({"gpus": [{"total": 80000000000, "used": 65000000000, "processes": [)" + processes + "]}]}",
            0600));
    }
    [[nodiscard]] std::vector<std::string> command(std::vector<std::string> words) const {
        words.insert(words.begin(), path_of("DDPRUN"));
        const std::string script =
            "test -e $0.was && { echo again; exit 0; }; touch $0.was;"
            "echo '{\"gpus\": [{\"total\": 80000000000, \"used\": 65000000000, \"processes\": [{\"pid\": '$$', \"bytes\": 64424509440}]}]}' > $0.new;"
            "mv $0.new $0; exit 5";
        words.insert(words.end(),
                     {"--max-restarts=1", "/bin/sh", "-c", script, directory.file("machine.json")});
        return words;
    }
};

TEST(Restarts, WaitUntilTheLastWorkersGpuMemoryIsFree) {
    const GpuHolder holder;
    Program program(holder.command({}), holder.options);
    ASSERT_TRUE(
        program.wait_for_output("waiting for the GPUs' memory: GPU 0 still holds 60 GiB of process "));
    holder.is(R"({"pid": 1, "bytes": 65000000000})");
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "again\n");
    EXPECT_THAT(outcome.err, Not(HasSubstr("starting anyway")));
}

TEST(Restarts, DoNotWaitForGpuMemoryForEver) {
    const GpuHolder holder;
    const Outcome outcome = run(holder.command({"--gpu-memory-wait=300ms"}), holder.options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "again\n");
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("GPU 0 still holds 60 GiB of process "), HasSubstr("starting anyway")));
}

TEST(Restarts, WithAGpuMemoryWaitOfZeroNobodyLooks) {
    const GpuHolder holder;
    const Outcome outcome = run(holder.command({"--gpu-memory-wait=0"}), holder.options);
    EXPECT_EQ(outcome.out, "again\n");
    EXPECT_THAT(outcome.err, Not(HasSubstr("GPU")));
}

TEST(Restarts, ASignalEndsTheWaitForGpuMemory) {
    const GpuHolder holder;
    Program program(holder.command({}), holder.options);
    ASSERT_TRUE(program.wait_for_output("waiting for the GPUs' memory"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_LT(outcome.took, 20s);
}

}  // namespace
}  // namespace ddprun::test
