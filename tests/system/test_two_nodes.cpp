// Two nodes started by hand, as two ddprun on this host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The two ends of a job; every option besides the node's rank is the same for both.
class TwoNodes {
  public:
    enum class Way { Static, C10d };
    TwoNodes(Way way, const std::vector<std::string>& acts, std::vector<std::string> options = {}, const std::string& marker = "PROBE=0") {
        const std::string port = free_port();
        options.insert(options.end(), {"--nnodes=2", "--nproc-per-node=2"});
        if (way == Way::Static) options.insert(options.end(), {"--master-addr=127.0.0.1", "--master-port=" + port});
        else options.insert(options.end(), {"--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:" + port, "--rdzv-id=" + unique_name("job")});
        for (int node = 0; node < 2; ++node) {
            std::vector<std::string> one = options;
            if (way == Way::Static) one.push_back("--node-rank=" + std::to_string(node));
            nodes_.push_back(std::make_unique<Program>(ddprun_probe(one, acts), with_environment({marker, "DDPRUN_TOKEN=secret of the job"})));
        }
    }
    Program& operator[](int node) { return *nodes_[static_cast<std::size_t>(node)]; }

  private:
    std::vector<std::unique_ptr<Program>> nodes_;
};
using Way = TwoNodes::Way;

TEST(TwoNodes, StaticRendezvousGivesRanksByNodeRank) {
    TwoNodes nodes(Way::Static, {"env", "GROUP_RANK", "env", "LOCAL_RANK", "env", "WORLD_SIZE", "env", "MASTER_ADDR"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(sorted_lines(zero.out), ElementsAre("[0]: GROUP_RANK=0", "[0]: LOCAL_RANK=0", "[0]: MASTER_ADDR=127.0.0.1", "[0]: WORLD_SIZE=4",
                                                    "[1]: GROUP_RANK=0", "[1]: LOCAL_RANK=1", "[1]: MASTER_ADDR=127.0.0.1", "[1]: WORLD_SIZE=4"));
    EXPECT_THAT(one.out, AllOf(HasSubstr("[2]: GROUP_RANK=1"), HasSubstr("[3]: LOCAL_RANK=1"), HasSubstr("[3]: WORLD_SIZE=4")));
}

TEST(TwoNodes, C10dOnOneHostFormsOneWorldWhoeverComesFirst) {
    TwoNodes nodes(Way::C10d, {"env", "RANK", "env", "WORLD_SIZE"});
    const Outcome zero = nodes[0].wait(), one = nodes[1].wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_EQ(one.status, 0) << one.err;
    for (const char* rank : {"[0]: RANK=0\n", "[1]: RANK=1\n", "[2]: RANK=2\n", "[3]: RANK=3\n"}) EXPECT_THAT(zero.out + one.out, HasSubstr(rank));
    EXPECT_EQ(occurrences(zero.out + one.out, "WORLD_SIZE=4"), 4);
}

TEST(TwoNodes, AFailureOnOneNodeRestartsTheWorkersOfBoth) {
    const TemporaryDirectory directory;
    TwoNodes nodes(Way::Static, {"rank", "3", "once", directory.file("x"), "await", directory.file("y"), "exit", "5", "end", "end",
                                 "rank", "0", "once", directory.file("y"), "hold", "end", "end", "env", "TORCHELASTIC_RESTART_COUNT"}, {"--max-restarts=1"});
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
    TwoNodes nodes(Way::Static, {"say", "up", "hold"}, {}, marker);
    for (int node : {0, 1}) ASSERT_TRUE(nodes[node].wait_for_output("up"));
    const auto lost = std::chrono::steady_clock::now();
    nodes[1].signal(SIGKILL);
    const Outcome zero = nodes[0].wait();
    EXPECT_LT(std::chrono::steady_clock::now() - lost, 3s);
    EXPECT_EQ(zero.status, 69) << zero.err;
    nodes[1].wait();
    EXPECT_TRUE(all_gone(marker));
}

TEST(TwoNodes, WithoutTheControllerANodeEndsItsWorkersWith69) {
    const std::string marker = "PROBE_JOB=" + unique_name("nodes");
    TwoNodes nodes(Way::Static, {"ignore", "15", "say", "up", "hold"}, {}, marker);
    for (int node : {0, 1}) ASSERT_TRUE(nodes[node].wait_for_output("up"));
    nodes[0].signal(SIGKILL);
    const Outcome one = nodes[1].wait();
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_THAT(one.err, HasSubstr("the controller"));
    nodes[0].wait();
    EXPECT_TRUE(all_gone(marker));
}

TEST(TwoNodes, AnInterruptOnEitherNodeStopsBoth) {
    for (int node : {0, 1}) {
        TwoNodes nodes(Way::Static, {"say", "up", "hold"});
        for (int one : {0, 1}) ASSERT_TRUE(nodes[one].wait_for_output("up"));
        nodes[node].signal(SIGINT);
        EXPECT_EQ(nodes[0].wait().status, 75) << "interrupted on node " << node;
        EXPECT_EQ(nodes[1].wait().status, 75) << "interrupted on node " << node;
    }
}

TEST(TwoNodes, ANodeThatNeverComesIsSaidWhenTheTimeIsOver) {
    const Outcome alone = run(ddprun_probe({"--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=" + free_port(), "--rdzv-conf=join_timeout=1"}, {"say", "up"}));
    EXPECT_EQ(alone.status, 69) << alone.err;
    EXPECT_THAT(alone.err, HasSubstr("1 of 2"));
    const Outcome lost = run(ddprun_probe({"--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=" + free_port(), "--rdzv-conf=join_timeout=1"}, {"say", "up"}));
    EXPECT_EQ(lost.status, 69) << lost.err;
    EXPECT_THAT(lost.err, HasSubstr("127.0.0.1"));
}

TEST(TwoNodes, CtrlCWorksWhileWaitingForTheOtherNode) {
    Program head(ddprun_probe({"--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=" + free_port()}, {"say", "up"}));
    ASSERT_TRUE(head.wait_for_output("waiting for 2 nodes"));
    head.signal(SIGINT);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_LT(outcome.took, 5s);
}

TEST(TwoNodes, NothingThatSaysWhereToMeetIsAnError) {
    const Outcome outcome = run(ddprun_probe({"--nnodes=2"}, {"say", "up"}));
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("--rdzv-endpoint"));
}

}  // namespace
}  // namespace ddprun::test
