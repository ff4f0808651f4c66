// Nodes that join, leave and are lost by a running job: real agents, each on a host of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <optional>
#include <vector>

#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Elastic : public ::testing::Test {
  protected:
    explicit Elastic(int hosts = 3) : nodes_(static_cast<std::size_t>(hosts)) {}
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
        hosts_.emplace(static_cast<int>(nodes_.size()));
    }
    /// Starts the ddprun of a host with one worker: the same line on each, as its user would.
    void start(int host, std::vector<std::string> options = {}) {
        options.insert(options.end(), {"--rdzv-backend=c10d", "--rdzv-endpoint=node00:29400",
                                       "--rdzv-id=elastic", "--nproc-per-node=1"});
        nodes_[static_cast<std::size_t>(host)] =
            std::make_unique<Program>(hosts_->command(host, ddprun_probe(options, acts_)));
    }
    void start_all(const std::vector<std::string>& options, int count = 3) {
        for (int host = 0; host < count; ++host) start(host, options);
    }
    Program& operator[](int host) { return *nodes_[static_cast<std::size_t>(host)]; }
    [[nodiscard]] std::string file(const std::string& name) const { return hosts_->shared() + "/" + name; }
    void touch(const std::string& name) const { std::ofstream(file(name)); }
    /// Waits until the workers of these nodes have printed this world size.
    bool all_in_world_of(int size, const std::vector<int>& hosts) {
        return std::all_of(hosts.begin(), hosts.end(), [&](int host) {
            return (*this)[host].wait_for_output("WORLD_SIZE=" + std::to_string(size) + "\n");
        });
    }

    std::optional<Hosts> hosts_;
    /// The worker prints its place, saves at once when it is asked to stop, and ends when the test says so.
    std::vector<std::string> acts_{"on",  "15",         "0",     "env",        "GROUP_RANK",
                                   "env", "WORLD_SIZE", "await", "/srv/finish"};

  private:
    std::vector<std::unique_ptr<Program>> nodes_;
};

TEST_F(Elastic, ANodeThatJoinsARunningJobTakesPartAtOnceAndBothSidesReportIt) {
    const std::vector<std::string> options{"--nnodes=2:3", "--rdzv-conf=last_call_timeout=0"};
    start_all(options, 2);
    ASSERT_TRUE(all_in_world_of(2, {0, 1}));
    start(2, options);
    ASSERT_TRUE(all_in_world_of(3, {0, 1, 2}));
    touch("finish");
    const Outcome head = (*this)[0].wait(), newcomer = (*this)[2].wait();
    EXPECT_EQ(head.status, 0) << head.err;
    EXPECT_EQ(newcomer.status, 0) << newcomer.err;
    EXPECT_THAT(head.err,
                AllOf(HasSubstr("node02 has come: the job runs with 2 of up to 3 nodes; taken in now"),
                      HasSubstr("growing from 2 to 3 nodes")));
    EXPECT_THAT(newcomer.err,
                HasSubstr("the job runs with 2 of up to 3 nodes; taken in now, in its next generation"));
    EXPECT_THAT(newcomer.out, HasSubstr("GROUP_RANK=2\n"));
}

TEST_F(Elastic, RanksDoNotDependOnTheOrderInWhichNodesJoin) {
    start(0, {"--nnodes=3"});
    start(2, {"--nnodes=3"});
    // The question follows the AgentHello in the same session, so the head that answers knows this node.
    const auto has_come = [&] {
        return run(hosts_->command(2, {path_of("DDPRUN"), "ps"})).out.find("joining") != std::string::npos;
    };
    for (const auto until = std::chrono::steady_clock::now() + 60s; !has_come();)
        ASSERT_LT(std::chrono::steady_clock::now(), until);
    start(1, {"--nnodes=3"});
    for (int host : {0, 1, 2})
        ASSERT_TRUE((*this)[host].wait_for_output("GROUP_RANK=" + std::to_string(host) + "\n"));
    touch("finish");
    for (int host : {0, 1, 2}) EXPECT_EQ((*this)[host].wait().status, 0);
}

TEST_F(Elastic, WithGrowRestartANewNodeWaitsForTheNextRestart) {
    acts_ = {"env",        "WORLD_SIZE", "rank", "1",   "once", file("failed"), "await",
             file("fail"), "exit",       "3",    "end", "end",  "await",        file("finish")};
    const std::vector<std::string> options{"--nnodes=2:3", "--rdzv-conf=last_call_timeout=0",
                                           "--grow=restart", "--max-restarts=1"};
    start_all(options, 2);
    ASSERT_TRUE(all_in_world_of(2, {0, 1}));
    start(2, options);
    ASSERT_TRUE(
        (*this)[2].wait_for_output("the job runs with 2 of up to 3 nodes; taken in when it restarts"));
    touch("fail");
    ASSERT_TRUE(all_in_world_of(3, {0, 1, 2}));
    touch("finish");
    for (int host : {0, 1, 2}) EXPECT_EQ((*this)[host].wait().status, 0);
}

TEST_F(Elastic, SigtermToOneNodeRemovesItAndTheOthersGoOnWithoutARestart) {
    start_all({"--nnodes=2:3"});
    ASSERT_TRUE(all_in_world_of(3, {0, 1, 2}));
    (*this)[1].signal(SIGTERM);
    const Outcome left = (*this)[1].wait();
    EXPECT_EQ(left.status, 75) << left.err;
    EXPECT_THAT(left.err, HasSubstr("this node has left the job after SIGTERM"));
    ASSERT_TRUE(all_in_world_of(2, {0, 2}));
    touch("finish");
    const Outcome head = (*this)[0].wait();
    EXPECT_EQ(head.status, 0) << head.err;
    EXPECT_THAT(head.err, HasSubstr("SIGTERM at the ddprun of node01, which leaves"));
    EXPECT_EQ((*this)[2].wait().status, 0);
}

TEST_F(Elastic, SigtermToOneNodeAfterTheOtherIsOneStopWithTheWholeGrace) {
    acts_ = {"note",  "15",          "asked", "env",   "WORLD_SIZE", "noted", "15",
             "await", file("saved"), "say",   "saved", "exit",       "0"};
    start_all({"--nnodes=2:3"});
    ASSERT_TRUE(all_in_world_of(3, {0, 1, 2}));
    for (int signalled : {2, 1, 0}) {
        (*this)[signalled].signal(SIGTERM);
        for (int host : {0, 1, 2})
            ASSERT_TRUE((*this)[host].wait_for_output("asked")) << "signalled: " << signalled;
    }
    touch("saved");
    for (int host : {0, 1, 2}) {
        const Outcome outcome = (*this)[host].wait();
        EXPECT_EQ(outcome.status, 75) << outcome.err;
        EXPECT_EQ(occurrences(outcome.out, "saved"), 1) << outcome.out;
        EXPECT_THAT(outcome.err, Not(HasSubstr("killing")));
    }
}

TEST_F(Elastic, ASpareReplacesALostNodeWithoutUsingARestart) {
    start_all({"--nnodes=2"}, 2);
    ASSERT_TRUE(all_in_world_of(2, {0, 1}));
    start(2, {"--nnodes=2"});
    ASSERT_TRUE((*this)[2].wait_for_output("the job runs with all of its 2 nodes; a spare"));
    (*this)[1].signal(SIGKILL);
    ASSERT_TRUE((*this)[2].wait_for_output("GROUP_RANK=1\n"));
    ASSERT_TRUE((*this)[2].wait_for_output("WORLD_SIZE=2\n"));
    touch("finish");
    const Outcome head = (*this)[0].wait();
    EXPECT_EQ(head.status, 0) << head.err;
    EXPECT_THAT(head.err, HasSubstr("going on without it, which uses up no restart"));
    EXPECT_EQ((*this)[2].wait().status, 0);
}

TEST_F(Elastic, ASpareThatWasNeverNeededReportsItAndDoesNotExitWithZero) {
    start_all({"--nnodes=2"}, 2);
    ASSERT_TRUE(all_in_world_of(2, {0, 1}));
    start(2, {"--nnodes=2"});
    ASSERT_TRUE((*this)[2].wait_for_output("the job runs with all of its 2 nodes; a spare"));
    touch("finish");
    for (int node : {0, 1}) EXPECT_EQ((*this)[node].wait().status, 0);
    const Outcome spare = (*this)[2].wait();
    EXPECT_EQ(spare.status, 69) << spare.err;
    EXPECT_THAT(spare.err,
                HasSubstr("the job 'elastic' at node00:29400 ended without a need for this spare"));
}

TEST_F(Elastic, AJobShrinksWithoutALostNodeWhichGetsItsPlaceBackWhenItReturns) {
    const std::vector<std::string> options{"--nnodes=2:3"};
    start_all(options);
    ASSERT_TRUE(all_in_world_of(3, {0, 1, 2}));
    (*this)[1].signal(SIGKILL);
    ASSERT_TRUE(all_in_world_of(2, {0, 2}));
    start(1, options);
    ASSERT_TRUE(all_in_world_of(3, {1}));
    ASSERT_TRUE((*this)[1].wait_for_output("GROUP_RANK=1\n"));
    touch("finish");
    for (int host : {0, 1, 2}) EXPECT_EQ((*this)[host].wait().status, 0);
}

TEST_F(Elastic, ANodeThatStartsAfterTheHeadsLossFindsItsSuccessorAtTheReportedAddress) {
    for (int host : {0, 1, 2}) start(host, {"--nnodes=2:3", "--node-rank=" + std::to_string(host)});
    ASSERT_TRUE(all_in_world_of(3, {0, 1, 2}));
    ASSERT_TRUE((*this)[0].wait_for_output("node01 is the standby"));
    (*this)[0].signal(SIGKILL);
    ASSERT_TRUE(
        (*this)[1].wait_for_output("others can come with --rdzv-endpoint " + Hosts::address(1) + ":29400"));
    ASSERT_TRUE(all_in_world_of(2, {1, 2}));
    Program late(hosts_->command(0, ddprun_probe({"--nnodes=2:3", "--rdzv-backend=c10d",
                                                  "--rdzv-endpoint=" + Hosts::address(1) + ":29400",
                                                  "--rdzv-id=elastic", "--nproc-per-node=1"},
                                                 acts_)));
    ASSERT_TRUE(late.wait_for_output("WORLD_SIZE=3\n"));
    touch("finish");
    EXPECT_EQ(late.wait().status, 0);
    for (int host : {1, 2}) EXPECT_EQ((*this)[host].wait().status, 0);
}

TEST_F(Elastic, TwoContainersOfOneHostWithEqualProcessNumbersAreTwoNodes) {
    const auto contained = [&](int host) {
        std::vector<std::string> words =
            ddprun_probe({"--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=node00:29400",
                          "--rdzv-id=elastic", "--nproc-per-node=1"},
                         acts_);
        words.insert(words.begin(), {"unshare", "--pid", "--mount-proc", "--fork", "--kill-child"});
        return hosts_->command(host, words);
    };
    Program head(contained(0));
    ASSERT_TRUE(head.wait_for_output("controller on port 29400"));
    Program twin(contained(0)), other(contained(1));
    ASSERT_TRUE(twin.wait_for_output("WORLD_SIZE=3\n"));
    ASSERT_TRUE(head.wait_for_output("is the standby"));
    twin.signal(SIGKILL);
    ASSERT_TRUE(head.wait_for_output("WORLD_SIZE=2\n"));
    ASSERT_TRUE(other.wait_for_output("WORLD_SIZE=2\n"));
    touch("finish");
    EXPECT_EQ(head.wait().status, 0);
    EXPECT_EQ(other.wait().status, 0);
}

TEST_F(Elastic, AWaitingJobReportsHowLongItWaitsAndForWhichNodes) {
    Program head(hosts_->command(0, ddprun_probe({"--hosts=node00,node02", "--start=none"}, acts_)));
    EXPECT_TRUE(head.wait_for_output("waiting for 5 s: 1 of 2 nodes joined, "));
    EXPECT_TRUE(head.wait_for_output("left; missing: node02\n"));
    head.signal(SIGTERM);
    EXPECT_EQ(head.wait().status, 75);
}

class ElasticOnEight : public Elastic {
  protected:
    ElasticOnEight() : Elastic(8) {}
};

TEST_F(ElasticOnEight, EightNodesUseSparesThenShrinkAndGrowAgainWithoutARestart) {
    const std::vector<std::string> options{"--nnodes=3:6"};
    start_all(options, 6);
    ASSERT_TRUE(all_in_world_of(6, {0, 1, 2, 3, 4, 5}));
    for (int spare : {6, 7}) {
        start(spare, options);
        ASSERT_TRUE((*this)[spare].wait_for_output("a spare, which takes the place of one that goes"));
    }
    for (int lost : {1, 2}) (*this)[lost].signal(SIGKILL);
    ASSERT_TRUE(all_in_world_of(6, {6, 7}));
    for (int leaver : {3, 4}) {
        (*this)[leaver].signal(SIGTERM);
        EXPECT_EQ((*this)[leaver].wait().status, 75);
    }
    ASSERT_TRUE(all_in_world_of(4, {0, 5, 6, 7}));
    (*this)[5].signal(SIGKILL);
    ASSERT_TRUE(all_in_world_of(3, {0, 6, 7}));
    start(1, options);
    ASSERT_TRUE(all_in_world_of(4, {1}));
    touch("finish");
    for (int host : {0, 1, 6, 7}) {
        const Outcome outcome = (*this)[host].wait();
        EXPECT_EQ(outcome.status, 0) << outcome.err;
    }
}

}  // namespace
}  // namespace ddprun::test
