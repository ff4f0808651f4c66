// A job whose head is lost: agents on hosts of their own, started by hand.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/support/comes.h"
#include "tests/support/curves.h"
#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class LossOfTheHead : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    }
    /// Starts one ddprun on each host; the first is the head. A worker of the first generation runs until it
    /// is stopped.
    void start(int nodes, const std::string& nnodes, std::vector<std::string> options = {"--max-restarts=3"},
               const std::vector<std::string>& worker = {path_of("PROBE"), "env", "MASTER_ADDR", "env",
                                                         "WORLD_SIZE", "say", "running", "generation", "1",
                                                         "hold", "end"}) {
        if (!hosts_) hosts_ = std::make_unique<Hosts>(nodes);
        options.insert(options.begin(),
                       {"--nnodes=" + nnodes, "--nproc-per-node=2", "--rdzv-backend=c10d",
                        "--rdzv-endpoint=" + endpoint_, "--rdzv-id=succession", "--shutdown-timeout=1",
                        "--rdzv-conf=last_call_timeout=2,join_timeout=60"});
        for (int node = 0; node < nodes; ++node) {
            std::vector<std::string> own = options;
            if (nnodes.find(':') != std::string::npos) own.push_back("--node-rank=" + std::to_string(node));
            std::vector<std::string> line{path_of("DDPRUN")};
            line.insert(line.end(), own.begin(), own.end());
            line.insert(line.end(), worker.begin(), worker.end());
            if (node == 0) head_ = line;
            nodes_.push_back(
                std::make_unique<Program>(hosts_->command(node, line), with_environment(environment_)));
            if (node > 0) continue;
            ASSERT_TRUE(nodes_[0]->wait_for_output("controller on port"));
        }
    }
    void await_workers(int nodes) {
        ASSERT_TRUE(nodes_[0]->wait_for_output("is the standby"));
        for (int node = 0; node < nodes; ++node)
            ASSERT_TRUE(nodes_[static_cast<std::size_t>(node)]->wait_for_output("running\n"))
                << "node " << node;
    }
    /// The process id of ddprun itself; nodes_ has its parent.
    void signal_ddprun(int node, const std::string& signal) {
        run(hosts_->command(node, {"pkill", "-" + signal, "-x", "ddprun"}));
    }
    Outcome end_of(int node) { return nodes_[static_cast<std::size_t>(node)]->wait(); }
    std::vector<std::string> head_;  ///< its command line
    std::string endpoint_ = Hosts::address(0) + ":29411";
    std::vector<std::string> environment_{"DDPRUN_TOKEN=secret of the job"};
    std::unique_ptr<Hosts> hosts_;
    std::vector<std::unique_ptr<Program>> nodes_;
};

TEST_F(LossOfTheHead, AnElasticJobContinuesUnderTheStandby) {
    start(3, "2:3");
    await_workers(3);
    nodes_[0]->signal(SIGKILL);
    const Outcome one = end_of(1), two = end_of(2);
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_EQ(two.status, 0) << two.err;
    EXPECT_EQ(occurrences(one.out + two.out, "WORLD_SIZE=4"), 4) << one.out << two.out;
    EXPECT_EQ(occurrences(one.out + two.out, "MASTER_ADDR=" + Hosts::address(1)), 4)
        << "rank 0 is where the new head is";
    EXPECT_THAT(one.err,
                AllOf(HasSubstr("this node is the head from now on"),
                      HasSubstr("the head at " + Hosts::address(0)), HasSubstr("going on without it")));
    EXPECT_THAT(two.err, HasSubstr("it goes to the standby, " + Hosts::name(1)));
}

/// While a user watches a job with GPUs, each node has a child that asks the driver and lives as long as the
/// answer takes.
TEST_F(LossOfTheHead, AnOpenQuestionIsAnsweredWhenTheStandbyTakesOver) {
    hosts_ = std::make_unique<Hosts>(3);
    const std::string machine = hosts_->shared() + "/machine";
    std::ofstream(machine) << R"({"gpus": []})";
    environment_.insert(environment_.end(),
                        {"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"), "FAKE_NVML=" + machine});
    start(3, "2:3");
    await_workers(3);
    std::filesystem::rename(machine, machine + ".file");
    ASSERT_EQ(::mkfifo(machine.c_str(), 0600), 0);
    Program question(hosts_->command(1, {path_of("DDPRUN"), "ps", "--json"}));
    UniqueFd driver;
    for (const TimePoint limit = MonotonicClock::now() + 60s; !driver;) {  // until a child reads it
        ASSERT_LT(MonotonicClock::now(), limit);
        driver = UniqueFd(::open(machine.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
    }
    std::filesystem::rename(machine + ".file", machine);
    nodes_[0]->signal(SIGKILL);
    for (int node : {1, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
    }
    EXPECT_THAT(question.wait().out, HasSubstr("the head at " + Hosts::address(0)));
}

TEST_F(LossOfTheHead, TheSuccessorGoesOnWithTheJobsCurves) {
    hosts_ = std::make_unique<Hosts>(3);
    const std::string run = hosts_->shared() + "/runs/succession/ddprun";
    start(3, "2:3", {"--max-restarts=3", "--tensorboard=" + hosts_->shared() + "/runs"});
    await_workers(3);
    ASSERT_TRUE(comes([&] {
        const Curves curves = read_curves(run);
        const auto workers = curves.points.find("job/workers");
        return workers != curves.points.end() && workers->second.back().second == 6;
    }));
    nodes_[0]->signal(SIGKILL);
    for (int node : {1, 2}) EXPECT_EQ(end_of(node).status, 0);
    const Curves curves = read_curves(run);
    EXPECT_EQ(curves.files.size(), 2U);
    const std::vector<std::uint64_t> seconds = curves.steps("job/workers");
    EXPECT_TRUE(std::is_sorted(seconds.begin(), seconds.end()));
    EXPECT_EQ(curves.points.at("job/workers").front().first, 0U) << "the lost head's points are kept";
}

TEST_F(LossOfTheHead, ALostNameServerDelaysNobody) {
    hosts_ = std::make_unique<Hosts>(3);
    Program server(hosts_->command(
        0, {"python3", "-c",
            "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('', 53))\n"
            "print('up', flush=True)\nwhile True: s.recv(512)"}));
    ASSERT_TRUE(server.wait_for_output("up"));
    endpoint_ = Hosts::name(0) + ":29411";
    start(3, "2:3");
    await_workers(3);
    // From now on the standby's host asks this name server, which never answers, for up to 90 s.
    std::ofstream(hosts_->shared() + "/resolv.conf")
        << "nameserver " << Hosts::address(0) << "\noptions timeout:30 attempts:3\n";
    const std::string mounts = "mount --bind /dev/null /etc/hosts && mount --bind " + hosts_->shared() +
                               "/resolv.conf /etc/resolv.conf";
    ASSERT_EQ(run(hosts_->command(1, {"sh", "-c", mounts})).status, 0);
    nodes_[0]->signal(SIGKILL);
    for (int node : {1, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
    }
}

/// A pod's restartPolicy restarts a head like this, and so does `until ddprun ...; do :; done`. With MIN=1
/// the restarted head alone could form a second job, and so could a new node that finds it.
class RestartedHead : public LossOfTheHead, public ::testing::WithParamInterface<const char*> {};

TEST_P(RestartedHead, JoinsTheContinuedJobInsteadOfRunningItASecondTime) {
    hosts_ = std::make_unique<Hosts>(4);
    start(3, GetParam(), {"--max-restarts=3"},
          {path_of("PROBE"), "env", "PATH", "env", "WORLD_SIZE", "say", "running", "hold"});
    await_workers(3);
    nodes_[0]->signal(SIGKILL);
    ASSERT_TRUE(nodes_[1]->wait_for_output("the head at"));
    Program again(hosts_->command(0, head_), with_environment(environment_));
    std::replace(head_.begin(), head_.end(), std::string("--node-rank=0"), std::string("--node-rank=3"));
    Program late(hosts_->command(3, head_), with_environment(environment_));
    for (Program* one : {&again, &late}) ASSERT_TRUE(one->wait_for_output("WORLD_SIZE=8"));
    for (int node : {1, 2}) nodes_[static_cast<std::size_t>(node)]->signal(SIGTERM);
    for (Program* one : {&again, &late}) one->signal(SIGTERM);
    EXPECT_EQ(late.wait().status, 75);
    const Outcome outcome = again.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("the job goes on under " + Hosts::name(1) +
                                       ", which succeeded its lost head: this node joins it there"));
    EXPECT_EQ(occurrences(outcome.out, "WORLD_SIZE=2") + occurrences(outcome.out, "WORLD_SIZE=4"), 0)
        << "a world of its own: " << outcome.out;
    EXPECT_THAT(outcome.out, Not(HasSubstr("PATH unset")));
    EXPECT_THAT(end_of(1).err, HasSubstr("told the ddprun that listens at " + endpoint_));
}

INSTANTIATE_TEST_SUITE_P(Succession, RestartedHead, ::testing::Values("1:4", "2:4"));

TEST_F(LossOfTheHead, TheJobIsStillRequeued) {
    environment_.insert(environment_.end(), {"SLURM_JOB_ID=7", "ENVIRONMENT=BATCH"});
    hosts_ = std::make_unique<Hosts>(3);
    start(3, "2:3", {"--max-restarts=3", "--requeue=auto", "--log-dir=" + hosts_->shared()});
    await_workers(3);
    nodes_[0]->signal(SIGKILL);
    const Outcome one = end_of(1);
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.err, HasSubstr("run 1 of job 7 (at most")) << "the same run, under another head";
    EXPECT_FALSE(std::filesystem::exists(hosts_->shared() + "/ddprun-7.json"))
        << "the end has been noted: there is no next run";
}

TEST_F(LossOfTheHead, AWaitForTheStoreFailsAndTheNextWorldHasAStore) {
    start(3, "2:3", {"--max-restarts=3"}, {path_of("DDP_PROBE"), "await"});
    await_workers(3);
    nodes_[0]->signal(SIGKILL);
    for (int node : {1, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_EQ(occurrences(outcome.out,
                              "Store::get(\"never\"): the head at " + Hosts::address(0) + ":29411 is lost"),
                  2)
            << outcome.out;
        EXPECT_EQ(occurrences(outcome.out, "met again"), 2) << outcome.out;
    }
}

TEST_F(LossOfTheHead, AnElasticJobSurvivesTheHeadsWholeHostAlsoWithTls) {
    if (std::getenv("WITHOUT_TLS") != nullptr) GTEST_SKIP() << "built without OpenSSL 3";
    start(3, "2:3", {"--tls", "--max-restarts=3", "--heartbeat-timeout=2"});
    await_workers(3);
    hosts_->power_off(0);
    for (int node : {1, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
    }
}

TEST_F(LossOfTheHead, AHeadThatIsCutOffStopsItsWorkersAndTheOthersContinue) {
    start(3, "1:3", {"--max-restarts=3", "--heartbeat-timeout=2"});
    await_workers(3);
    hosts_->cut_cable(0);
    const Outcome head = end_of(0);
    EXPECT_EQ(head.status, 69) << head.err;
    EXPECT_THAT(head.err, HasSubstr("only 1 of 3 nodes"));
    EXPECT_EQ(occurrences(head.out, "WORLD_SIZE=2"), 0) << "it has not formed a world of its own";
    for (int node : {1, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("WORLD_SIZE=4"));
    }
}

TEST_F(LossOfTheHead, ANodeThatIsCutOffAloneStopsItsWorkers) {
    start(3, "1:3", {"--max-restarts=3", "--heartbeat-timeout=2"});
    await_workers(3);
    hosts_->cut_cable(1);
    const Outcome standby = end_of(1);
    EXPECT_EQ(standby.status, 69) << standby.err;
    EXPECT_THAT(standby.err, HasSubstr("not more than half"));
    for (int node : {0, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("WORLD_SIZE=4"));
    }
}

TEST_F(LossOfTheHead, AHeadThatContinuesAfterItWasSucceededEndsAndRunsNothing) {
    start(3, "1:3", {"--max-restarts=3", "--heartbeat-timeout=2"});
    await_workers(3);
    signal_ddprun(0, "STOP");
    ASSERT_TRUE(nodes_[1]->wait_for_output("this node is the head from now on"));
    signal_ddprun(0, "CONT");
    const Outcome head = end_of(0);
    EXPECT_NE(head.status, 0) << head.err;
    EXPECT_THAT(head.err, AllOf(HasSubstr("only 1 of 3 nodes"), HasSubstr("the warden killed the workers")));
    EXPECT_EQ(occurrences(head.out, "WORLD_SIZE="), 2) << head.out;
    for (int node : {1, 2}) {
        const Outcome outcome = end_of(node);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("WORLD_SIZE=4"));
    }
}

TEST_F(LossOfTheHead, ANodeThatWasLostByMistakeAndRejoinedCanBeTheStandby) {
    start(2, "1:2", {"--max-restarts=3", "--heartbeat-timeout=2"},
          {path_of("PROBE"), "env", "WORLD_SIZE", "say", "running", "generation", "1", "hold", "end",
           "generation", "2", "hold", "end", "generation", "3", "hold", "end"});
    await_workers(2);
    signal_ddprun(1, "STOP");
    ASSERT_TRUE(nodes_[0]->wait_for_output("WORLD_SIZE=2\n"));
    signal_ddprun(1, "CONT");
    ASSERT_TRUE(nodes_[0]->wait_for_output("job g3] node01 is the standby"));
    nodes_[0]->signal(SIGKILL);
    const Outcome one = end_of(1);
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_EQ(occurrences(one.out, "WORLD_SIZE=4\n"), 4) << one.out;
    EXPECT_EQ(occurrences(one.out, "WORLD_SIZE=2\n"), 2) << one.out;
}

TEST_F(LossOfTheHead, AFixedJobContinuesWhenASpareReplacesTheHead) {
    start(3, "2");  // the third node to join is the spare
    await_workers(1);
    nodes_[0]->signal(SIGKILL);
    const Outcome one = end_of(1), two = end_of(2);
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_EQ(two.status, 0) << two.err;
    EXPECT_THAT(one.out + two.out, HasSubstr("WORLD_SIZE=4"));
}

TEST_F(LossOfTheHead, AFixedJobWithoutASpareEndsAtOnce) {
    start(2, "2");
    for (int node : {0, 1}) ASSERT_TRUE(nodes_[static_cast<std::size_t>(node)]->wait_for_output("running\n"));
    nodes_[0]->signal(SIGKILL);
    const Outcome one = end_of(1);
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_THAT(one.err, Not(HasSubstr("goes on")));
}

}  // namespace
}  // namespace ddprun::test
