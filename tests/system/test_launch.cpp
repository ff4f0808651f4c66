#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "env/text.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& piece) {
    int n = 0;
    for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
    return n;
}

std::string content_of(const std::filesystem::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Launch, WorkersOfOneJobAgreeOnAMasterPortThatIsFree) {
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=2"}, {"env", "MASTER_PORT", "env", "MASTER_ADDR"}));
    std::set<std::string> ports;
    for (const std::string_view line : split(outcome.out, '\n')) {
        if (const std::size_t at = line.find("MASTER_PORT="); at != line.npos) ports.emplace(line.substr(at));
    }
    EXPECT_EQ(ports.size(), 1u) << outcome.out;
    EXPECT_EQ(count(outcome.out, "MASTER_ADDR=127.0.0.1"), 2) << outcome.out;
}

TEST(Launch, SuccessfulJobsPrintNothingOfOurs) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2"}, {"say", "hello"}));
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(said_of_its_own_job(outcome), "");
}

TEST(Launch, ExitsWithTheCodeOfTheWorkerThatFailedFirst) {
    const Outcome outcome = run(ddprun_probe(
        {"--nproc-per-node=4"}, {"rank", "2", "err", "cannot go on", "exit", "17", "end", "hold"}));
    EXPECT_EQ(outcome.status, 17);
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("rank 2"), HasSubstr("exit code 17"), HasSubstr("cannot go on")));
    EXPECT_LT(outcome.took.count(), 20'000) << "the others would hold";
}

TEST(Launch, ADeathBySignalIsNamedAndGives128PlusTheSignal) {
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=3"}, {"rank", "1", "kill", "9", "end", "hold"}));
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("root cause: rank 1"), HasSubstr("SIGKILL")));
}

TEST(Launch, AProgramThatDoesNotExistIsNamedWithItsRemedyAndGives127) {
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=2", "./trian"});
    EXPECT_EQ(outcome.status, 127);
    EXPECT_THAT(outcome.err, HasSubstr("./trian"));
    EXPECT_EQ(count(said_of_its_own_job(outcome), "\n"), 1) << outcome.err;
}

TEST(Launch, ABadWorkerCountIsRefusedBeforeAnythingStarts) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=eight"}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err,
              "ddprun: --nproc-per-node: 'eight' is not a number (expected a count, auto, gpu or cpu)\n");
}

TEST(Launch, ADryRunShowsThePlanAndStartsNothing) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2", "--dry-run"}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("RANK=1"), HasSubstr("WORLD_SIZE=2"), Not(HasSubstr("[0]: started"))));
}

std::vector<std::string> dry_run(std::vector<std::string> words) {
    words.insert(words.begin(), {path_of("DDPRUN"), "--dry-run"});
    return words;
}

TEST(Launch, ADryRunOfSeveralNodesHasTheMasterThatTheRunWillHave) {
    const TemporaryDirectory directory;
    const std::string script = directory.file("train.py");
    std::ofstream(script) << "print('started')\n";
    const std::vector<std::string> nodes = {"--nnodes=2", "--nproc-per-node=2",
                                            "--rdzv-endpoint=10.77.0.1:29400"};
    const auto on_node = [&](const std::string& rank, const std::string& program) {
        std::vector<std::string> words = nodes;
        words.insert(words.end(), {"--node-rank=" + rank, program});
        return run(dry_run(words)).out;
    };
    const std::string second = on_node("1", script);
    EXPECT_THAT(second, AllOf(HasSubstr("node 1 of 2), ranks 2-3 of 4"),
                              HasSubstr("controller: at 10.77.0.1:29400 (node rank 1)")));
    EXPECT_THAT(second, AllOf(HasSubstr("  MASTER_ADDR=10.77.0.1\n"), HasSubstr("  MASTER_PORT=29400\n")))
        << "PyTorch's store is the controller's";
    EXPECT_THAT(second, HasSubstr("program:    " + script + " (run by "));
    const std::string first = on_node("0", "/bin/true");
    EXPECT_THAT(first,
                AllOf(HasSubstr("  MASTER_ADDR=10.77.0.1\n"), HasSubstr("  MASTER_PORT=<a free port>\n"),
                      HasSubstr("on this node, port 29400")));

    const std::string unnumbered =
        run(dry_run({"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=198.51.100.1", "/bin/true"})).out;
    EXPECT_THAT(
        unnumbered,
        HasSubstr("node:       shown as node 1: all but the first are numbered when they have met\n"));
}

TEST(Launch, ADryRunOfSeveralHostsListsTheHostsAndTheirCommands) {
    const Outcome outcome =
        run(dry_run({"--hosts=localhost,node07:3", "--start=ssh", "--nproc-per-node=2", "/bin/true"}),
            with_environment({"PATH=/usr/bin:/bin"}));
    if (outcome.err.find("PATH has no ssh") != std::string::npos) GTEST_SKIP() << "ssh is not installed";
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(
        outcome.out,
        HasSubstr(
            "hosts:      localhost: node 0, ranks 0-1, this host\n            node07: node 1, ranks 2-3, ddprun started by ssh\n"));
}

TEST(Launch, ADryRunIsRefusedWhenTheRunIs) {
    const TemporaryDirectory empty;
    const std::vector<std::vector<std::string>> impossible = {{"--report=" + empty.file("none/r.json")},
                                                              {"--stdin=5"},
                                                              {"--local-ranks-filter=7"},
                                                              {"--local-addr=198.51.100.1"},
                                                              {"--nnodes=2"}};
    for (const std::vector<std::string>& options : impossible) {
        std::vector<std::string> words = options;
        words.emplace_back("/bin/true");
        const Outcome dry = run(dry_run(words));
        words.insert(words.begin(), path_of("DDPRUN"));
        const Outcome real = run(words);
        EXPECT_EQ(dry.status, 64) << options.front() << dry.err;
        EXPECT_EQ(real.status, 64) << options.front() << real.err;
        EXPECT_EQ(dry.err, real.err);
        EXPECT_EQ(occurrences(dry.err, "\n"), 1) << dry.err;
    }
    const RunOptions without_pmix = with_environment({"DDPRUN_PMIX_LIBRARY=" + empty.file("libpmix.so")});
    EXPECT_EQ(run(dry_run({"--pmix=on", "/bin/true"}), without_pmix).status, 64);
}

TEST(Launch, WorkersStartWithCleanSignalsAndOnlyTheirDescriptors) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=1"}, {"sigs", "fds"}));
    EXPECT_THAT(outcome.out, HasSubstr("SigBlk:\t0000000000000000"));
    EXPECT_THAT(outcome.out, HasSubstr("SigIgn:\t0000000000300000")) << "the terminal's, TTIN and TTOU";
    EXPECT_THAT(outcome.out, HasSubstr("fds: 0 1 2 250 251 252 253\n"));
}

TEST(Launch, AWorkerInNamespacesOfItsOwnReachesTheStore) {
    const std::vector<std::string> apart{"unshare", "--user", "--map-root-user", "--net",
                                         "--pid",   "--fork", "--mount-proc"};
    std::vector<std::string> trial = apart, job{path_of("DDPRUN"), "--nproc-per-node=1", "--prefix="};
    trial.push_back("true");
    if (run(trial).status != 0) GTEST_SKIP() << "this machine gives no user namespaces";
    job.insert(job.end(), apart.begin(), apart.end());
    job.insert(job.end(), {"python3", path_of("SOURCE_ROOT") + "/tests/support/store_client.py"});
    const Outcome outcome = run(job);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "the document is right\n");
}

TEST(Launch, TheTokenIsOnNoCommandLineAndInNoLog) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=1", "--dry-run"}, {"say", "x"}),
                                with_environment({"LOGLEVEL=DEBUG"}));
    const Outcome real = run(ddprun_probe({"--nproc-per-node=1"}, {"env", "DDPRUN_TOKEN"}),
                             with_environment({"LOGLEVEL=DEBUG"}));
    const std::size_t at = real.out.find("DDPRUN_TOKEN=");
    ASSERT_NE(at, std::string::npos) << real.out << real.err;
    const std::string token = real.out.substr(at + 13, 32);
    EXPECT_EQ(count(real.err, token), 0);
    EXPECT_THAT(outcome.out, Not(::testing::ContainsRegex("DDPRUN_TOKEN=[0-9a-f]")));
}

TEST(Launch, UserVariablesReachTheWorkersAndOurContractWins) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=1"}, {"env", "MY_SETTING", "env", "RANK"}),
                                with_environment({"MY_SETTING=as given", "RANK=7"}));
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("MY_SETTING=as given\n"), HasSubstr("RANK=0\n")));
}

TEST(Launch, TheFirstFailureIsLeftInTheLaunchersOwnErrorFile) {
    const TemporaryDirectory directory;
    const std::string path = directory.file("error.json");
    const RunOptions told = with_environment({"TORCHELASTIC_ERROR_FILE=" + path});
    run(ddprun_probe({"--nproc-per-node=2"}, {"rank", "1", "report", "boom", "exit", "3", "end", "hold"}),
        told);
    EXPECT_THAT(content_of(path), AllOf(HasSubstr("boom"), HasSubstr("\"errorCode\":3")));
    run(ddprun_probe({"--nproc-per-node=2"}, {"rank", "1", "kill", "9", "end", "hold"}), told);
    EXPECT_THAT(content_of(path), AllOf(HasSubstr("rank 1 on "), HasSubstr("SIGKILL"),
                                        HasSubstr("\"errorCode\":-9"), Not(HasSubstr("boom"))));
    run({path_of("DDPRUN"), "./absent"}, told);
    EXPECT_THAT(content_of(path), AllOf(HasSubstr("./absent: no such file"), HasSubstr("\"errorCode\":127")));
    std::filesystem::remove(path);
    EXPECT_EQ(run(ddprun_probe({}, {"report", "not a failure"}), told).status, 0);
    EXPECT_FALSE(std::filesystem::exists(path)) << "nothing has failed";
}

TEST(Launch, ALauncherUnderALauncherReportsItsFailureToIt) {
    std::vector<std::string> inner = ddprun_probe({}, {"report", "boom", "exit", "3"});
    inner.insert(inner.begin(), path_of("DDPRUN"));
    const Outcome outcome = run(inner);
    EXPECT_EQ(outcome.status, 3);
    // The outer launcher's report is last.
    EXPECT_THAT(outcome.err.substr(outcome.err.rfind("first cause")), HasSubstr("error report  | boom"))
        << outcome.err;
}

TEST(Launch, ManyWorkersThatExitAtOnceAreAllSeen) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=200"}, {"say", "here"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(count(outcome.out, ": here\n"), 200);
}

TEST(Launch, AFailureWhileOthersAreStillBeingStartedEndsTheJob) {
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=100"}, {"rank", "0", "exit", "4", "end", "hold"}));
    EXPECT_EQ(outcome.status, 4) << outcome.err;
    EXPECT_FALSE(outcome.timed_out);
}

}  // namespace
}  // namespace ddprun::test
