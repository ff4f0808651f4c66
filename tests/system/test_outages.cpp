// The cost of network faults for a job on several hosts (tests/support/hosts.h), whose cables are cut and
// repaired.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <memory>

#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Outages : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
        hosts_ = std::make_unique<Hosts>(2, switch_);
    }
    /// Starts a ddprun with two workers on each host.
    void start(std::vector<std::string> options, std::vector<std::string> acts) {
        options.insert(options.end(), {"--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
                                       "--rdzv-endpoint=node00:29400"});
        for (int host : {0, 1}) {
            std::vector<std::string> command{"env", marker_, "DDPRUN_TOKEN=secret of the job"};
            const std::vector<std::string> job = ddprun_probe(options, acts);
            command.insert(command.end(), job.begin(), job.end());
            nodes_.push_back(std::make_unique<Program>(hosts_->command(host, command)));
        }
        for (int rank = 0; rank < 4; ++rank)
            ASSERT_TRUE(node(rank / 2).wait_for_output("[" + std::to_string(rank) + "]: up"));
    }
    Program& node(int host) { return *nodes_[static_cast<std::size_t>(host)]; }
    /// Starts no process for each that it looks at: a busy machine would make the hosts' times differ.
    void signal_all(int host, const std::string& names, const std::string& signal) {
        run(hosts_->command(host, {"sh", "-c",
                                   "for p in /proc/[0-9]*; do read -r comm <$p/comm; case $comm in " + names +
                                       ") kill -" + signal + " ${p#/proc/};; esac; done 2>/dev/null; true"}));
    }
    void signal_ddpruns(int host, const std::string& signal) { signal_all(host, "ddprun", signal); }
    void let_pass(std::chrono::milliseconds span) { std::this_thread::sleep_for(span); }
    void go_on() { std::ofstream(file("go on")); }
    [[nodiscard]] std::string file(const std::string& name) const { return hosts_->shared() + "/" + name; }
    /// Checks that all workers run again, in one more generation.
    void expect_one_restart() {
        for (int host : {0, 1}) {
            const Outcome outcome = node(host).wait();
            EXPECT_EQ(outcome.status, 0) << outcome.err;
            EXPECT_EQ(occurrences(outcome.out, "again"), 2) << outcome.out << outcome.err;
        }
        EXPECT_TRUE(all_gone(marker_));
    }
    /// Checks that the fault has changed nothing.
    void expect_undisturbed() {
        for (int host : {0, 1}) {
            const Outcome outcome = node(host).wait();
            EXPECT_EQ(outcome.status, 0) << outcome.err;
            EXPECT_EQ(occurrences(outcome.out, "over"), 2) << outcome.out;
            EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("lost")), Not(HasSubstr("heartbeat")),
                                           Not(HasSubstr("connection"))))
                << outcome.err;
        }
    }

    Hosts::Switch switch_ = Hosts::Switch::Bridge;
    const std::string marker_ = "PROBE_JOB=" + unique_name("outage");
    std::unique_ptr<Hosts> hosts_;
    std::vector<std::unique_ptr<Program>> nodes_;
};

TEST_F(Outages, APartitionShorterThanTheTimeoutChangesNothing) {
    start({"--heartbeat-timeout=9"}, {"say", "up", "await", file("go on"), "say", "over"});
    hosts_->cut_cable(1);
    let_pass(4s);  // the agent dials again after three
    go_on();       // messages of the workers wait meanwhile
    let_pass(200ms);
    hosts_->mend_cable(1);
    expect_undisturbed();
}

TEST_F(Outages, AnAgentStoppedForLessThanTheTimeoutChangesNothing) {
    start({"--heartbeat-timeout=9"}, {"say", "up", "await", file("go on"), "say", "over"});
    signal_ddpruns(1, "STOP");
    let_pass(2s);
    signal_ddpruns(1, "CONT");
    go_on();
    expect_undisturbed();
}

TEST_F(Outages, NoNodeIsLostWhenAllWereStoppedTogether) {
    start({"--heartbeat-timeout=3"}, {"say", "up", "await", file("go on"), "say", "over"});
    // A debugger that stops the whole job does this, and so does a batch system that suspends it.
    for (int host : {0, 1}) signal_all(host, "ddprun|warden|probe", "STOP");
    let_pass(5s);
    for (int host : {1, 0}) signal_all(host, "ddprun|warden|probe", "CONT");
    go_on();
    expect_undisturbed();
}

TEST_F(Outages, ACutCableEndsTheWorkersOfBothSidesWithinTheTimeoutAndEachReportsWhy) {
    start({"--heartbeat-timeout=3"}, {"say", "up", "hold"});
    hosts_->cut_cable(1);
    const Outcome zero = node(0).wait(), one = node(1).wait();
    EXPECT_EQ(zero.status, 69) << zero.err;
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_THAT(zero.err, HasSubstr("node node01: no heartbeat for 3 s"));
    EXPECT_THAT(one.err, HasSubstr("the controller: no heartbeat from the controller for 3 s"));
    EXPECT_TRUE(all_gone(marker_));
}

TEST_F(Outages, SilenceInOneDirectionIsALossForBothSides) {
    for (int speaker : {0, 1}) {
        nodes_.clear();
        start({"--heartbeat-timeout=2"}, {"say", "up", "hold"});
        // The node's frames go to an address that no host has.
        ASSERT_EQ(
            run(hosts_->command(speaker, {"ip", "neighbour", "replace", Hosts::address(1 - speaker), "lladdr",
                                          "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0"}))
                .status,
            0);
        for (int host : {0, 1}) {
            const Outcome outcome = node(host).wait();
            EXPECT_EQ(outcome.status, 69) << outcome.err;
        }
        EXPECT_TRUE(all_gone(marker_));
        run(hosts_->command(speaker, {"ip", "neighbour", "del", Hosts::address(1 - speaker), "dev", "eth0"}));
    }
}

class SlowNetwork : public Outages {
  protected:
    SlowNetwork() { switch_ = Hosts::Switch::Slow; }
};

TEST_F(SlowNetwork, DelayedAndReorderedFramesChangeNothing) {
    start({}, {"say", "up", "await", file("go on"), "say", "over"});
    let_pass(4s);  // longer than the timeout
    go_on();
    expect_undisturbed();
}

TEST_F(Outages, ANodeStoppedForLongerThanTheTimeoutKillsItsWorkersAndRejoins) {
    start({"--heartbeat-timeout=2", "--max-restarts=1"},
          {"generation", "1", "ignore", "15", "say", "up", "hold", "end", "say", "again"});
    signal_ddpruns(1, "STOP");
    ASSERT_TRUE(node(0).wait_for_output("node node01: no heartbeat for 2 s"));
    signal_ddpruns(1, "CONT");
    expect_one_restart();
}

TEST_F(Outages, ANodeWhoseHeadIsStoppedForLongerThanTheTimeoutRejoins) {
    start({"--heartbeat-timeout=2", "--max-restarts=1"},
          {"generation", "1", "say", "up", "hold", "end", "say", "again"});
    signal_ddpruns(0, "STOP");
    ASSERT_TRUE(node(1).wait_for_output("no heartbeat from the controller for 2 s"));
    signal_ddpruns(0, "CONT");
    expect_one_restart();
}

TEST_F(Outages, ANodeWhoseCableIsCutForLongerThanTheTimeoutRejoins) {
    start({"--heartbeat-timeout=2", "--max-restarts=1"},
          {"generation", "1", "say", "up", "hold", "end", "say", "again"});
    hosts_->cut_cable(1);
    ASSERT_TRUE(node(0).wait_for_output("no heartbeat for 2 s"));
    ASSERT_TRUE(node(1).wait_for_output("no heartbeat from the controller for 2 s"));
    hosts_->mend_cable(1);
    expect_one_restart();
}

TEST_F(Outages, TheWorkersOfAStoppedDdprunAreKilledEvenIfItNeverContinues) {
    start({"--heartbeat-timeout=2"}, {"say", "up", "hold"});
    signal_ddpruns(1, "STOP");
    EXPECT_EQ(node(0).wait().status, 69);
    // Dead workers stay zombies while their parent is stopped.
    const auto workers_are_there = [&] {
        return run(hosts_->command(1, {"ps", "-C", "probe", "-o", "state="})).out.find_first_not_of("Z \n") !=
               std::string::npos;
    };
    for (int look = 0; look < 1000 && workers_are_there(); ++look) let_pass(10ms);
    EXPECT_FALSE(workers_are_there())
        << run(hosts_->command(1, {"ps", "-e", "-o", "pid,ppid,stat,etime,comm"})).out;
    signal_ddpruns(1, "CONT");
    EXPECT_EQ(node(1).wait().status, 69);
}

TEST_F(Outages, ANodeThatReturnsTooLateIsRefusedWithTheReason) {
    start({"--heartbeat-timeout=2"}, {"ignore", "15", "say", "up", "hold"});
    signal_ddpruns(1, "STOP");
    ASSERT_TRUE(node(0).wait_for_output("node node01: no heartbeat for 2 s"));
    signal_ddpruns(1, "CONT");
    const Outcome one = node(1).wait();
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_THAT(one.err, HasSubstr("the controller: this node was taken for lost"));
    EXPECT_EQ(node(0).wait().status, 69);
    EXPECT_TRUE(all_gone(marker_));
}

}  // namespace
}  // namespace ddprun::test
