// Two nodes started by hand, as two ddprun on this host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "tests/support/reserved_port.h"
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

/// The two ends of a job; every option besides the node's rank is the same for both.
class TwoNodes {
  public:
    enum class Way { Static, C10d };
    /// `own`: options of each node besides.
    TwoNodes(Way way, const std::vector<std::string>& acts, std::vector<std::string> options = {},
             const std::string& marker = "PROBE=0", const std::array<std::vector<std::string>, 2>& own = {}) {
        options.insert(options.end(), {"--nnodes=2", "--nproc-per-node=2"});
        if (way == Way::Static)
            options.insert(options.end(), {"--master-addr=127.0.0.1", "--master-port=" + port_.number()});
        else
            options.insert(options.end(), {"--rdzv-backend=c10d", "--rdzv-endpoint=" + port_.text(),
                                           "--rdzv-id=" + unique_name("job")});
        for (int node = 0; node < 2; ++node) {
            std::vector<std::string> one = options;
            one.insert(one.end(), own[static_cast<std::size_t>(node)].begin(),
                       own[static_cast<std::size_t>(node)].end());
            if (way == Way::Static) one.push_back("--node-rank=" + std::to_string(node));
            nodes_.push_back(std::make_unique<Program>(
                ddprun_probe(one, acts),
                with_environment({marker, "DDPRUN_TOKEN=secret of the job", "PATH=" + no_debugger_.path()})));
        }
    }
    Program& operator[](int node) { return *nodes_[static_cast<std::size_t>(node)]; }

  private:
    /// Stacks are then what the kernel tells: at once, whatever the load.
    TemporaryDirectory no_debugger_;
    ReservedPort port_;
    std::vector<std::unique_ptr<Program>> nodes_;
};
using Way = TwoNodes::Way;

TEST(TwoNodes, StaticRendezvousGivesRanksByNodeRank) {
    TwoNodes nodes(Way::Static,
                   {"env", "GROUP_RANK", "env", "LOCAL_RANK", "env", "WORLD_SIZE", "env", "MASTER_ADDR"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(sorted_lines(zero.out),
                ElementsAre("[0]: GROUP_RANK=0", "[0]: LOCAL_RANK=0", "[0]: MASTER_ADDR=127.0.0.1",
                            "[0]: WORLD_SIZE=4", "[1]: GROUP_RANK=0", "[1]: LOCAL_RANK=1",
                            "[1]: MASTER_ADDR=127.0.0.1", "[1]: WORLD_SIZE=4"));
    EXPECT_THAT(one.out, AllOf(HasSubstr("[2]: GROUP_RANK=1"), HasSubstr("[3]: LOCAL_RANK=1"),
                               HasSubstr("[3]: WORLD_SIZE=4")));
}

TEST(TwoNodes, AFabricIsSetForTheWorkersOfBothAndSaidOnce) {
    TwoNodes nodes(Way::Static, {"env", "FI_PROVIDER", "env", "FI_EFA_FORK_SAFE"}, {"--fabric=efa"},
                   "FI_EFA_FORK_SAFE=0");
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(occurrences(zero.out + one.out, "FI_PROVIDER=efa"), 4) << zero.out << zero.err;
    EXPECT_EQ(occurrences(zero.out + one.out, "FI_EFA_FORK_SAFE=0"), 4) << "as the user set it";
    EXPECT_THAT(zero.err,
                HasSubstr("fabric efa (--fabric efa): FI_PROVIDER=efa; as you set it: FI_EFA_FORK_SAFE\n"));
    EXPECT_THAT(one.err, Not(HasSubstr("fabric")));
}

TEST(TwoNodes, WhoSitsWhereIsOneTableForNodesThatAreAlike) {
    cpu_set_t ours;
    ::sched_getaffinity(0, sizeof ours, &ours);
    if (CPU_COUNT(&ours) < 2) GTEST_SKIP() << "needs two CPUs";
    TwoNodes nodes(Way::Static, {}, {"--numa-binding=exclusive"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(occurrences(zero.err, "seats on "), 1) << zero.err;
    EXPECT_THAT(zero.err, AllOf(HasSubstr("  rank 0, 2: CPUs "), HasSubstr("  rank 1, 3: CPUs ")));
    EXPECT_THAT(one.err, Not(HasSubstr("CPUs ")));
}

TEST(TwoNodes, C10dOnOneHostFormsOneWorldWhoeverComesFirst) {
    TwoNodes nodes(Way::C10d, {"env", "RANK", "env", "WORLD_SIZE"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    for (const char* rank : {"[0]: RANK=0\n", "[1]: RANK=1\n", "[2]: RANK=2\n", "[3]: RANK=3\n"})
        EXPECT_THAT(zero.out + one.out, HasSubstr(rank));
    EXPECT_EQ(occurrences(zero.out + one.out, "WORLD_SIZE=4"), 4);
}

TEST(TwoNodes, AFailureOnOneNodeRestartsTheWorkersOfBoth) {
    const TemporaryDirectory directory;
    TwoNodes nodes(
        Way::Static,
        {"rank", "3", "once", directory.file("x"), "await", directory.file("y"), "exit", "5", "end", "end",
         "rank", "0", "once", directory.file("y"), "hold", "end", "end", "env", "TORCHELASTIC_RESTART_COUNT"},
        {"--max-restarts=1"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_EQ(occurrences(zero.out + one.out, "RESTART_COUNT=1"), 4) << zero.out << one.out;
}

TEST(TwoNodes, BothEndWithTheCodeOfTheFirstFailure) {
    TwoNodes nodes(Way::Static, {"rank", "2", "exit", "5", "end", "hold"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 5);
    EXPECT_EQ(one.status, 5);
    EXPECT_THAT(zero.err, HasSubstr("root cause: rank 2"));
}

TEST(TwoNodes, ALostNodeEndsTheOthersWorkersAtOnceWith69) {
    const std::string marker = "PROBE_JOB=" + unique_name("nodes");
    TwoNodes nodes(Way::Static, {"say", "up", "hold"}, {"--heartbeat-timeout=1m"}, marker);
    for (int node : {0, 1}) ASSERT_TRUE(nodes[node].wait_for_output("up\n"));
    nodes[1].signal(SIGKILL);
    const Outcome zero = nodes[0].wait();  // silence would take a minute
    EXPECT_EQ(zero.status, 69) << zero.err;
    nodes[1].wait();
    EXPECT_TRUE(all_gone(marker));
}

TEST(TwoNodes, WithoutTheControllerANodeEndsItsWorkersWith69) {
    const std::string marker = "PROBE_JOB=" + unique_name("nodes");
    TwoNodes nodes(Way::Static, {"ignore", "15", "say", "up", "hold"}, {}, marker);
    for (int node : {0, 1}) ASSERT_TRUE(nodes[node].wait_for_output("up\n"));
    nodes[0].signal(SIGKILL);
    const Outcome one = nodes[1].wait();
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_EQ(occurrences(one.err, "the controller: "), 1) << one.err;
    nodes[0].wait();
    EXPECT_TRUE(all_gone(marker));
}

TEST(TwoNodes, AnInterruptOnEitherNodeStopsBoth) {
    for (int node : {0, 1}) {
        TwoNodes nodes(Way::Static, {"say", "up", "hold"});
        for (int one : {0, 1}) ASSERT_TRUE(nodes[one].wait_for_output("up\n"));
        nodes[node].signal(SIGINT);
        EXPECT_EQ(nodes[0].wait().status, 75) << "interrupted on node " << node;
        EXPECT_EQ(nodes[1].wait().status, 75) << "interrupted on node " << node;
    }
}

TEST(TwoNodes, ASignalThatIsForwardedAndGivenToBothReachesEachWorkerOnce) {
    TwoNodes nodes(Way::Static, {"note", "10", "got it", "on", "12", "0", "say", "up", "hold"});
    for (const int rank : {0, 1, 2, 3})
        ASSERT_TRUE(nodes[rank / 2].wait_for_output("[" + std::to_string(rank) + "]: up"));
    for (const int node : {0, 1}) nodes[node].signal(SIGUSR1);
    for (const int rank : {0, 1, 2, 3})
        ASSERT_TRUE(nodes[rank / 2].wait_for_output("[" + std::to_string(rank) + "]: got it"));
    nodes[0].signal(SIGUSR2);
    for (const int node : {0, 1}) {
        const Outcome outcome = nodes[node].wait();
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_EQ(occurrences(outcome.out, "got it"), 2) << outcome.out;
    }
}

TEST(TwoNodes, CtrlZAtTheHeadReachesTheOtherNodeWhileTheHeadIsStopped) {
    TwoNodes nodes(Way::Static, {"note", "20", "paused", "say", "up", "hold"});
    for (const int node : {0, 1}) ASSERT_TRUE(nodes[node].wait_for_output("up\n"));
    nodes[0].signal(SIGTSTP);
    EXPECT_TRUE(nodes[1].wait_for_output("paused"));
    // The shell's `fg` comes when the shell has seen it stopped, not before.
    ASSERT_TRUE(is_soon(Stopped::Yes, nodes[0].pid()));
    nodes[0].signal(SIGCONT);
    nodes[0].signal(SIGTERM);
    for (const int node : {0, 1}) EXPECT_EQ(nodes[node].wait().status, 75);
}

TEST(TwoNodes, ANodeThatNeverComesIsSaidWhenTheTimeIsOver) {
    const ReservedPort port;
    const Outcome alone = run(ddprun_probe({"--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1",
                                            "--master-port=" + port.number(), "--rdzv-conf=join_timeout=1"},
                                           {"say", "up"}));
    EXPECT_EQ(alone.status, 69) << alone.err;
    EXPECT_THAT(alone.err, HasSubstr("1 of 2"));
    const Outcome lost = run(ddprun_probe({"--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1",
                                           "--master-port=" + port.number(), "--rdzv-conf=join_timeout=1"},
                                          {"say", "up"}));
    EXPECT_EQ(lost.status, 69) << lost.err;
    EXPECT_THAT(lost.err, HasSubstr("127.0.0.1"));
}

TEST(TwoNodes, CtrlCWorksWhileWaitingForTheOtherNode) {
    const ReservedPort port;
    Program head(ddprun_probe(
        {"--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=" + port.number()},
        {"say", "up"}));
    ASSERT_TRUE(head.wait_for_output("waiting for 2 nodes"));
    head.signal(SIGINT);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_LT(outcome.took, 5s);
}

// ---- one job, whichever node is asked

/// Two nodes whose four workers hold, and their control sockets' ids.
class AskTwoNodes : public ::testing::Test {
  protected:
    void start(std::vector<std::string> acts, std::vector<std::string> options = {}) {
        acts.insert(acts.end(), {"say", "up", "hold"});
        options.push_back("--rdzv-id=" + id_);
        nodes_.emplace(Way::Static, acts, std::move(options));
        for (int node : {0, 1})
            ASSERT_TRUE((*nodes_)[node].wait_for_output(node == 0 ? "[1]: up" : "[3]: up"));
        for (int node : {0, 1})
            ASSERT_TRUE((*nodes_)[node].wait_for_output(node == 0 ? "[0]: up" : "[2]: up"));
    }
    /// Of the job that this ddprun answers for, by what the kernel shows of its workers.
    std::string socket_of(int node) {
        std::vector<std::string> probes;
        for (const pid_t worker : children_named((*nodes_)[node].pid(), "probe"))
            probes.push_back(file_content("/proc/" + std::to_string(worker) + "/environ"));
        if (probes.empty()) return "no worker";
        const std::size_t at = probes.front().find("DDPRUN_JOB=") + 11;
        return probes.front().substr(at, probes.front().find('\0', at) - at);
    }
    Outcome ask(int node, std::vector<std::string> words) {
        words.insert(words.begin(), path_of("DDPRUN"));
        words.push_back("--job=" + socket_of(node));
        return run(words);
    }

    std::string id_ = unique_name("two");
    std::optional<TwoNodes> nodes_;
};

TEST_F(AskTwoNodes, EitherNodeShowsTheWorkersOfBoth) {
    start({});
    for (int node : {0, 1}) {
        const Outcome status = ask(node, {"ps"});
        EXPECT_EQ(status.status, 0) << status.err;
        EXPECT_THAT(status.out, AllOf(HasSubstr("4 workers on 2 nodes"), HasSubstr("HOST "),
                                      HasSubstr(" 0 of 0 restarts")));
        EXPECT_EQ(occurrences(status.out, " running  "), 4) << "asked on node " << node << ": " << status.out;
    }
    const Outcome by_run_id = run({path_of("DDPRUN"), "ps", "--job=" + id_});
    EXPECT_EQ(occurrences(by_run_id.out, "job "), 1) << by_run_id.out << by_run_id.err;
}

TEST_F(AskTwoNodes, EitherNodeShowsTheStacksOfBothOrOfOneRank) {
    start({});
    for (int node : {0, 1}) {
        const Outcome all = ask(node, {"stacks"});
        EXPECT_EQ(all.status, 0) << all.err;
        EXPECT_THAT(all.out, AllOf(HasSubstr("rank 0 on "), HasSubstr("; ranks 1-3 stand alike:")))
            << "asked on node " << node;
    }
    const Outcome one = ask(0, {"stacks", "--rank=3"});
    EXPECT_THAT(one.out, AllOf(HasSubstr("rank 3 on "), Not(HasSubstr("rank 2"))));
    const Outcome none = ask(1, {"stacks", "--rank=4"});
    EXPECT_EQ(none.status, 1);
    EXPECT_THAT(none.err, HasSubstr("no such rank: 4; the job has 4 workers"));
}

TEST_F(AskTwoNodes, ASignalReachesARankOfTheOtherNode) {
    start({"note", "10", "noted"});
    const Outcome there = ask(0, {"signal", "USR1", "--rank=3"});
    EXPECT_EQ(there.status, 0) << there.err;
    ASSERT_TRUE((*nodes_)[1].wait_for_output("[3]: noted"));
    const Outcome back = ask(1, {"signal", "USR1", "--rank=0"});
    EXPECT_EQ(back.status, 0) << back.err;
    ASSERT_TRUE((*nodes_)[0].wait_for_output("[0]: noted"));
    EXPECT_EQ(ask(1, {"signal", "USR1"}).status, 0);
    EXPECT_TRUE((*nodes_)[0].wait_for_output("[1]: noted"));
    EXPECT_TRUE((*nodes_)[1].wait_for_output("[2]: noted"));
    EXPECT_THAT(ask(1, {"signal", "USR1", "--rank=9"}).err, HasSubstr("no rank 9; the job has 4 workers"));
}

TEST_F(AskTwoNodes, LogFilesOfTheOtherNodeAreShownWhereTheyCanBeReached) {
    const TemporaryDirectory directory;
    start({"rank", "3", "say", "of rank three", "end"}, {"--log-dir=" + directory.path()});
    const Outcome there = ask(0, {"logs", "-r", "3"});
    EXPECT_EQ(there.status, 0) << there.err;
    EXPECT_EQ(there.out, "of rank three\nup\n");
    std::filesystem::remove_all(directory.path());
    const Outcome elsewhere = ask(0, {"logs", "-r", "3"});
    EXPECT_EQ(elsewhere.status, 69);
    EXPECT_THAT(elsewhere.err, AllOf(HasSubstr("rank 3 runs on "),
                                     HasSubstr("its log files are there, in " + directory.path())));
}

TEST_F(AskTwoNodes, DrainAskedOfTheOtherNodeEndsBothWith75) {
    start({});
    const Outcome drained = ask(1, {"drain"});
    EXPECT_EQ(drained.status, 0) << drained.err;
    for (int node : {0, 1}) EXPECT_EQ((*nodes_)[node].wait().status, 75);
}

TEST_F(AskTwoNodes, ASignalToTheDdprunOfBothNodesLeavesTheWorkersTheirGrace) {
    for (int first : {0, 1}) {
        const TemporaryDirectory directory;
        // Saving takes until the second signal has reached the head.
        start({"note", "15", "asked", "say", "up", "noted", "15", "await", directory.file("second"), "say",
               "saved", "exit", "0"});
        for (int node : {first, 1 - first}) {
            (*nodes_)[node].signal(SIGTERM);
            if (node == first) {
                for (const char* rank : {"[0]: asked", "[1]: asked"})
                    ASSERT_TRUE((*nodes_)[0].wait_for_output(rank));
                for (const char* rank : {"[2]: asked", "[3]: asked"})
                    ASSERT_TRUE((*nodes_)[1].wait_for_output(rank));
            }
        }
        // The question goes the way of the signal, behind it.
        EXPECT_EQ(ask(1 - first, {"ps"}).status, 0);
        std::ofstream(directory.file("second"));
        const Outcome zero = (*nodes_)[0].wait(), one = (*nodes_)[1].wait();
        EXPECT_EQ(occurrences(zero.out + one.out, "]: saved"), 4) << "first signalled: node " << first << "\n"
                                                                  << zero.err;
        EXPECT_EQ(zero.status, 75) << zero.err;
        EXPECT_EQ(one.status, 75) << one.err;
        EXPECT_THAT(zero.err, Not(HasSubstr("killing")));
    }
}

TEST_F(AskTwoNodes, ANodeThatDoesNotAnswerIsNamedInTime) {
    start({}, {"--heartbeat-timeout=10m"});
    (*nodes_)[1].signal(SIGSTOP);
    const Outcome status = ask(0, {"ps"});
    EXPECT_EQ(status.status, 0) << status.err;
    EXPECT_THAT(status.out, HasSubstr("(ranks 2-3): no answer in 2 s"));
    EXPECT_EQ(occurrences(status.out, " running  "), 2) << status.out;
    const Outcome signal = ask(0, {"signal", "USR1", "--rank=2"});
    EXPECT_EQ(signal.status, 1);
    EXPECT_THAT(signal.err, HasSubstr("(ranks 2-3): no answer in 2 s"));
    (*nodes_)[1].signal(SIGCONT);
}

TEST_F(AskTwoNodes, WithoutTheHeadANodeShowsItsOwnWorkersAndSaysSo) {
    start({}, {"--heartbeat-timeout=10m"});
    (*nodes_)[0].signal(SIGSTOP);
    const Outcome status = ask(1, {"ps"});
    EXPECT_EQ(status.status, 0) << status.err;
    EXPECT_THAT(status.out, HasSubstr("the head of the job gave no answer in 3 s"));
    EXPECT_EQ(occurrences(status.out, " running  "), 2) << status.out;
    (*nodes_)[0].signal(SIGCONT);
}

TEST(TwoNodes, ARankThatKeepsTheOtherNodeWaitingIsNamedWithItsHostAndAllStacksAreShown) {
    TwoNodes nodes(Way::Static, {"rank", "3", "hold", "end", "inside", "812", "hold"}, {"--hang-timeout=2"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 124) << zero.err;
    EXPECT_EQ(one.status, 124) << one.err;
    EXPECT_THAT(zero.err, AllOf(HasSubstr("hang: rank 3 on "), HasSubstr("has not called all_reduce #812"),
                                HasSubstr("ranks 0-2 wait for it")));
    EXPECT_THAT(zero.err, AllOf(HasSubstr("rank 0 on "), HasSubstr("; ranks 1-3 stand alike:")));
    EXPECT_THAT(one.err, Not(HasSubstr("hang: ")));
}

TEST(TwoNodes, ANodeThatGetsOnKeepsTheJobFromHanging) {
    // Twenty pauses in one time-out: a machine that is slow now and then does not make it a hang.
    std::vector<std::string> acts = {"rank", "3"};
    for (int pause = 0; pause < 30; ++pause) acts.insert(acts.end(), {"sleep", "200", "say", "on"});
    acts.insert(acts.end(), {"exit", "0", "end", "sleep", "6000"});
    TwoNodes nodes(Way::Static, acts, {"--hang-timeout=4"});
    EXPECT_EQ(nodes[0].wait().status, 0);
    EXPECT_EQ(nodes[1].wait().status, 0);
}

TEST(TwoNodes, EachNodesRoleCountsItsOwnWorkers) {
    TwoNodes nodes(Way::Static,
                   {"env", "ROLE_NAME", "env", "ROLE_RANK", "env", "ROLE_WORLD_SIZE", "env", "WORLD_SIZE"},
                   {}, "PROBE=0", {{{"--role=trainer"}, {"--role=reader"}}});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(zero.out, AllOf(HasSubstr("[1]: ROLE_NAME=trainer\n"), HasSubstr("[1]: ROLE_RANK=1\n"),
                                HasSubstr("[1]: ROLE_WORLD_SIZE=2\n")));
    EXPECT_THAT(one.out, AllOf(HasSubstr("[2]: ROLE_NAME=reader\n"), HasSubstr("[2]: ROLE_RANK=0\n"),
                               HasSubstr("[3]: ROLE_RANK=1\n"), HasSubstr("[3]: ROLE_WORLD_SIZE=2\n"),
                               HasSubstr("[3]: WORLD_SIZE=4\n")));
}

TEST(TwoNodes, IsHostChoosesTheHeadWhichHasRankZero) {
    for (int head : {0, 1}) {
        std::array<std::vector<std::string>, 2> own = {
            {{"--rdzv-conf=is_host=0"}, {"--rdzv-conf=is_host=0"}}};
        own[static_cast<std::size_t>(head)] = {"--rdzv-conf=is_host=1"};
        TwoNodes nodes(Way::C10d, {"env", "GROUP_RANK"}, {}, "PROBE=0", own);
        const Outcome of_head = nodes[head].wait(), other = nodes[1 - head].wait();
        EXPECT_THAT(of_head.err, HasSubstr("(is_host=true)"));
        EXPECT_THAT(other.err, HasSubstr("(is_host=false)"));
        EXPECT_THAT(of_head.out, HasSubstr("[0]: GROUP_RANK=0\n"));
        EXPECT_THAT(other.out, HasSubstr("[2]: GROUP_RANK=1\n"));
    }
}

TEST(TwoNodes, TheLocalAddressOfTheFirstNodeIsTheMasterAddress) {
    TwoNodes nodes(Way::C10d, {"env", "MASTER_ADDR"}, {}, "PROBE=0",
                   {{{"--rdzv-conf=is_host=1", "--local-addr=127.0.0.7"},
                     {"--rdzv-conf=is_host=0", "--local-addr=127.0.0.8"}}});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(occurrences(zero.out + one.out, "MASTER_ADDR=127.0.0.7"), 4) << zero.out << one.out << zero.err;
}

TEST(TwoNodes, ASilentNodeIsLostAfterTheHeartbeatTimeout) {
    const std::string marker = "PROBE_JOB=" + unique_name("nodes");
    TwoNodes nodes(Way::Static, {"say", "up", "hold"}, {"--heartbeat-timeout=3"}, marker);
    for (int node : {0, 1}) ASSERT_TRUE(nodes[node].wait_for_output("up\n"));
    nodes[1].signal(SIGSTOP);
    const Outcome zero = nodes[0].wait();
    EXPECT_EQ(zero.status, 69) << zero.err;
    EXPECT_THAT(zero.err, HasSubstr("no heartbeat for 3 s"));
    nodes[1].signal(SIGKILL);
    nodes[1].signal(SIGCONT);
    nodes[1].wait();
    EXPECT_TRUE(all_gone(marker));
}

class AFileSystemThatHangs : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(AtTheHeadAndAtTheOtherNode, AFileSystemThatHangs, ::testing::Values(0, 1));

TEST_P(AFileSystemThatHangs, ForLongerThanTheHeartbeatTimeoutLosesNoNode) {
    const TemporaryDirectory slow;
    const ReservedPort port;
    const std::string report = slow.path() + ".held", program = slow.file("probe"),
                      rank = std::to_string(GetParam());
    std::filesystem::copy_file(path_of("PROBE"), program);
    std::vector<std::unique_ptr<Program>> nodes;
    for (int node : {0, 1}) {
        std::vector<std::string> command;
        if (node == GetParam()) command = {path_of("SLOW_CALLS"), "2000", slow.path(), report};
        command.insert(command.end(), {path_of("DDPRUN"), "--nnodes=2", "--node-rank=" + std::to_string(node),
                                       "--nproc-per-node=1", "--master-addr=127.0.0.1",
                                       "--master-port=" + port.number(), "--heartbeat-timeout=1500ms"});
        if (node == GetParam())
            command.insert(command.end(), {"--log-dir=" + slow.file("logs"), "--redirects=1",
                                           "--events=" + slow.file("events")});
        command.insert(command.end(), {program, "rank", rank, "report", "boom", "exit", "3", "end", "hold"});
        nodes.push_back(std::make_unique<Program>(
            command, with_environment({"DDPRUN_TOKEN=secret of the job", "TMPDIR=/tmp"})));
    }
    const Outcome slow_one = nodes[static_cast<std::size_t>(GetParam())]->wait(),
                  other = nodes[static_cast<std::size_t>(1 - GetParam())]->wait();
    std::ifstream held_up(report);
    const std::string held((std::istreambuf_iterator<char>(held_up)), {});
    std::filesystem::remove(report);
    if (slow_one.status == 77) GTEST_SKIP() << "no seccomp listeners here";
    for (const Outcome& outcome : {slow_one, other}) {
        EXPECT_THAT(outcome.status, ::testing::AnyOf(1, 3)) << outcome.err;
        EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("heartbeat")), Not(HasSubstr("is lost")),
                                       Not(HasSubstr("taken for lost"))));
    }
    for (const char* kind : {"exec\n", "mkdir\n", "open .log\n", "open .json\n", "stat\n", "write\n"})
        EXPECT_THAT(held, HasSubstr(kind));
}

TEST(TwoNodes, ASecondJobAtTheSameEndpointIsRefusedAndToldOfTheFirst) {
    const ReservedPort port;
    const auto start = [&](const std::string& argument) {
        return std::make_unique<Program>(
            ddprun_probe(
                {"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=" + port.text()},
                {"say", argument, "hold"}),
            with_environment({"DDPRUN_TOKEN=secret of the job"}));
    };
    const auto one = start("lr 8"), two = start("lr 8");
    for (const auto& node : {one.get(), two.get()}) ASSERT_TRUE(node->wait_for_output("lr 8\n"));
    const Outcome second = start("lr 3")->wait();
    EXPECT_EQ(second.status, 69) << second.err;
    EXPECT_THAT(second.err, AllOf(HasSubstr("runs 'probe (digest"),
                                  HasSubstr("but the job 'none' at this endpoint runs 'probe (digest"),
                                  HasSubstr("--rdzv-id"), Not(HasSubstr("lr 8"))));
    EXPECT_EQ(second.out, "");
    one->signal(SIGTERM);
    for (const auto& node : {one.get(), two.get()}) EXPECT_EQ(node->wait().status, 75);
}

TEST(TwoNodes, ANodeThatWasStartedOtherwiseIsRefusedAndBothShowWhoSaysWhat) {
    TwoNodes nodes(Way::Static, {"say", "up"}, {}, "PROBE=0",
                   {{{"--max-restarts=1/1h", "--fabric=ib"}, {"--max-restarts=1", "--fabric=slingshot"}}});
    const Outcome one = nodes[1].wait();
    EXPECT_EQ(one.status, 69) << one.err;
    nodes[0].signal(SIGTERM);
    const Outcome zero = nodes[0].wait();
    EXPECT_EQ(zero.status, 75) << zero.err;
    for (const std::string& said : {one.err, zero.err}) {
        EXPECT_THAT(said, AllOf(HasSubstr("was started otherwise than this job:\n"),
                                HasSubstr("  --max-restarts  1/1 h "), HasSubstr("  --fabric        ib ")));
        EXPECT_THAT(said, Not(HasSubstr("--nnodes")));
    }
    EXPECT_EQ(zero.out + one.out, "");
}

}  // namespace
}  // namespace ddprun::test
