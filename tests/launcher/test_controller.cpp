#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "launcher/head/controller.h"
#include "launcher/spec/exit_codes.h"
#include "tests/support/fake_clock.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using ::testing::IsEmpty;

/// A controller whose server is the test. Agents are numbered from 1 on, one per node, in group-rank order.
class ControlledJob {
  public:
    /// `least`: the least number of nodes of an elastic job, which can outlive its controller; 0: a fixed
    /// job. `is_successor`: no node has joined, and it has not begun.
    explicit ControlledJob(int nodes, int max_restarts = 0, int least = 0, bool is_successor = false) {
        loop_ = *os::EventLoop::create({});
        ControllerConfig config;
        spec_.nodes = {least > 0 ? least : nodes, nodes};
        config.succession.can_be_succeeded = least > 0;
        spec_.restart.max_restarts = max_restarts;
        spec_.shutdown_timeout = 30s;
        config.program = "train";
        config.master = [](const rdzv::AgentHello&) -> Result<MasterAddress> {
            return MasterAddress{"127.0.0.1", 29500};
        };
        controller_ = std::make_unique<Controller>(
            *loop_, log_, spec_, std::move(config),
            [this](std::uint64_t peer, const rdzv::ToAgent& message) { sent_.emplace_back(peer, message); },
            [this] { ++done; });
        if (is_successor) return;
        controller_->begin();
        for (int node = 0; node < nodes; ++node) join(node);
        turn();
    }
    Controller* operator->() { return controller_.get(); }

    void join(int node, int slots = 1) {
        rdzv::AgentHello hello;
        hello.host = "node" + std::to_string(node);
        hello.node_rank = node;
        hello.slots = slots;
        hello.pid = 100 + node;
        hello.instance = hello.host;
        ASSERT_TRUE(controller_->agent_joined(peer(node), hello));
    }
    /// The posted messages.
    void turn() { ASSERT_TRUE(loop_->run_once(MonotonicClock::now())); }
    static std::uint64_t peer(int node) { return static_cast<std::uint64_t>(node) + 1; }

    void exits(int node, rdzv::WorkerExited exit = {}) {
        exit.generation = controller_->state().generation;
        exit.rank = node;
        exit.pid = 1000 + node;
        controller_->agent_message(peer(node), exit);
    }
    void ended(int node) {
        controller_->agent_message(peer(node), rdzv::GenerationEnded{controller_->state().generation, {}});
    }

    /// Messages of one kind sent to a node since the last call of forget().
    template <class M>
    std::vector<M> sent(int node) const {
        std::vector<M> found;
        for (const auto& [to, message] : sent_) {
            if (const M* one = std::get_if<M>(&message); one != nullptr && to == peer(node))
                found.push_back(*one);
        }
        return found;
    }
    void forget() { sent_.clear(); }
    int done = 0;

  private:
    JobSpec spec_;
    UniqueFd null_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    os::Log log_{{}, {os::LogLevel::Info, false, null_.get()}};
    std::unique_ptr<os::EventLoop> loop_;
    std::vector<std::pair<std::uint64_t, rdzv::ToAgent>> sent_;
    std::unique_ptr<Controller> controller_;
};

rdzv::WorkerExited failed(int status, Duration report_age = Duration(-1)) {
    rdzv::WorkerExited exit;
    exit.status = status;
    exit.error_age_ns = report_age.count();
    return exit;
}
rdzv::WorkerExited stopped_by_us() {
    rdzv::WorkerExited exit;
    exit.signaled = true;
    exit.status = SIGTERM;
    exit.by_us = true;
    return exit;
}

TEST(ControllerStop, AWorkerThatTheSchedulersSignalEndsFirstHasNotFinished) {
    ControlledJob job(2);
    job->stop(SIGTERM);
    for (int node = 0; node < 2; ++node) {
        job.exits(node);  // with 0, not stopped by its agent
        job.ended(node);
    }
    EXPECT_EQ(exit_code(job->end()), static_cast<int>(ExitCode::TryAgain));
}

TEST(ControllerStop, AStopAfterAllWorkersSucceededKeepsTheSuccess) {
    ControlledJob job(1);
    job.exits(0);
    job->stop(SIGTERM);
    job.ended(0);
    EXPECT_EQ(exit_code(job->end()), 0);
}

TEST(ControllerEnd, IsSentToNoNodeBeforeTheStandbyConfirms) {
    ControlledJob job(2, 0, 1);
    job->agent_message(ControlledJob::peer(0), rdzv::StandbyListens{40000});
    for (int node : {0, 1}) {
        job.exits(node);
        job.ended(node);
    }
    EXPECT_THAT(job.sent<rdzv::Shutdown>(1), IsEmpty()) << "the standby would begin again what is over";
    EXPECT_EQ(job.done, 0);
    job->agent_message(ControlledJob::peer(0), rdzv::StandbyListens{0});
    EXPECT_EQ(job.sent<rdzv::Shutdown>(1).size(), 1U);
    EXPECT_EQ(job.done, 1);
}

TEST(ControllerEnd, IsSentToANodeWhoseReturnEndsTheJob) {
    ControlledJob job(2);
    job->stop(SIGTERM);
    job.ended(0);
    rdzv::AgentHello again;
    again.host = "node1";
    again.slots = 1;
    again.rejoins = "node1";
    EXPECT_FALSE(job->agent_joined(9, again)) << "nobody would ever tell it";
    EXPECT_EQ(job.done, 1);
}

TEST(Controller, SendsEachNodeOnlyItsOwnPlace) {
    ControlledJob job(3);
    for (int node : {0, 1, 2}) {
        const auto orders = job.sent<rdzv::StartGeneration>(node);
        ASSERT_EQ(orders.size(), 1u);
        EXPECT_EQ(orders[0].group_rank, node);
        EXPECT_EQ(orders[0].first_rank, node);
        EXPECT_EQ(orders[0].local_world_size, 1);
        EXPECT_EQ(orders[0].world_size, 3);
    }
}

TEST(Controller, ErrorsAfterADetectedHangAreNotTheCause) {
    ControlledJob job(3);
    job->hang_found("rank 1 has been stopped", 1, true);
    job.exits(0, failed(1, 0ms));
    rdzv::WorkerExited reporting = failed(SIGTERM, 0ms);
    reporting.signaled = reporting.stopped_failing = true;
    job.exits(2, reporting);
    job.exits(1, stopped_by_us());
    for (int node : {0, 1, 2}) job.ended(node);
    EXPECT_EQ(root_cause(job->end()), nullptr);
    EXPECT_EQ(exit_code(job->end()), static_cast<int>(ExitCode::Hung));
}

TEST(Controller, AnErrorReportBeforeTheHangIsTheCause) {
    ControlledJob job(2);
    job->hang_found("rank 0 waits for rank 1", 1, true);
    rdzv::WorkerExited reporting = failed(SIGTERM, 30s);
    reporting.signaled = reporting.stopped_failing = true;
    job.exits(1, reporting);
    job.exits(0, stopped_by_us());
    for (int node : {0, 1}) job.ended(node);
    ASSERT_NE(root_cause(job->end()), nullptr);
    EXPECT_EQ(root_cause(job->end())->rank, 1);
    EXPECT_EQ(exit_code(job->end()), 1);
}

TEST(Controller, ErrorsOfTheSurvivorsOfALostNodeAreNotTheCause) {
    ControlledJob job(2);
    job->agent_lost(job.peer(1), {Errc::Closed, "connection lost", 0});
    job.exits(0, failed(1, 0ms));
    job.ended(0);
    EXPECT_EQ(job.done, 1);
    EXPECT_EQ(exit_code(job->end()), static_cast<int>(ExitCode::Unavailable));
}

TEST(Controller, TheEndNamesHostsThatWereLostBeforeTheStopOnly) {
    ControlledJob job(2);
    job->agent_lost(job.peer(1), {Errc::Closed, "connection lost", 0});
    EXPECT_THAT(job->end().lost_hosts, ::testing::ElementsAre("node1"));
    ControlledJob stopped(2);
    stopped->stop(SIGTERM);
    stopped->agent_lost(stopped.peer(1), {Errc::Closed, "connection lost", 0});
    EXPECT_THAT(stopped->end().lost_hosts, IsEmpty()) << "the scheduler ends its ddprun, too";
}

TEST(Controller, AFailureStaysTheCauseWhenItsNodeIsLostLater) {
    ControlledJob job(2);
    job.exits(1, failed(7));
    job->agent_lost(job.peer(1), {Errc::Closed, "connection lost", 0});
    job.exits(0, stopped_by_us());
    job.ended(0);
    EXPECT_EQ(exit_code(job->end()), 7);
}

TEST(Controller, MessagesOfOldGenerationsAndUnknownAgentsChangeNothing) {
    ControlledJob job(2, 1);
    job.exits(1, failed(1));
    for (int node : {0, 1}) job.ended(node);
    ASSERT_EQ(job->state().generation, 2u);
    job.forget();
    rdzv::WorkerExited late = failed(1);
    late.generation = 1;
    job->agent_message(job.peer(0), late);
    job->agent_message(job.peer(0), rdzv::GenerationEnded{1, {}});
    job->agent_message(job.peer(7), failed(1));
    job->agent_lost(job.peer(7), {Errc::Closed, "never joined", 0});
    EXPECT_EQ(job->state().phase, JobState::Phase::Running);
    EXPECT_THAT(job.sent<rdzv::StopGeneration>(0), IsEmpty());
}

TEST(Controller, AReturningNodeGetsItsPlaceInTheNextGeneration) {
    ControlledJob job(2, 1);
    job->agent_lost(job.peer(1), {Errc::Closed, "connection lost", 0});
    job.exits(0, stopped_by_us());
    job.ended(0);
    job.turn();
    EXPECT_EQ(job->state().phase, JobState::Phase::Joining);
    job.forget();
    rdzv::AgentHello hello;
    hello.host = "node1";
    hello.node_rank = 1;
    hello.slots = 4;
    ASSERT_TRUE(job->agent_joined(9, hello));
    job.turn();
    EXPECT_EQ(job->state().generation, 2u);
    EXPECT_EQ(job.sent<rdzv::StartGeneration>(0).at(0).world_size, 5);
}

/// The agent of a node whose workers wait for a generation after the third.
rdzv::AgentHello keeper(int node, std::uint64_t first_generation = 1) {
    rdzv::AgentHello hello;
    hello.host = "node" + std::to_string(node);
    hello.slots = 1;
    hello.kept_place = node;
    hello.kept_generation = 3;
    hello.kept_first = first_generation;
    hello.kept_first_rank = node;
    hello.keeps_workers = true;
    return hello;
}

rdzv::AgentHello spare() {
    rdzv::AgentHello hello;
    hello.host = "spare";
    hello.slots = 1;
    return hello;
}

/// The successor of the head of node 0 in a world of four ranks.
struct SuccessorJob : ControlledJob {
    explicit SuccessorJob(const std::vector<rdzv::AgentHello>& agents) : ControlledJob(4, 1, 2, true) {
        rdzv::JobSnapshot snapshot;
        snapshot.generation = 3;
        snapshot.ranks = 4;
        std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>> joined;
        for (const rdzv::AgentHello& hello : agents)
            joined.emplace_back(peer(static_cast<int>(joined.size())), hello);
        EXPECT_THAT((*this)->succeed(inherited(snapshot, MonotonicClock::now()), joined, "the head is lost"),
                    IsEmpty());
        turn();
    }
    /// The agents have heard that the successor knows of their workers.
    void suspended(std::initializer_list<int> nodes) {
        for (const int node : nodes)
            (*this)->agent_message(peer(node), rdzv::WorkersReady{(*this)->state().generation,
                                                                  rdzv::WorkerStage::Suspended, "", -1});
        turn();
    }
};

TEST(ControllerSuccession, TheStandbyHearsOfTheSlowestStartAndOfEachRecovery) {
    ControlledJob job(3, 1, 2);
    const auto join_all = [&job] {
        for (const int node : {0, 1, 2})
            job->agent_message(job.peer(node), rdzv::WorkersReady{job->state().generation,
                                                                  rdzv::WorkerStage::Joined, "", -1});
    };
    for (const int node : {0, 1, 2})
        job->agent_message(job.peer(node), rdzv::WorkersReady{1, rdzv::WorkerStage::Announced, "", -1});
    job.forget();
    join_all();
    ASSERT_EQ(job.sent<rdzv::JobSnapshot>(0).size(), 1U);
    EXPECT_GT(job.sent<rdzv::JobSnapshot>(0)[0].longest_start_ns, 0);
    job.exits(2, failed(1));
    EXPECT_EQ(job.sent<rdzv::StartGeneration>(2).at(0).start_limit_ns,
              2 * job.sent<rdzv::JobSnapshot>(0)[0].longest_start_ns);
    join_all();
    EXPECT_EQ(job.sent<rdzv::JobSnapshot>(0).back().recoveries, 1);
}

TEST(ControllerSuccession, WorkersThatWaitGoOnInPlaceAndASpareTakesTheLostHeadsRanks) {
    SuccessorJob job({keeper(1), keeper(2), keeper(3), spare()});
    EXPECT_EQ(job.sent<rdzv::SuspendGeneration>(0).front().generation, 4U)
        << "the lost head may have begun one more";
    EXPECT_THAT(job.sent<rdzv::StartGeneration>(0), IsEmpty());
    job.suspended({0, 1, 2});
    const rdzv::StartGeneration first = job.sent<rdzv::StartGeneration>(0).at(0);
    EXPECT_TRUE(first.in_place);
    EXPECT_EQ(first.generation, 5U);
    EXPECT_EQ(first.first_generation, 1U);
    EXPECT_EQ(first.first_rank, 1) << "survivors keep their ranks";
    EXPECT_EQ(job.sent<rdzv::StartGeneration>(3).at(0).first_rank, 0);
    EXPECT_EQ(job->state().restarts_used, 0);
}

TEST(ControllerSuccession, WorkersOfAnEarlierStartAreStoppedAndTheirNodeIsANewOne) {
    SuccessorJob job({keeper(1, 3), keeper(2, 3), keeper(3, 1)});
    EXPECT_EQ(job.sent<rdzv::StopGeneration>(2).size(), 1U);
    EXPECT_THAT(job.sent<rdzv::StopGeneration>(0), IsEmpty());
    job.suspended({0, 1});
    EXPECT_TRUE(job.sent<rdzv::StartGeneration>(0).at(0).in_place);
    EXPECT_THAT(job.sent<rdzv::StartGeneration>(2), IsEmpty()) << "its workers have not ended";
    job->agent_message(job.peer(2), rdzv::GenerationEnded{4, {}});
    EXPECT_EQ(job->host_of(job.peer(2)), "node3");
}

TEST(ControllerSuccession, WorkersWhoseRanksAnotherNodeHasByNowAreStopped) {
    rdzv::AgentHello lost_before = keeper(2);
    lost_before.host = "node9";
    lost_before.kept_generation = 2;
    SuccessorJob job({keeper(1), keeper(2), keeper(3), lost_before});
    EXPECT_EQ(job.sent<rdzv::StopGeneration>(3).size(), 1U);
    EXPECT_THAT(job.sent<rdzv::StopGeneration>(1), IsEmpty());
    job.suspended({0, 1, 2});
    const rdzv::StartGeneration next = job.sent<rdzv::StartGeneration>(0).at(0);
    EXPECT_TRUE(next.in_place);
    EXPECT_EQ(next.world_size, 3) << "the lost head's rank is gone, and no rank is there twice";
    EXPECT_THAT(job.sent<rdzv::StartGeneration>(3), IsEmpty()) << "its workers have not ended";
}

TEST(ControllerSuccession, AllRestartWhereMoreThanHalfOfTheRanksAreLost) {
    SuccessorJob job({keeper(1), spare()});
    EXPECT_EQ(job.sent<rdzv::StopGeneration>(0).at(0).generation, 4U);
    job->agent_message(job.peer(0), rdzv::GenerationEnded{4, {}});
    job.turn();
    job.turn();
    EXPECT_FALSE(job.sent<rdzv::StartGeneration>(0).at(0).in_place);
}

/// At this size an algorithm that visits all nodes for each node takes minutes, and exceeds the time limit of
/// the test program.
TEST(Controller, AJobOfSixteenThousandNodesStartsAndEnds) {
    constexpr int kNodes = 16384;
    ControlledJob job(kNodes);
    ASSERT_EQ(job->state().phase, JobState::Phase::Running);
    EXPECT_EQ(job.sent<rdzv::StartGeneration>(kNodes - 1).at(0).first_rank, kNodes - 1);
    job.forget();
    job.exits(0, failed(1, 10ms));
    for (int node = 1; node < kNodes; ++node) job.exits(node, failed(1, 0ms));
    for (int node = 0; node < kNodes; ++node) job.ended(node);
    EXPECT_EQ(job.done, 1);
    EXPECT_EQ(root_cause(job->end())->rank, 0);
}

}  // namespace
}  // namespace ddprun
