// A failed worker starts again in place, and the others go on (docs/elastic.md, "Recovery in place").
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <thread>

#include "tests/bench/torch_python.h"
#include "tests/support/hosts.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// ddprun with options, and the probe (recover_probe.cpp) with its arguments as the program.
std::vector<std::string> ddprun_recover(std::vector<std::string> options,
                                        const std::vector<std::string>& probe) {
    options.insert(options.begin(), path_of("DDPRUN"));
    options.push_back(path_of("RECOVER_PROBE"));
    options.insert(options.end(), probe.begin(), probe.end());
    return options;
}

/// "rank R runs in generation G as PID from UNITS", by rank and generation.
struct Life {
    pid_t pid = 0;
    int units = 0;
};
std::map<std::pair<int, int>, Life> lives(const std::string& out) {
    static const std::regex line(R"(rank (\d+) runs in generation (\d+) as (\d+) from (\d+))");
    std::map<std::pair<int, int>, Life> found;
    for (std::sregex_iterator it(out.begin(), out.end(), line); it != std::sregex_iterator(); ++it) {
        const std::smatch& one = *it;
        found[{std::stoi(one[1]), std::stoi(one[2])}] = {std::stoi(one[3]), std::stoi(one[4])};
    }
    return found;
}

/// Waits until a line of the probe says that this rank runs in that generation, and returns its process.
pid_t pid_of(const std::string& log_dir, int rank, int generation) {
    const auto find = [&]() -> pid_t {
        for (const auto& [name, text] : log_files(log_dir)) {
            const auto all = lives(text);
            if (const auto one = all.find({rank, generation}); one != all.end()) return one->second.pid;
        }
        return 0;
    };
    return comes([&] { return find() != 0; }, 60s) ? find() : 0;
}

TEST(Recovery, ReplacesAKilledWorkerWhileTheOthersKeepTheirProcess) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover({"--nproc-per-node=4", "--tee=3", "--log-dir=" + logs.path()}, {"1500"}));
    for (int generation = 1; generation <= 3; ++generation) {
        const int rank = generation;
        const pid_t pid = pid_of(logs.path(), rank, generation);
        ASSERT_GT(pid, 0) << generation;
        ASSERT_GT(pid_of(logs.path(), 0, generation), 0) << generation;
        ::kill(pid, SIGKILL);
        ASSERT_TRUE(program.wait_for_output("rank " + std::to_string(rank) + " is back"));
    }
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const auto all = lives(outcome.out);
    for (int generation = 1; generation <= 4; ++generation) {
        EXPECT_EQ(all.at({0, generation}).pid, all.at({0, 1}).pid) << "rank 0 never failed";
        EXPECT_EQ(all.at({1, generation}).pid == all.at({1, 1}).pid, generation == 1);
    }
    EXPECT_GT(all.at({3, 4}).units, 0) << "what the killed process had committed is kept";
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("3 ranks go on in place, rank 1 starts again"), HasSubstr("recovered after "),
                      Not(HasSubstr("root cause")), Not(HasSubstr("restart 1"))));
}

std::size_t open_descriptors(pid_t pid) {
    const auto all = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd");
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST(Recovery, LeaksNoDescriptor) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover({"--nproc-per-node=3", "-r3", "--log-dir=" + logs.path()}, {"100000"}));
    std::size_t before = 0;
    for (int generation = 1; generation <= 40; ++generation) {
        const pid_t pid = pid_of(logs.path(), generation % 3, generation);
        ASSERT_GT(pid, 0) << generation;
        if (generation == 2) before = open_descriptors(program.pid());
        ::kill(pid, SIGKILL);
        ASSERT_TRUE(program.wait_for_output("g" + std::to_string(generation + 1) + "] recovered"));
    }
    EXPECT_LE(open_descriptors(program.pid()), before + 1);
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait().status, 75);
}

TEST(Recovery, AnErrorReportReleasesTheOthersAndItsWorkerThatHangsInExitIsReplaced) {
    const TemporaryDirectory logs;
    const Outcome outcome =
        run(ddprun_recover({"--nproc-per-node=3", "--failure-grace=500ms", "-r3", "--log-dir=" + logs.path()},
                           {"700", "throw", "1"}),
            with_environment({"LOGLEVEL=debug"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const std::size_t killed = outcome.err.find("has not exited 500 ms later (--failure-grace); killing it");
    ASSERT_NE(killed, std::string::npos) << outcome.err;
    EXPECT_EQ(occurrences(outcome.err.substr(0, killed), "has left generation 1"), 2) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("though nobody has ended")));
    EXPECT_THAT(outcome.err.substr(killed), HasSubstr("2 ranks go on in place, rank 1 starts again"));
    const auto files = log_files(logs.path());
    EXPECT_EQ(occurrences(files.at("attempt_0/1/stdout.log"), "rank 1 runs in generation"), 2)
        << "the log goes on";
    EXPECT_FALSE(files.contains("attempt_0/1/error.json")) << "the report of the first process is gone";
    EXPECT_FALSE(files.contains("attempt_1/1/stdout.log"));
}

TEST(Recovery, RanksThatLeaveTheirGroupThoughNobodyHasEndedFormItAgain) {
    const Outcome outcome = run(ddprun_recover({"--nproc-per-node=3"}, {"200", "link", "1"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(
        outcome.err,
        AllOf(HasSubstr("rank 1 has left its group (a peer has ended), though nobody has ended: 3 workers "
                        "wait to go on in place"),
              HasSubstr("3 ranks go on in place\n"), HasSubstr("recovered after "),
              Not(HasSubstr("root cause"))));
    const auto all = lives(outcome.out);
    for (const int rank : {0, 1, 2}) EXPECT_EQ(all.at({rank, 2}).pid, all.at({rank, 1}).pid) << rank;
}

TEST(Recovery, RecoverRestartRestartsAllWorkers) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover(
        {"--nproc-per-node=3", "--recover=restart", "--max-restarts=1", "-r3", "--log-dir=" + logs.path()},
        {"100"}));
    const pid_t first = pid_of(logs.path(), 0, 1);
    ASSERT_GT(first, 0);
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    ASSERT_TRUE(program.wait_for_output("restart 1 of 1"));
    ASSERT_GT(pid_of(logs.path(), 0, 2), 0);
    EXPECT_NE(pid_of(logs.path(), 0, 2), first);
    program.signal(SIGTERM);
    EXPECT_THAT(program.wait().err, Not(HasSubstr("in place")));
}

TEST(Recovery, RecoverProgramLetsTheOthersWorkToTheirEnd) {
    const std::string script = "[ $RANK != 1 ] || exit 7; sleep 0.3; echo rank $RANK has ended";
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=3", "--recover=program",
                                 "--max-restarts=2", "--no-python", "/bin/sh", "-c", script});
    EXPECT_EQ(outcome.status, 7) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("rank 0 has ended"), HasSubstr("rank 2 has ended")));
    EXPECT_THAT(outcome.err, HasSubstr("exit code 7: the other ranks go on without it"));
}

TEST(Recovery, RanksThatNvrxRestartsWithoutTheKilledOneWorkToTheirEnd) {
    const std::string python = bench::torch_python();
    const std::string import_it = python + " -c 'import nvidia_resiliency_ext.inprocess' 2>/dev/null";
    if (python.empty() || std::system(import_it.c_str()) != 0)
        GTEST_SKIP() << "python3 has no torch and nvidia-resiliency-ext (PYTHON_EXEC names another)";
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=4", "--recover=program",
                                 path_of("SOURCE_ROOT") + "/tests/support/nvrx_worker.py"},
                                with_environment({"PYTHON_EXEC=" + python}));
    EXPECT_EQ(outcome.status, 128 + SIGKILL) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "of 3 has summed 3"), 3) << outcome.out << outcome.err;
}

/// The digest of examples/recover.py with four ranks, after so many kills, of each rank in turn.
std::string digest_in_python(const std::string& python, int kills, std::vector<std::string> options = {},
                             const std::string& program_file = path_of("SOURCE_ROOT") +
                                                               "/examples/recover.py") {
    const TemporaryDirectory logs;
    options.insert(options.begin(), path_of("DDPRUN"));
    options.insert(options.end(),
                   {"--nproc-per-node=4", "--tee=3", "--log-dir=" + logs.path(), program_file});
    Program program(options, with_environment({"STEPS=500", "PYTHON_EXEC=" + python}));
    for (int kill = 0; kill < kills; ++kill) {
        const auto log_of = [&](int rank) {
            return log_files(logs.path())["attempt_0/" + std::to_string(rank) + "/stdout.log"];
        };
        const auto all_live = [&] {
            for (int rank = 0; rank < 4; ++rank) {
                if (occurrences(log_of(rank), "(pid ") <= kill) return false;
            }
            return true;
        };
        if (!comes(all_live, 60s)) break;
        // Six kills before the first step would rightly end the job.
        std::this_thread::sleep_for(200ms);
        const std::string log = log_of(kill % 4);
        ::kill(std::stoi(log.substr(log.rfind("(pid ") + 5)), SIGKILL);
    }
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.err, "] recovered after"), kills) << outcome.err;
    const std::size_t at = outcome.out.find("digest ");
    return at == std::string::npos ? outcome.out + outcome.err : outcome.out.substr(at, 15);
}

TEST(Recovery, APyTorchProgramThatSpeaksTheLettersLosesNoStep) {
    const std::string python = bench::torch_python();
    if (python.empty()) GTEST_SKIP() << "python3 has no torch (PYTHON_EXEC names another)";
    EXPECT_EQ(digest_in_python(python, 8), digest_in_python(python, 0));
}

TEST(Recovery, APyTorchProgramMayTakeLongerToImportThanTheLimit) {
    const std::string python = bench::torch_python();
    if (python.empty()) GTEST_SKIP() << "python3 has no torch (PYTHON_EXEC names another)";
    const TemporaryDirectory directory;
    std::ifstream example(path_of("SOURCE_ROOT") + "/examples/recover.py");
    std::ofstream(directory.file("slow.py")) << "import time; time.sleep(4)\n" << example.rdbuf();
    EXPECT_EQ(digest_in_python(python, 1, {"--recover-within=3s"}, directory.file("slow.py")),
              digest_in_python(python, 0));
}

TEST(Recovery, ARefusalIsNamedAndAllRestart) {
    const TemporaryDirectory logs;
    Program program(
        ddprun_recover({"--nproc-per-node=3", "--max-restarts=1", "-r3", "--log-dir=" + logs.path()},
                       {"300", "refuse", "2"}));
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    ASSERT_TRUE(program.wait_for_output("not recovered in place: rank 2: it is told to; restart 1 of 1"));
    EXPECT_EQ(program.wait().status, 0);
}

TEST(Recovery, AWorkerThatDoesNotLetGoIsReplacedToo) {
    const TemporaryDirectory logs;
    Program program(
        ddprun_recover({"--nproc-per-node=5", "--recover-within=500ms", "-r3", "--log-dir=" + logs.path()},
                       {"300", "deaf", "2"}));
    const pid_t first = pid_of(logs.path(), 0, 1);
    ASSERT_GT(first, 0);
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    ASSERT_TRUE(program.wait_for_output("ranks 1, 2 are back"));
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("was not ready for generation 2 within 500 ms (--recover-within)"));
    EXPECT_EQ(pid_of(logs.path(), 0, 3), first) << "the others keep their process";
}

TEST(Recovery, AReplacementThatFailsAgainAndAgainEndsTheJobWithItsCause) {
    for (const char* const act : {"crash-new", "stuck-new"}) {
        const TemporaryDirectory logs;
        Program program(ddprun_recover(
            {"--nproc-per-node=3", "--recover-within=300ms", "-r3", "--log-dir=" + logs.path()},
            {"100000", act, "1"}));
        ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
        const Outcome outcome = program.wait();
        EXPECT_NE(outcome.status, 0) << act;
        EXPECT_THAT(outcome.err,
                    HasSubstr("5 recoveries in a row came no step further; no restarts were asked for"))
            << act;
    }
}

TEST(Recovery, AReplacementThatEndsWithZeroBeforeItHasJoinedEndsTheWaitOfTheOthers) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover({"--nproc-per-node=3", "-r3", "--log-dir=" + logs.path()},
                                   {"100000", "exit-new", "1"}));
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 128 + SIGKILL) << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("not recovered in place: rank 1 ended with 0 before it had joined; no restarts"));
}

/// What runs in sessions of their own: by its rank and the generation in which it was started.
std::map<std::pair<int, int>, pid_t> sleepers(const std::string& out) {
    static const std::regex line(R"(rank (\d+) has left (\d+) in generation (\d+))");
    std::map<std::pair<int, int>, pid_t> found;
    for (std::sregex_iterator it(out.begin(), out.end(), line); it != std::sregex_iterator(); ++it)
        found[{std::stoi((*it)[1]), std::stoi((*it)[3])}] = std::stoi((*it)[2]);
    return found;
}

TEST(Recovery, WhatTheFailedRankHasLeftInAnotherSessionEndsWithItAndNothingElse) {
    const TemporaryDirectory logs;
    const std::string script =
        "setsid sleep 1000 & echo rank $RANK has left $! in generation $DDPRUN_GENERATION; "
        "exec \"$0\" \"$@\"";
    Program program({path_of("DDPRUN"), "--nproc-per-node=3", "-r3", "--log-dir=" + logs.path(), "/bin/sh",
                     "-c", script, path_of("RECOVER_PROBE"), "100000"});
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    ASSERT_GT(pid_of(logs.path(), 1, 2), 0);
    std::map<std::pair<int, int>, pid_t> left;
    for (const auto& [name, text] : log_files(logs.path())) left.merge(sleepers(text));
    ASSERT_EQ(left.size(), 4u);
    const auto lives = [&](int rank, int generation) { return ::kill(left.at({rank, generation}), 0) == 0; };
    EXPECT_TRUE(comes([&] { return !lives(1, 1); }, 20s));
    EXPECT_TRUE(lives(0, 1) && lives(2, 1)) << "of living ranks";
    EXPECT_TRUE(lives(1, 2)) << "of the rank's new process";
    program.signal(SIGTERM);
    program.wait();
}

TEST(Recovery, MoreThanHalfOfTheRanksRestartTheGang) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover(
        {"--nproc-per-node=3", "--max-restarts=1", "-r3", "--log-dir=" + logs.path()}, {"300"}));
    const std::vector<pid_t> pids = {pid_of(logs.path(), 0, 1), pid_of(logs.path(), 1, 1)};
    ::kill(program.pid(), SIGSTOP);
    for (const pid_t pid : pids) ::kill(pid, SIGKILL);
    ::kill(program.pid(), SIGCONT);
    ASSERT_TRUE(program.wait_for_output("not recovered in place: 2 of 3 ranks failed; restart 1 of 1"));
    EXPECT_EQ(program.wait().status, 0);
}

TEST(Recovery, AStopAfterARecoveryEndsAllRanks) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover({"--nproc-per-node=3", "-r3", "--log-dir=" + logs.path()}, {"100000"}));
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    ASSERT_TRUE(program.wait_for_output("starts again"));
    program.signal(SIGTERM);  // the ranks may have to meet yet
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("SIGKILL in 1 s")));
}

/// The line of train or recovering.cpp about the weights with which it ends.
std::string digest_line(const std::string& out) {
    static const std::regex line("(sha256|digest) [0-9a-f]{64}.*");
    std::smatch found;
    return std::regex_search(out, found, line) ? found.str() : "";
}

TEST(Recovery, RehearsalsChangeNoBitOfAProgramThatKeepsTheContract) {
    const auto train = [](const char* option) {
        return run({path_of("DDPRUN"), "--nproc-per-node=3", option, path_of("TRAIN"), "--device=cpu",
                    "--data=synthetic:2000,32,10", "--hidden=64", "--epochs=10", "--batch-size=16"});
    };
    const Outcome undisturbed = train("--recover=auto"), rehearsed = train("--rehearse=20");
    EXPECT_EQ(rehearsed.status, 0) << rehearsed.err;
    EXPECT_NE(digest_line(undisturbed.out), "");
    EXPECT_EQ(digest_line(rehearsed.out), digest_line(undisturbed.out));
    EXPECT_THAT(rehearsed.err, AllOf(HasSubstr("all ranks let go and met again, 20 steps or more apart"),
                                     Not(HasSubstr("recovered after"))));
}

TEST(Recovery, RehearsalsGiveAnotherResultOfAProgramWhoseUnitsCannotBeRepeated) {
    const auto unkept = [](const char* option) {
        return run({path_of("DDPRUN"), "--nproc-per-node=3", option, path_of("RECOVERING"), "unkept", "0"});
    };
    const Outcome undisturbed = unkept("--recover=auto"), rehearsed = unkept("--rehearse=5");
    EXPECT_EQ(rehearsed.status, 0) << rehearsed.err;
    EXPECT_NE(digest_line(undisturbed.out), "");
    EXPECT_NE(digest_line(rehearsed.out), digest_line(undisturbed.out));
}

TEST(Recovery, EventsAndPsTellOfIt) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover(
        {"--nproc-per-node=3", "-r3", "--events=" + logs.file("events"), "--log-dir=" + logs.path()},
        {"1000"}));
    ::kill(pid_of(logs.path(), 1, 1), SIGKILL);
    ASSERT_TRUE(program.wait_for_output("rank 1 is back"));
    EXPECT_THAT(run({path_of("DDPRUN"), "ps"}).out,
                HasSubstr("after a failure: the failed ranks start again in place"));
    EXPECT_EQ(program.wait().status, 0);
    const std::string events = file_content(logs.file("events"));
    EXPECT_THAT(events, AllOf(HasSubstr("\"event\":\"recovered\""), HasSubstr("\"ranks\":\"1\""),
                              HasSubstr("\"in_place\":true")));
    EXPECT_EQ(occurrences(events, "\"event\":\"worker_started\""), 4);
}

// ---- several nodes

/// Three nodes with a worker each, and a spare. The job ends when the test says so.
class RecoveryOfNodes : public ::testing::Test {
  protected:
    static constexpr int kHosts = 4;
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
        hosts_.emplace(kHosts);
        for (int host = 0; host < kHosts; ++host) {
            start(host);
            if (host != kHosts - 2) continue;
            ASSERT_TRUE(nodes_[0]->wait_for_output("rank 0 runs in generation 1"));
        }
        ASSERT_TRUE(nodes_[kHosts - 1]->wait_for_output("a spare"));
    }
    void start(int host) {
        const std::vector<std::string> options{"--nnodes=2:3",
                                               "--rdzv-backend=c10d",
                                               "--rdzv-endpoint=node00:29400",
                                               "--rdzv-id=recovery",
                                               "--nproc-per-node=1",
                                               "--rdzv-conf=last_call_timeout=60",
                                               "--env=RECOVER_MEETING=" + hosts_->shared()};
        nodes_.push_back(
            std::make_unique<Program>(hosts_->command(host, ddprun_recover(options, {"1000000000"}))));
    }
    std::optional<Hosts> hosts_;
    std::vector<std::unique_ptr<Program>> nodes_;
};

TEST_F(RecoveryOfNodes, GoOnWithASpareWithFewerNodesAndWhenOneLeaves) {
    nodes_[1]->signal(SIGKILL);
    ASSERT_TRUE(nodes_[3]->wait_for_output("rank 1 runs in generation 2"));
    ASSERT_TRUE(nodes_[0]->wait_for_output("rank 1 is back"));
    nodes_[2]->signal(SIGTERM);
    ASSERT_TRUE(nodes_[3]->wait_for_output("rank 1 runs in generation 3"));
    ASSERT_TRUE(nodes_[0]->wait_for_output("rank 0 runs in generation 3"));
    const Outcome left = nodes_[2]->wait();
    EXPECT_EQ(left.status, 75) << left.err;
    std::ofstream(hosts_->shared() + "/finish");
    const Outcome head = nodes_[0]->wait(), spare = nodes_[3]->wait();
    EXPECT_EQ(head.status, 0) << head.err;
    EXPECT_EQ(spare.status, 0) << spare.err;
    EXPECT_THAT(head.err, AllOf(HasSubstr("rank 1 is lost, 2 workers wait to go on in place"),
                                HasSubstr("2 ranks go on in place, rank 1 starts on another node"),
                                HasSubstr("node02, which leaves: the others go on in place"),
                                HasSubstr("2 ranks go on in place; 2 instead of 3 nodes"),
                                Not(HasSubstr("may save")), Not(HasSubstr("root cause"))));
    const auto of_head = lives(head.out), of_spare = lives(spare.out);
    for (const int generation : {2, 3})
        EXPECT_EQ(of_head.at({0, generation}).pid, of_head.at({0, 1}).pid) << generation;
    EXPECT_EQ(of_spare.at({1, 3}).pid, of_spare.at({1, 2}).pid);
    EXPECT_GT(of_spare.at({1, 2}).units, 0) << "it has the state of the others";
}

TEST_F(RecoveryOfNodes, GoOnWhenTheHeadIsLost) {
    ASSERT_TRUE(nodes_[0]->wait_for_output("node01 is the standby"));
    nodes_[0]->signal(SIGKILL);
    for (const auto& [host, rank] : {std::pair{1, "1"}, {2, "2"}, {3, "0"}})
        ASSERT_TRUE(nodes_[static_cast<std::size_t>(host)]->wait_for_output(std::string("rank ") + rank +
                                                                            " runs in generation 3"));
    ASSERT_TRUE(nodes_[1]->wait_for_output("recovered after"));
    std::ofstream(hosts_->shared() + "/finish");
    const Outcome successor = nodes_[1]->wait(), other = nodes_[2]->wait(), spare = nodes_[3]->wait();
    for (const Outcome* const one : {&successor, &other, &spare}) EXPECT_EQ(one->status, 0) << one->err;
    EXPECT_THAT(successor.err, AllOf(HasSubstr("rank 0 is lost, 2 workers wait to go on in place"),
                                     HasSubstr("2 ranks go on in place, rank 0 starts on another node"),
                                     Not(HasSubstr("root cause"))));
    EXPECT_EQ(lives(successor.out).at({1, 3}).pid, lives(successor.out).at({1, 1}).pid);
    EXPECT_EQ(lives(other.out).at({2, 3}).pid, lives(other.out).at({2, 1}).pid);
    EXPECT_GT(lives(spare.out).at({0, 3}).units, 0) << "it has the state of the others";
}

TEST_F(RecoveryOfNodes, ASurvivorKeepsItsProcessUnderOtherNumbersWhenNodesGoAndCome) {
    nodes_[3]->signal(SIGTERM);  // no spare
    nodes_[3]->wait();
    nodes_[1]->signal(SIGKILL);
    ASSERT_TRUE(nodes_[2]->wait_for_output("rank 1 runs in generation 2"));
    start(1);
    ASSERT_TRUE(nodes_[4]->wait_for_output("rank 1 runs in generation 3"));
    ASSERT_TRUE(nodes_[2]->wait_for_output("rank 2 runs in generation 3"));
    std::ofstream(hosts_->shared() + "/finish");
    const Outcome head = nodes_[0]->wait(), moved = nodes_[2]->wait();
    EXPECT_EQ(head.status, 0) << head.err;
    EXPECT_EQ(moved.status, 0) << moved.err;
    EXPECT_EQ(nodes_[4]->wait().status, 0);
    EXPECT_THAT(head.err, AllOf(HasSubstr("recovered after "), HasSubstr("3 ranks run after "),
                                HasSubstr("growing from 2 to 3 nodes: all workers go on in place")));
    const auto lived = lives(moved.out);
    EXPECT_EQ(lived.at({2, 1}).pid, lived.at({1, 2}).pid);
    EXPECT_EQ(lived.at({2, 1}).pid, lived.at({2, 3}).pid) << "the lost node has its place back";
}

}  // namespace
}  // namespace ddprun::test
