#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>

#include "launcher/head/job_state.h"

namespace ddprun {
namespace {

using Phase = JobState::Phase;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

const TimePoint kStart{1h};

template <class T>
std::vector<T> all_of(const std::vector<JobAction>& actions) {
    std::vector<T> found;
    for (const JobAction& action : actions) {
        if (const T* one = std::get_if<T>(&action)) found.push_back(*one);
    }
    return found;
}

/// A command line, and what else the decisions need.
struct Policy : JobSpec {
    Duration one_stop{};
    double random = 0;
    operator JobPolicy() const { return {*this, one_stop, random}; }
};

Policy with_restarts(int restarts) {
    Policy policy;
    policy.restart.max_restarts = restarts;
    return policy;
}

struct Job {
    Policy policy;
    JobState state;
    TimePoint now = kStart;

    explicit Job(Policy p = {}, std::vector<int> workers = {4}) : policy(std::move(p)) {
        tell(job_event::WorldFormed{std::move(workers)});
    }
    std::vector<JobAction> tell(const JobEvent& event) { return step(state, event, policy, now); }
    std::vector<JobAction> fails(int rank, FailureFacts facts = {false, true, SIGKILL, true}) {
        return tell(
            job_event::WorkerEnded{0, rank, facts, true, false, "rank 2 on node00, signal 9 (SIGKILL)"});
    }
    std::vector<JobAction> succeeds(int node = 0) {
        return tell(job_event::WorkerEnded{node, 0, {}, false, false, ""});
    }
};

TEST(JobStep, StartsTheFirstGenerationWhenTheWorldIsFormed) {
    JobState state;
    const auto actions = step(state, job_event::WorldFormed{{4, 4}}, Policy{}, kStart);
    ASSERT_EQ(all_of<job_action::StartGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].generation, 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].restart_count, 0);
}

TEST(JobStep, FinishesOnlyWhenEveryWorkerSucceededAndItsNodeEnded) {
    Job job({}, {2});
    EXPECT_TRUE(job.succeeds().empty());
    EXPECT_TRUE(job.succeeds().empty());
    EXPECT_EQ(job.state.phase, Phase::Succeeded);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, AnEarlyExitZeroChangesNothing) {
    Job job;
    EXPECT_TRUE(job.succeeds().empty());
    EXPECT_EQ(job.state.phase, Phase::Running);
}

TEST(JobStep, OnlyTheFirstFailureStopsTheOtherWorkers) {
    Job job;
    const auto first = job.fails(2);
    ASSERT_EQ(all_of<job_action::StopGeneration>(first).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(first)[0].failed_rank, 2);
    EXPECT_EQ(all_of<job_action::StopGeneration>(first)[0].grace, job.policy.failure_grace);
    EXPECT_TRUE(job.fails(3).empty());
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, ReportsTheRootCauseAndWhatFollows) {
    Job job(with_restarts(3));
    const auto said = all_of<job_action::Say>(job.fails(2));
    ASSERT_EQ(said.size(), 1u);
    EXPECT_EQ(said[0].text, "root cause: rank 2 on node00, signal 9 (SIGKILL); restart 1 of 3");
}

TEST(JobStep, ReportsTheMeaningOfAnEndOnce) {
    Job job(with_restarts(1));
    const auto actions = job.fails(2, {false, true, SIGKILL, true, "out of memory"});
    EXPECT_EQ(all_of<job_action::Say>(actions)[0].text,
              "root cause: rank 2 on node00, signal 9 (SIGKILL) (out of memory); restart 1 of 1");
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].why, "rank 2 on node00, signal 9 (SIGKILL)");
}

TEST(JobStep, RestartsWithANewGenerationAfterTheOldOneHasEnded) {
    Job job(with_restarts(1));
    EXPECT_TRUE(all_of<job_action::StartGeneration>(job.fails(0)).empty());
    const auto actions = job.tell(job_event::NodeEnded{0});
    ASSERT_EQ(all_of<job_action::StartGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].generation, 2u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].restart_count, 1);

    job.fails(0);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, BacksOffBeforeTheSecondRestart) {
    Policy policy = with_restarts(5);
    policy.restart.backoff = 2s;
    policy.random = 1.0;
    Job job(policy);
    job.fails(0);
    job.tell(job_event::NodeEnded{0});
    EXPECT_EQ(all_of<job_action::SetTimer>(job.fails(0)).at(0).when, kStart + 2s);
    EXPECT_TRUE(all_of<job_action::StartGeneration>(job.tell(job_event::NodeEnded{0})).empty());
    EXPECT_EQ(job.state.phase, Phase::BackingOff);
    job.now += 2s;
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::TimerFired{})).size(), 1u);
}

TEST(JobStep, AProgramThatCannotRunIsNeverRestarted) {
    Job job(with_restarts(3));
    const auto actions = job.fails(0, {true, false, 127, true});
    EXPECT_THAT(all_of<job_action::Say>(actions).at(0).text, HasSubstr("could not be started"));
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, TheFirstSignalStopsWithGraceAndTheSecondKills) {
    Job job;
    const auto first = job.tell(job_event::StopAsked{SIGINT, 0});
    ASSERT_EQ(all_of<job_action::StopGeneration>(first).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(first)[0].signal, SIGINT);
    EXPECT_EQ(all_of<job_action::StopGeneration>(first)[0].grace, job.policy.shutdown_timeout);
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGINT, 0})).size(), 1u);
    EXPECT_TRUE(job.tell(job_event::StopAsked{SIGINT, 0}).empty());
}

TEST(JobStep, TheSameSignalAtEveryNodeIsOneStopWithItsWholeGrace) {
    Job job({}, {2, 2, 2});
    EXPECT_EQ(all_of<job_action::StopGeneration>(job.tell(job_event::StopAsked{SIGTERM, 2})).size(), 1u);
    for (const std::uint64_t other : {0, 1})
        EXPECT_TRUE(job.tell(job_event::StopAsked{SIGTERM, other}).empty());
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGTERM, 1})).size(), 1u)
        << "the second time there";
}

TEST(JobStep, ASchedulersSigtermThatArrivesTwiceIsOneStop) {
    Policy policy;
    policy.one_stop = 5s;
    Job job(policy);
    job.tell(job_event::StopAsked{SIGTERM, 0});
    job.now += 30ms;
    EXPECT_TRUE(job.tell(job_event::StopAsked{SIGTERM, 0}).empty()) << "from PBS itself, and from its pbsdsh";
    job.now += 10s;
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGTERM, 0})).size(), 1u)
        << "asked for again";
}

TEST(JobStep, CtrlCTwiceInABatchJobIsTwoRequests) {
    Policy policy;
    policy.one_stop = 5s;
    Job job(policy);
    job.tell(job_event::StopAsked{SIGINT, 0});
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGINT, 0})).size(), 1u);
}

TEST(JobStep, OurNoticeAndTheSchedulersSigtermAreOneStop) {
    Policy policy;
    policy.one_stop = 5s;
    Job job(policy);
    EXPECT_EQ(
        all_of<job_action::StopGeneration>(job.tell(job_event::PreemptAsked{SIGTERM, "walltime in 60 s"}))
            .size(),
        1u);
    for (int way = 0; way < 2; ++way) {
        const auto actions = job.tell(job_event::StopAsked{SIGTERM, 0});
        EXPECT_TRUE(all_of<job_action::StopGeneration>(actions).empty()) << "their grace runs on";
        EXPECT_TRUE(all_of<job_action::KillGeneration>(actions).empty());
    }
}

TEST(JobStep, NoRestartBeginsShortlyBeforeTheWalltimesEnd) {
    Job job(with_restarts(3));
    job.tell(job_event::WalltimeKnown{kStart + 10min});
    job.now += 9min + 20s;
    const auto actions = job.fails(2);
    EXPECT_THAT(all_of<job_action::Say>(actions).at(0).text,
                HasSubstr("no restart: it would get nowhere in the 40 s that the walltime leaves"));
    EXPECT_TRUE(job.state.end.out_of_time);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, ARestartLongBeforeTheWalltimesEndIsAllowed) {
    Job job(with_restarts(3));
    job.tell(job_event::WalltimeKnown{kStart + 10min});
    job.now += 8min;
    job.fails(2);
    EXPECT_FALSE(job.state.end.out_of_time);
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, TheSameSignalAtEveryNodeAfterAFailureKeepsTheWholeGrace) {
    Job job(with_restarts(1), {2, 2});
    job.fails(0);
    EXPECT_EQ(all_of<job_action::Say>(job.tell(job_event::StopAsked{SIGTERM, 1})).size(), 1u);
    EXPECT_TRUE(job.tell(job_event::StopAsked{SIGTERM, 0}).empty());
    EXPECT_FALSE(job.state.end.killing);
}

TEST(JobStep, ASignalWhileWaitingForNodesEndsTheJobAtOnce) {
    JobState state;
    const auto actions = step(state, job_event::StopAsked{SIGINT, 0}, Policy{}, kStart);
    EXPECT_EQ(all_of<job_action::Finish>(actions).size(), 1u);
}

TEST(JobStep, ASignalDuringARestartCancelsTheRestart) {
    Job job(with_restarts(3));
    job.fails(1);
    job.tell(job_event::StopAsked{SIGTERM, 0});
    const auto actions = job.tell(job_event::NodeEnded{0});
    EXPECT_TRUE(all_of<job_action::StartGeneration>(actions).empty());
    EXPECT_EQ(all_of<job_action::Finish>(actions).size(), 1u);
}

TEST(JobStep, AStopIsANoticeToWorkersThatListenUnlessItIsCtrlC) {
    for (const int signal : {SIGTERM, SIGHUP, SIGINT}) {
        Job job;
        const auto actions = job.tell(job_event::StopAsked{signal, 0});
        EXPECT_EQ(all_of<job_action::NotifyPreempt>(actions).size(), signal == SIGINT ? 0u : 1u);
    }
}

TEST(JobStep, AWorkerThatWasAskedToStopLetsTheOthersSaveToo) {
    Job job;
    const auto actions = job.fails(2, {false, false, 75, true});
    ASSERT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].grace, job.policy.shutdown_timeout);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].failed_rank, -1) << "their collectives go on";
}

TEST(JobStep, APreemptionNotifiesBeforeItStops) {
    Job job;
    const auto actions = job.tell(job_event::PreemptAsked{SIGTERM, "walltime in 60 s"});
    ASSERT_EQ(actions.size(), 3u);
    EXPECT_TRUE(std::holds_alternative<job_action::NotifyPreempt>(actions[1]));
    EXPECT_TRUE(std::holds_alternative<job_action::StopGeneration>(actions[2]));
    EXPECT_TRUE(job.state.end.preempted);
}

TEST(JobStep, APreemptionAnnouncesNoMoreTimeThanTheSchedulerLeaves) {
    Job job;
    const auto actions =
        job.tell(job_event::PreemptAsked{SIGTERM, "walltime in 15 s", std::chrono::seconds(15)});
    EXPECT_THAT(all_of<job_action::Say>(actions).at(0).text, testing::HasSubstr("may save for 15 s"));
}

TEST(JobStep, AnEndBeforeAnyWorkerRunsReportsWhy) {
    const JobEvent ends[] = {job_event::PreemptAsked{SIGTERM, "walltime in 60 s"},
                             job_event::StopAsked{SIGTERM, 0}};
    const char* const said[] = {"walltime in 60 s: stopping before any worker runs",
                                "SIGTERM: stopping before any worker runs"};
    for (std::size_t i = 0; i < 2; ++i) {
        JobState joining;
        const auto actions = step(joining, ends[i], Policy{}, TimePoint{});
        EXPECT_EQ(all_of<job_action::Say>(actions).at(0).text, said[i]);
        EXPECT_EQ(all_of<job_action::Finish>(actions).size(), 1u);
    }
}

TEST(JobStep, ALostNodeStopsTheOthersAndWaitsForASpare) {
    Job job(with_restarts(1), {2, 2});
    const auto actions = job.tell(job_event::NodeLost{1, "node01: connection lost"});
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::NodeEnded{0})).size(), 1u);
    EXPECT_EQ(job.state.phase, Phase::Joining);
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::WorldFormed{{2, 2}})).at(0).generation,
              2u);
}

TEST(JobStep, ANodeLostDuringAStopIsReportedAndNotAwaited) {
    Job job({}, {1, 1});
    EXPECT_EQ(all_of<job_action::Say>(job.tell(job_event::StopAsked{SIGHUP, 101, 1, "node01"}))
                  .at(0)
                  .text.substr(0, 43),
              "SIGHUP at the ddprun of node01: stopping 2 ");
    const auto actions = job.tell(job_event::NodeLost{1, "node01: no heartbeat"});
    EXPECT_EQ(all_of<job_action::Say>(actions).at(0).text,
              "node01: no heartbeat; its workers are not waited for");
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u);
}

TEST(JobStep, ANodeThatIsLostAfterItsWorkersSucceededIsNoFailure) {
    Job job({}, {1, 1});
    job.succeeds(1);
    job.tell(job_event::NodeEnded{1});
    EXPECT_TRUE(all_of<job_action::StopGeneration>(job.tell(job_event::NodeLost{1, "gone"})).empty());
    EXPECT_EQ(job.state.phase, Phase::Running);
    job.succeeds(0);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{0})).size(), 1u)
        << "and the job ends with the others";
}

Policy with_backoff(Duration backoff) {
    Policy policy = with_restarts(5);
    policy.restart.backoff = backoff;
    policy.random = 1.0;
    return policy;
}

TEST(JobStep, BacksOffAlsoBeforeItWaitsForALostNode) {
    Job job(with_backoff(2s), {2, 2});
    job.fails(0);  // the first restart has no back-off
    for (int node : {0, 1}) job.tell(job_event::NodeEnded{node});
    job.tell(job_event::NodeLost{1, "gone"});
    EXPECT_TRUE(all_of<job_action::Rejoin>(job.tell(job_event::NodeEnded{0})).empty());
    EXPECT_EQ(job.state.phase, Phase::BackingOff);
    job.now += 2s;
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::TimerFired{})).size(), 1u);
    EXPECT_EQ(job.state.phase, Phase::Joining);
}

TEST(JobStep, ANodeLostDuringTheBackOffDoesNotEndIt) {
    Job job(with_backoff(2s), {2, 2});
    for (int round : {1, 2}) {
        job.fails(0);
        for (int node : {0, 1}) job.tell(job_event::NodeEnded{node});
        EXPECT_EQ(job.state.phase, round == 1 ? Phase::Running : Phase::BackingOff);
    }
    ASSERT_EQ(job.state.phase, Phase::BackingOff);
    EXPECT_TRUE(all_of<job_action::Rejoin>(job.tell(job_event::NodeLost{1, "gone"})).empty());
    job.now += 2s;
    const auto actions = job.tell(job_event::TimerFired{});
    EXPECT_EQ(all_of<job_action::Rejoin>(actions).size(), 1u);
    EXPECT_TRUE(all_of<job_action::StartGeneration>(actions).empty()) << "not without the node";
}

// ---- nodes that join and leave

job_event::StopAsked term_at(int node, bool others_go_on) {
    return {SIGTERM, static_cast<std::uint64_t>(node) + 100, node, "node0" + std::to_string(node),
            others_go_on};
}

TEST(JobStep, ANewNodeFormsTheWorldAgainWithoutUsingARestart) {
    Job job({}, {2, 2});
    EXPECT_EQ(all_of<job_action::SetTimer>(job.tell(job_event::NodesWaiting{1})).at(0).when,
              kStart + kOneChange);
    job.now += 500ms;
    EXPECT_TRUE(job.tell(job_event::NodesWaiting{2}).empty()) << "one change for both";
    job.now += 500ms;
    const auto actions = job.tell(job_event::TimerFired{});
    EXPECT_EQ(all_of<job_action::NotifyPreempt>(actions).at(0).why, "growing from 2 to 4 nodes");
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).at(0).grace, job.policy.preempt_grace);
    job.tell(job_event::NodeEnded{0});
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::NodeEnded{1})).size(), 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::WorldFormed{{2, 2, 2, 2}}))
                  .at(0)
                  .restart_count,
              0);
}

TEST(JobStep, ANewNodeThatLeavesAtOnceStopsNoWorker) {
    Job job;
    job.tell(job_event::NodesWaiting{1});
    job.tell(job_event::NodesWaiting{0});
    job.now += kOneChange;
    EXPECT_TRUE(job.tell(job_event::TimerFired{}).empty());
}

TEST(JobStep, WithGrowRestartANewNodeWaitsForARestart) {
    Policy policy = with_restarts(1);
    policy.grow = Grow::Restart;
    Job job(policy);
    EXPECT_TRUE(job.tell(job_event::NodesWaiting{1}).empty());
    job.fails(0);
    const auto actions = job.tell(job_event::NodeEnded{0});
    EXPECT_EQ(all_of<job_action::Rejoin>(actions).size(), 1u);
    EXPECT_TRUE(all_of<job_action::StartGeneration>(actions).empty());
}

TEST(JobStep, SucceededWorkersDoNotRunAgainForANewNode) {
    Job job({}, {2});
    job.tell(job_event::NodesWaiting{1});
    job.succeeds();
    job.now += kOneChange;
    EXPECT_TRUE(job.tell(job_event::TimerFired{}).empty());
    EXPECT_EQ(job.state.phase, Phase::Running);
}

TEST(JobStep, ALostNodeUsesNoRestartIfEnoughNodesAreLeft) {
    Job job({}, {2, 2, 2});
    const auto actions = job.tell(job_event::NodeLost{1, "node01: connection lost", true});
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).at(0).grace, job.policy.failure_grace);
    job.tell(job_event::NodeEnded{0});
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::NodeEnded{2})).size(), 1u);
    EXPECT_EQ(job.state.restarts_used, 0);
}

TEST(JobStep, NodesLostShortlyAfterEachOtherCauseOneChange) {
    Job job({}, {2, 2, 2, 2});
    job.tell(job_event::NodeLost{1, "node01: no heartbeat", true, 600ms});
    for (int node : {0, 3}) job.tell(job_event::NodeEnded{node});
    job.now += 400ms;
    EXPECT_TRUE(
        all_of<job_action::Rejoin>(job.tell(job_event::NodeLost{2, "node02: no heartbeat", true, 600ms}))
            .empty())
        << "no world with it in between";
    EXPECT_EQ(job.state.phase, Phase::BackingOff);
    job.now += 200ms;
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::TimerFired{})).size(), 1u);
    EXPECT_EQ(job.state.restarts_used, 0);
}

TEST(JobStep, ALossDuringAChangeOfTheWorldWaitsForFurtherLosses) {
    Job job({}, {2, 2, 2});
    job.tell(term_at(2, true));
    job.now += kOneChange;
    job.tell(job_event::TimerFired{});
    job.tell(job_event::NodeLost{1, "node01: no heartbeat", true, 600ms});
    for (int node : {0, 2})
        EXPECT_TRUE(all_of<job_action::Rejoin>(job.tell(job_event::NodeEnded{node})).empty());
    EXPECT_EQ(job.state.phase, Phase::BackingOff) << "no world with those whom the same cable took";
    job.now += 600ms;
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::TimerFired{})).size(), 1u);
}

TEST(JobStep, ASecondLossThatLeavesTooFewNodesUsesARestartOrEndsTheJob) {
    for (const bool has_ended : {false, true}) {
        for (const int restarts : {0, 1}) {
            Job job(with_restarts(restarts), {2, 2, 2});
            job.tell(job_event::NodeLost{1, "node01: gone", true, 600ms});
            if (has_ended) job.tell(job_event::NodeEnded{0});
            auto actions = job.tell(job_event::NodeLost{2, "node02: gone", false, 600ms});
            EXPECT_THAT(all_of<job_action::Say>(actions).at(0).text,
                        testing::HasSubstr("node02: gone; too few nodes are left"));
            if (!has_ended) actions = job.tell(job_event::NodeEnded{0});
            EXPECT_EQ(job.state.restarts_used, restarts);
            EXPECT_EQ(job.state.phase, restarts > 0 ? Phase::BackingOff : Phase::Finished);
            EXPECT_EQ(all_of<job_action::Finish>(actions).size(), restarts > 0 ? 0u : 1u);
            EXPECT_EQ(job.state.end.failure, "node02: gone");
        }
    }
}

TEST(JobStep, SigtermAtOneNodeRemovesItAndTheOthersGoOnAfterAGrace) {
    Job job({}, {2, 2, 2});
    const auto actions = job.tell(term_at(1, true));
    EXPECT_EQ(
        all_of<job_action::Say>(actions).at(0).text.find("SIGTERM at the ddprun of node01, which leaves"),
        0u);
    EXPECT_EQ(all_of<job_action::NodeLeaves>(actions).at(0).source, 101u);
    EXPECT_EQ(all_of<job_action::NotifyPreempt>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).at(0).grace, job.policy.shutdown_timeout);
    EXPECT_EQ(all_of<job_action::Dismiss>(job.tell(job_event::NodeEnded{1})).at(0).source, 101u);
    for (int node : {0, 2}) job.tell(job_event::NodeEnded{node});
    EXPECT_EQ(job.state.phase, Phase::BackingOff) << "others may follow";
    job.now += kOneChange;
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::TimerFired{})).size(), 1u);
    EXPECT_FALSE(job.state.end.stopped_by);
}

TEST(JobStep, SigtermAtNodeAfterNodeIsOneStopWithOneGrace) {
    for (const bool head_is_signalled : {true, false}) {
        Job job(with_restarts(3), {2, 2, 2});
        EXPECT_EQ(all_of<job_action::StopGeneration>(job.tell(term_at(2, true))).size(), 1u);
        job.now += 300ms;
        const auto actions =
            job.tell(head_is_signalled ? job_event::StopAsked{SIGTERM, 0} : term_at(1, false));
        EXPECT_TRUE(all_of<job_action::StopGeneration>(actions).empty());
        EXPECT_TRUE(job.tell(term_at(2, false)).empty()) << "it has asked to leave, not for this";
        EXPECT_FALSE(job.state.end.killing);
        for (int node : {0, 2}) job.tell(job_event::NodeEnded{node});
        EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{1})).size(), 1u);
        EXPECT_EQ(job.state.end.stopped_by, SIGTERM);
    }
}

TEST(JobStep, ASecondSigtermAtALeavingNodeKillsOnlyItsWorkers) {
    Job job({}, {2, 2, 2});
    job.tell(term_at(1, true));
    const auto actions = job.tell(term_at(1, false));
    EXPECT_EQ(all_of<job_action::KillNode>(actions).at(0).node, 1);
    EXPECT_TRUE(all_of<job_action::KillGeneration>(actions).empty());
    EXPECT_FALSE(job.state.end.stopped_by);
}

TEST(JobStep, ASpareThatLeavesDisturbsNobody) {
    Job job;
    const auto actions = job.tell(job_event::StopAsked{SIGTERM, 7, -1, "node09", true});
    EXPECT_EQ(all_of<job_action::Dismiss>(actions).size(), 1u);
    EXPECT_TRUE(all_of<job_action::StopGeneration>(actions).empty());
    EXPECT_EQ(job.state.phase, Phase::Running);
}

TEST(JobStep, TheOthersDoNotWaitInCollectivesForANodeThatIsLostDuringAStop) {
    Job job({}, {2, 2, 2});
    job.tell(job_event::StopAsked{SIGTERM, 0});
    const auto actions = job.tell(job_event::NodeLost{1, "node node01: closed"});
    ASSERT_EQ(all_of<job_action::EndCollectives>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::EndCollectives>(actions)[0].lost_rank, 2);
    job.tell(job_event::NodeEnded{2});
    EXPECT_TRUE(
        all_of<job_action::EndCollectives>(job.tell(job_event::NodeLost{2, "node node02: closed"})).empty())
        << "it had no workers any more";
}

TEST(JobStep, ANodeThatLeavesDuringAStopIsNotAwaited) {
    Job job(with_restarts(1), {2, 2});
    job.fails(0);
    job.tell(job_event::NodeEnded{0});
    job.tell(job_event::NodesWaiting{1});
    job.tell(term_at(1, true));
    job.tell(job_event::NodeEnded{1});
    job.now += kOneChange;
    const auto actions = job.tell(job_event::TimerFired{});
    EXPECT_TRUE(all_of<job_action::StartGeneration>(actions).empty());
    EXPECT_EQ(all_of<job_action::Rejoin>(actions).size(), 1u);
}

/// A third node joins a job of two and is lost two seconds after it has got a place. False: it got none.
bool comes_and_goes(Job& job) {
    job.tell(job_event::NodesWaiting{1});
    job.now += kOneChange;
    if (all_of<job_action::StopGeneration>(job.tell(job_event::TimerFired{})).empty()) return false;
    job.tell(job_event::NodeEnded{0});
    job.tell(job_event::NodeEnded{1});
    job.tell(job_event::WorldFormed{{2, 2, 2}});
    job.now += 2s;
    job.tell(job_event::NodeLost{2, "node c", true});
    job.tell(job_event::NodeEnded{0});
    job.tell(job_event::NodeEnded{1});
    job.tell(job_event::WorldFormed{{2, 2}});
    return true;
}

TEST(JobStep, ANodeThatJoinsAndLeavesRepeatedlyDoesNotBlockTheOthers) {
    Job job({}, {2, 2});
    int times = 0;
    while (comes_and_goes(job)) ASSERT_LE(++times, kStuckGenerations) << "it stops the others for ever";
    EXPECT_EQ(job.state.phase, Phase::Running);
    EXPECT_EQ(job.state.timer, job.state.generation_started + kProgressAge)
        << "others may come: they wait, but not for ever";

    job.now = job.state.timer;
    EXPECT_EQ(all_of<job_action::StopGeneration>(job.tell(job_event::TimerFired{})).size(), 1u);
    EXPECT_EQ(job.state.history.without_progress, 0);
}

TEST(JobStep, AGenerationThatRanLongBeforeItsNodesChangedMadeProgress) {
    Job job({}, {2, 2});
    for (int steps = 1; steps < 3 * kStuckGenerations; ++steps) {
        job.tell(job_event::NodesWaiting{1});
        job.now += kOneChange;
        ASSERT_EQ(all_of<job_action::StopGeneration>(job.tell(job_event::TimerFired{})).size(), 1u) << steps;
        job.tell(job_event::WorkerEnded{0, 0, {}, true, true, "rank 0", steps});
        job.tell(job_event::NodeEnded{0});
        job.tell(job_event::NodeEnded{1});
        job.tell(job_event::WorldFormed{{2, 2}});
    }
}

TEST(JobStep, APreemptionAfterAllHaveSucceededIsTooLate) {
    Job job({}, {1});
    job.succeeds();
    EXPECT_TRUE(job.tell(job_event::PreemptAsked{SIGTERM, "walltime in 2 min"}).empty());
    EXPECT_FALSE(job.state.end.preempted);
}

TEST(RestartPolicy, ABudgetWithAWindowForgetsOldRestarts) {
    RestartSpec spec;
    spec.max_restarts = 2;
    spec.window = 1h;
    const RestartHistory recent{{kStart, kStart + 10min}, 0};
    EXPECT_FALSE(decide_restart(spec, recent, {}, kStart + 20min, 0).restart);
    EXPECT_TRUE(decide_restart(spec, recent, {}, kStart + 61min, 0).restart);
}

TEST(RestartPolicy, PermanentExitCodesAreFinal) {
    for (const int code : {64, 65, 66, 78, 93, 126, 127}) {
        EXPECT_FALSE(permanent_failure({false, false, code, true}).empty()) << code;
    }
    for (const int code : {1, 2, 3, 137})
        EXPECT_TRUE(permanent_failure({false, false, code, true}).empty()) << code;
    EXPECT_TRUE(permanent_failure({false, true, 64, true}).empty()) << "a signal number is no exit code";
}

TEST(RestartPolicy, StopsWhenGenerationsInARowMakeNoProgress) {
    RestartSpec spec;
    spec.max_restarts = 100;
    RestartHistory history;
    history.without_progress = kStuckGenerations;
    const RestartDecision decision = decide_restart(spec, history, {}, kStart, 0);
    EXPECT_FALSE(decision.restart);
    EXPECT_EQ(decision.why, "5 generations in a row made no progress");
}

TEST(RestartPolicy, TheBackOffIsPartOfTheTimeThatARestartNeeds) {
    RestartSpec spec;
    spec.max_restarts = 5;
    spec.backoff = 50s;
    const RestartHistory history{{kStart}, 0};
    EXPECT_TRUE(decide_restart(spec, {}, {}, kStart, 1.0, kStart + 100s).restart);
    EXPECT_FALSE(decide_restart(spec, history, {}, kStart, 1.0, kStart + 100s).restart);
}

TEST(RestartPolicy, AFinalFailureIsNotBlamedOnLackOfTime) {
    RestartSpec spec;
    spec.max_restarts = 1;
    EXPECT_FALSE(decide_restart(spec, {}, {false, false, 64, true}, kStart, 0, kStart).out_of_time);
    EXPECT_FALSE(decide_restart({}, {}, {}, kStart, 0, kStart).out_of_time) << "none was asked for";
    EXPECT_TRUE(decide_restart(spec, {}, {}, kStart, 0, kStart).out_of_time);
}

TEST(RestartPolicy, BackOffDoublesWithJitterUpToALimit) {
    RestartSpec spec;
    spec.max_restarts = 100;
    spec.backoff = 2s;
    spec.backoff_max = 5s;
    const auto wait = [&](std::size_t restarts, double random) {
        RestartHistory history;
        history.restarts.assign(restarts, kStart);
        return decide_restart(spec, history, {}, kStart, random).at - kStart;
    };
    EXPECT_EQ(wait(0, 1.0), 0s);
    EXPECT_EQ(wait(1, 1.0), 2s);
    EXPECT_EQ(wait(2, 1.0), 4s);
    EXPECT_EQ(wait(3, 1.0), 5s);
    EXPECT_EQ(wait(2, 0.0), 2s);
}

// ---- recovery in place

using Stage = job_event::NodeReady::Stage;

/// A job of one node whose workers have all announced that they survive the end of a generation.
Job recoverable(int workers = 4, int restarts = 0) {
    Job job(with_restarts(restarts), {workers});
    job.tell(job_event::NodeReady{0, Stage::Announced});
    return job;
}

std::string text_of(const std::vector<JobAction>& actions) {
    std::string text;
    for (const job_action::Say& line : all_of<job_action::Say>(actions)) text += line.text + '\n';
    return text;
}

TEST(InPlace, AFailureStartsTheFailedRankAgainAndUsesNoRestart) {
    Job job = recoverable();
    const auto actions = job.fails(2);
    ASSERT_EQ(all_of<job_action::Recover>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recover>(actions)[0].generation, 2u);
    EXPECT_EQ(all_of<job_action::Recover>(actions)[0].failed_rank, 2);
    EXPECT_TRUE(all_of<job_action::StopGeneration>(actions).empty());
    EXPECT_EQ(text_of(actions),
              "rank 2 on node00, signal 9 (SIGKILL): 3 ranks go on in place, rank 2 starts again\n");
    EXPECT_EQ(job.state.phase, Phase::Running);
    EXPECT_EQ(job.state.restarts_used, 0);
}

TEST(InPlace, IsOverWhenAllRanksHaveJoined) {
    Job job(with_restarts(0), {2, 2});
    for (const int node : {0, 1}) job.tell(job_event::NodeReady{node, Stage::Announced});
    job.fails(2);
    job.now += 84ms;
    EXPECT_TRUE(job.tell(job_event::NodeReady{0, Stage::Joined, "", 812}).empty());
    const auto actions = job.tell(job_event::NodeReady{1, Stage::Joined, "", 811});
    EXPECT_EQ(text_of(actions), "recovered after 84 ms: rank 2 is back, at step 812\n");
    ASSERT_EQ(all_of<job_action::Recovered>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recovered>(actions)[0].ranks, std::vector<int>{2});
    EXPECT_EQ(all_of<job_action::Recovered>(actions)[0].took, 84ms);
    EXPECT_FALSE(job.state.recovery.in_place);
    EXPECT_EQ(job.state.recovery.recoveries, 1);
}

TEST(InPlace, WorkersThatAnnounceNothingRestartAsEver) {
    Job job(with_restarts(1));
    EXPECT_EQ(text_of(job.fails(2)), "root cause: rank 2 on node00, signal 9 (SIGKILL); restart 1 of 1\n");
}

TEST(InPlace, RecoverRestartSaysAndDoesWhatItDidBefore) {
    Job job = recoverable(4, 1);
    job.policy.recover.mode = RecoverSpec::Mode::Restart;
    const auto actions = job.fails(2);
    EXPECT_EQ(text_of(actions), "root cause: rank 2 on node00, signal 9 (SIGKILL); restart 1 of 1\n");
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
}

TEST(InPlace, SaysWhyItIsRefused) {
    struct Case {
        std::function<void(Job&)> before;
        std::string why;
    };
    const std::vector<Case> cases = {
        {[](Job& job) {
             job.tell(job_event::NodeReady{0, Stage::Refused, "rank 3: backend mpi"});
         },
         "rank 3: backend mpi"},
        {[](Job& job) { job.succeeds(); }, "a rank has ended"},
        {[](Job& job) {
             job.tell(job_event::NodeReady{0, Stage::Finished});
         },
         "all ranks had finished"},
        {[](Job& job) { job.state.time_up = job.now; }, "the walltime is over"},
    };
    for (const Case& one : cases) {
        Job job = recoverable(4, 1);
        one.before(job);
        const auto actions = job.fails(2);
        EXPECT_THAT(text_of(actions), HasSubstr("; not recovered in place: " + one.why + "; "));
        EXPECT_TRUE(all_of<job_action::Recover>(actions).empty()) << one.why;
        EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u) << one.why;
    }
}

TEST(InPlace, WaitsForTheAnnouncementOfAllNodes) {
    Job job(with_restarts(1), {2, 2});
    job.tell(job_event::NodeReady{0, Stage::Announced});
    EXPECT_THAT(text_of(job.fails(2)), HasSubstr("not recovered in place: not all ranks were ready for it"));
}

TEST(InPlace, APermanentFailureIsFinal) {
    Job job = recoverable(4, 1);
    EXPECT_EQ(text_of(job.fails(2, {false, false, 64, true})),
              "root cause: rank 2 on node00, signal 9 (SIGKILL); exit code 64 means wrong usage: a restart "
              "cannot help\n");
}

TEST(InPlace, MoreThanHalfOfTheRanksRestartTheGangWithTheFirstCause) {
    Job job = recoverable(4, 1);
    job.fails(0);
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(1)).size(), 1u) << "half of the ranks are left";
    const auto actions = job.tell(
        job_event::WorkerEnded{0, 3, {false, true, SIGSEGV, true}, true, false, "rank 3, signal 11"});
    EXPECT_EQ(
        text_of(actions),
        "root cause: rank 2 on node00, signal 9 (SIGKILL); not recovered in place: 3 of 4 ranks failed; "
        "restart 1 of 1\n");
    EXPECT_FALSE(job.state.recovery.in_place);
}

TEST(InPlace, ALoneRankHasNobodyToRecoverFrom) {
    Job job = recoverable(1, 1);
    EXPECT_THAT(text_of(job.fails(0)), HasSubstr("1 of 1 ranks failed"));
}

TEST(InPlace, ARankThatFailsAgainBeforeAllHaveJoinedStartsOnceMore) {
    Job job = recoverable();
    job.fails(2);
    const auto again = job.fails(2);
    ASSERT_EQ(all_of<job_action::Recover>(again).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recover>(again)[0].generation, 3u);
    job.tell(job_event::NodeReady{0, Stage::Joined});
    EXPECT_EQ(job.state.recovery.recoveries, 1) << "it was one recovery";
}

TEST(InPlace, AnEndBeforeTheNodeKnewOfTheGenerationNeedsNoOther) {
    Job job = recoverable();
    job.fails(2);
    const auto late =
        job.tell(job_event::WorkerEnded{0, 1, {false, true, SIGKILL, true}, true, false, "rank 1", -1, true});
    EXPECT_TRUE(late.empty()) << "its agent starts it with rank 2";
    EXPECT_THAT(text_of(job.tell(job_event::NodeReady{0, Stage::Joined})), HasSubstr("ranks 1, 2 are back"));
}

TEST(InPlace, ALateEndCountsTowardsHalfOfTheRanks) {
    Job job = recoverable(2, 1);
    job.fails(0);
    const auto late =
        job.tell(job_event::WorkerEnded{0, 1, {false, true, SIGKILL, true}, true, false, "rank 1", -1, true});
    EXPECT_THAT(text_of(late), HasSubstr("2 of 2 ranks failed"));
}

TEST(InPlace, WaitsWhileANodeMayNotKnowOfTheLastGeneration) {
    Job job(with_restarts(1), {2, 2});
    for (const int node : {0, 1}) job.tell(job_event::NodeReady{node, Stage::Announced});
    job.fails(2);
    Job other = job;
    const auto actions = other.fails(0);
    EXPECT_THAT(text_of(actions), HasSubstr("wait until all nodes know of the last recovery"));
    EXPECT_EQ(all_of<job_action::Suspend>(actions).size(), 1u);
    other.tell(job_event::NodeReady{0, Stage::Suspended});
    EXPECT_EQ(all_of<job_action::Reform>(other.tell(job_event::NodeReady{1, Stage::Suspended})).size(), 1u);
    job.tell(job_event::NodeReady{1, Stage::Started});
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(0)).size(), 1u);
}

TEST(InPlace, AWorkerThatCannotBeStartedForAMomentIsStartedOnceMore) {
    const FailureFacts no_process{.never_ran = true};
    Job first = recoverable(4, 1);
    EXPECT_THAT(text_of(first.fails(2, no_process)), HasSubstr("the program could not be started"));
    Job job = recoverable(4, 1);
    job.tell(job_event::NodeReady{0, Stage::Started});
    job.fails(2);
    job.tell(job_event::NodeReady{0, Stage::Started});
    int attempts = 0;
    for (; job.state.phase == Phase::Running && attempts < 100; ++attempts) {
        EXPECT_THAT(text_of(job.fails(2, no_process)), HasSubstr("wait for another attempt"));
        job.tell(job_event::NodeReady{0, Stage::Suspended});
        job.now += kSpawnPause;
        const auto due = job.tell(job_event::TimerFired{});
        if (all_of<job_action::Reform>(due).empty()) break;
        EXPECT_EQ(text_of(job.tell(job_event::WorldFormed{{4}, {0}})),
                  "3 ranks go on in place, rank 2 starts again\n");
        job.tell(job_event::NodeReady{0, Stage::Started});
    }
    EXPECT_EQ(attempts, kStuckGenerations - 1);
    EXPECT_EQ(job.state.restarts_used, 1) << "it may help";
}

TEST(InPlace, RecoveriesWithoutAFurtherStepAreLimited) {
    Job job = recoverable(4, 1);
    const auto fails_at = [&](std::int64_t step) {
        const auto actions =
            job.tell(job_event::WorkerEnded{0, 2, {false, true, SIGKILL, true}, true, false, "rank 2", step});
        job.tell(job_event::NodeReady{0, Stage::Joined});
        return actions;
    };
    for (int n = 0; n < 100; ++n) EXPECT_EQ(all_of<job_action::Recover>(fails_at(n)).size(), 1u) << n;
    for (int n = 0; n < kStuckGenerations; ++n)
        EXPECT_EQ(all_of<job_action::Recover>(fails_at(99)).size(), 1u) << n;
    EXPECT_THAT(text_of(fails_at(99)),
                HasSubstr("5 recoveries in a row came no step further; restart 1 of 1"));
}

/// A rank that ends with 0 before it has joined.
std::vector<JobAction> misses(Job& job, int rank, int node = 0) {
    return job.tell(job_event::WorkerEnded{node, rank, {}, false, false, "", -1, false, true});
}

TEST(InPlace, AReplacementThatEndsWithZeroIsNotWaitedFor) {
    Job job = recoverable(4);
    job.fails(2);
    job.tell(job_event::NodeReady{0, Stage::Started});
    const auto actions = misses(job, 2);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_THAT(text_of(actions),
                AllOf(HasSubstr("root cause: rank 2"),
                      HasSubstr("not recovered in place: rank 2 ended with 0 before it had joined")));
}

TEST(JobStep, OtherNodesHearOnceOfARankThatEndedBeforeItHadJoined) {
    Job job(with_restarts(0), {2, 2});
    const auto first = misses(job, 3, 1);
    ASSERT_EQ(all_of<job_action::EndJoining>(first).size(), 1u);
    EXPECT_EQ(all_of<job_action::EndJoining>(first)[0].absent_rank, 3);
    EXPECT_TRUE(all_of<job_action::EndJoining>(misses(job, 2, 1)).empty());
    Job alone(with_restarts(0), {4});
    EXPECT_TRUE(all_of<job_action::EndJoining>(misses(alone, 3)).empty()) << "its agent has done it";
}

TEST(InPlace, ASurvivorThatIsFurtherThanTheFailedRankHasMadeProgress) {
    Job job = recoverable(4, 1);
    const auto fails = [&](std::int64_t told, std::int64_t begun) {
        const auto actions =
            job.tell(job_event::WorkerEnded{0, 2, {false, true, SIGKILL, true}, true, false, "rank 2", told});
        job.tell(job_event::NodeReady{0, Stage::Joined, "", begun});
        return actions;
    };
    // Each rank tells its steps only when it leaves its group: a rank that is killed, not those since then.
    for (int n = 0; n < 100; ++n) EXPECT_EQ(all_of<job_action::Recover>(fails(n - 1, n)).size(), 1u) << n;
    for (int n = 0; n < kStuckGenerations; ++n)
        EXPECT_EQ(all_of<job_action::Recover>(fails(99, 99)).size(), 1u) << n;
    EXPECT_THAT(text_of(fails(99, 99)), HasSubstr("5 recoveries in a row came no step further"));
}

TEST(InPlace, ARecoveryIsToldWithTheStepThatAllBeginWith) {
    Job job = recoverable(4);
    job.tell(job_event::WorkerEnded{0, 2, {false, true, SIGKILL, true}, true, false, "rank 2", 813});
    EXPECT_THAT(text_of(job.tell(job_event::NodeReady{0, Stage::Joined, "", 812})),
                HasSubstr(", at step 812"))
        << "what only the failed rank had done is lost";
}

TEST(InPlace, ALoopOfEarlyFailuresIsLimitedThoughNoStepIsTold) {
    Job job = recoverable();
    int recoveries = 0;
    while (job.state.phase == Phase::Running && recoveries < 100) {
        recoveries += static_cast<int>(all_of<job_action::Recover>(job.fails(2)).size());
        job.tell(job_event::NodeReady{0, Stage::Joined});
    }
    EXPECT_EQ(recoveries, kStuckGenerations);
}

TEST(InPlace, RanksAreReleasedWhenAllHaveFinished) {
    Job job(with_restarts(0), {2, 2});
    for (const int node : {0, 1}) job.tell(job_event::NodeReady{node, Stage::Announced});
    EXPECT_TRUE(job.tell(job_event::NodeReady{0, Stage::Finished}).empty());
    EXPECT_EQ(all_of<job_action::Release>(job.tell(job_event::NodeReady{1, Stage::Finished})).size(), 1u);
}

TEST(InPlace, NobodyWaitsForTheOthersWhenNoFailureCanBeRecovered) {
    Job refused = recoverable();
    EXPECT_EQ(
        all_of<job_action::Release>(refused.tell(job_event::NodeReady{0, Stage::Refused, "rank 3"})).size(),
        1u);
    Job ended = recoverable();
    EXPECT_EQ(all_of<job_action::Release>(ended.succeeds()).size(), 1u);
    EXPECT_TRUE(all_of<job_action::Release>(ended.succeeds()).empty()) << "told once";
}

TEST(InPlace, AFailureBeforeTheReleaseIsRecoveredAndAllFinishAnew) {
    Job job(with_restarts(0), {2, 2});
    for (const int node : {0, 1}) job.tell(job_event::NodeReady{node, Stage::Announced});
    job.tell(job_event::NodeReady{0, Stage::Finished});
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(3)).size(), 1u);
    EXPECT_TRUE(job.tell(job_event::NodeReady{1, Stage::Finished}).empty()) << "node 0 has still to finish";
}

TEST(InPlace, AStopEndsTheRecoveryWithTheWholeGrace) {
    Job job = recoverable();
    job.fails(2);
    const auto actions = job.tell(job_event::StopAsked{SIGTERM, 1});
    ASSERT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].grace, job.policy.shutdown_timeout);
    job.now += job.policy.shutdown_timeout;
    EXPECT_TRUE(all_of<job_action::Recover>(job.fails(1)).empty()) << "nothing starts any more";
}

TEST(InPlace, TheHeadGivesUpWhenTheAgentsCannot) {
    Job job = recoverable(4, 1);
    job.fails(2);
    job.now += 2 * job.policy.recover.within + kJoinTimeout;
    const auto actions = job.tell(job_event::TimerFired{});
    EXPECT_THAT(text_of(actions), HasSubstr("not recovered in place: not all ranks were ready"));
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(job.state.end.after, GenerationEnd::After::Restart);
}

TEST(InPlace, TheHeadDoesNotGiveUpWorkersThatAreSlow) {
    Job job = recoverable(4, 1);
    job.fails(2);
    job.now += 2 * job.policy.recover.within;
    job.tell(job_event::NodeReady{0, Stage::Slow});
    job.now += kJoinTimeout;
    EXPECT_TRUE(job.tell(job_event::TimerFired{}).empty());
    job.now += 2 * job.policy.recover.within;
    EXPECT_EQ(all_of<job_action::StopGeneration>(job.tell(job_event::TimerFired{})).size(), 1u);
}

TEST(InPlace, TheLongestStartIsThatOfAllWorkersTogether) {
    Job job = recoverable(4, 1);
    job.now += 41s;
    job.tell(job_event::NodeReady{0, Stage::Joined});
    job.fails(2);
    job.now += 50s;
    job.tell(job_event::NodeReady{0, Stage::Joined});
    EXPECT_EQ(job.state.recovery.longest_start, 41s) << "replacements do not count";
}

TEST(InPlace, NodesThatWaitAreTakenInAfterTheRecovery) {
    Job job = recoverable();
    job.tell(job_event::NodesWaiting{1});
    job.fails(2);
    job.now += kOneChange;
    EXPECT_TRUE(job.tell(job_event::TimerFired{}).empty()) << "a world that is being formed is not stopped";
    job.tell(job_event::NodeReady{0, Stage::Joined});
    job.now += kOneChange;
    EXPECT_EQ(all_of<job_action::Suspend>(job.tell(job_event::TimerFired{})).size(), 1u);
}

TEST(InPlace, ARankThatHangsIsEndedAndTheOthersGoOn) {
    Job job = recoverable();
    const auto actions = job.tell(job_event::HangFound{"rank 2 has not called all_reduce #812", 2});
    ASSERT_EQ(all_of<job_action::KillRank>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::KillRank>(actions)[0].rank, 2);
    EXPECT_FALSE(job.state.end.hung);
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(2)).size(), 1u);
}

TEST(InPlace, AHangWithoutACulpritOrAfterAVainKillRestartsTheGang) {
    for (const int culprit : {-1, 2}) {
        Job job = recoverable(4, 1);
        if (culprit >= 0) job.tell(job_event::HangFound{"rank 2 stands still", culprit});
        const auto actions = job.tell(job_event::HangFound{"all stand still", culprit});
        EXPECT_TRUE(job.state.end.hung) << culprit;
        EXPECT_THAT(text_of(actions), HasSubstr("the hanging rank is not known"));
    }
}

TEST(InPlace, AHangThatNobodyAskedForEndsNoJob) {
    Job job = recoverable();
    job.tell(job_event::NodeReady{0, Stage::Finished});
    const auto actions = job.tell(job_event::HangFound{"rank 0 is busy", 0, false});
    EXPECT_EQ(text_of(actions),
              "the hang is reported only (--hang-timeout is not set): all ranks had finished\n");
    EXPECT_EQ(actions.size(), 1u);
    EXPECT_FALSE(decide_on_hang(job.state, job.policy, job.now).in_place) << "it is not even looked for";
    Job vain = recoverable();
    vain.tell(job_event::HangFound{"rank 2 stands still", 2, false});
    EXPECT_EQ(vain.tell(job_event::HangFound{"rank 2 stands still", 2, false}).size(), 1u);
    EXPECT_FALSE(vain.state.end.hung);
}

TEST(InPlace, ARestartOfTheGangAsksTheWorkersAnew) {
    Job job = recoverable(4, 2);
    job.tell(job_event::NodeReady{0, Stage::Refused, "rank 3: backend mpi"});
    job.fails(2);
    job.tell(job_event::NodeEnded{0});
    EXPECT_EQ(text_of(job.fails(2)), "root cause: rank 2 on node00, signal 9 (SIGKILL); restart 2 of 2\n");
}

Policy for_program(int restarts) {
    Policy policy = with_restarts(restarts);
    policy.recover.mode = RecoverSpec::Mode::Program;
    return policy;
}

TEST(RecoverProgram, AFailureStopsNobodyAndTheJobIsOverWhenTheOthersHaveSucceeded) {
    Job job(for_program(3), {2, 2});
    EXPECT_EQ(text_of(job.fails(2)),
              "rank 2 on node00, signal 9 (SIGKILL): the other ranks go on without it (--recover=program)\n");
    job.succeeds(0);
    job.succeeds(0);
    EXPECT_TRUE(job.tell(job_event::NodeEnded{0}).empty());
    job.succeeds(1);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeEnded{1})).size(), 1u);
}

TEST(RecoverProgram, WhenAllHaveFailedTheFirstFailureDecidesOnARestart) {
    Job job(for_program(1));
    for (const int rank : {2, 0, 1, 3}) job.fails(rank);
    EXPECT_EQ(job.state.phase, Phase::Running);
    const auto actions = job.tell(job_event::NodeEnded{0});
    EXPECT_EQ(text_of(actions), "root cause: rank 2 on node00, signal 9 (SIGKILL); restart 1 of 1\n");
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions).size(), 1u);
    EXPECT_FALSE(job.state.end.outlived);
}

TEST(RecoverProgram, AProgramThatCannotRunStopsTheOthersAtOnce) {
    Job job(for_program(0));
    EXPECT_EQ(all_of<job_action::StopGeneration>(job.fails(0, {true, false, 127, true})).size(), 1u);
}

TEST(LostTime, IsAddedUpByCause) {
    Job job = recoverable(4, 1);
    job.fails(2);
    job.now += 84ms;
    job.tell(job_event::NodeReady{0, Stage::Joined, "", 812});
    job.tell(job_event::RehearsalDue{});
    job.now += 10ms;
    job.tell(job_event::NodeReady{0, Stage::Joined, "", 812});
    for (const int rank : {0, 1, 2}) job.fails(rank);
    ASSERT_EQ(job.state.phase, Phase::Stopping);
    job.now += 2s;
    job.tell(job_event::NodeEnded{0});
    ASSERT_EQ(job.state.phase, Phase::Running);
    EXPECT_EQ(job.state.end.lost.failures, 84ms);
    EXPECT_EQ(job.state.end.lost.rehearsals, 10ms);
    EXPECT_EQ(job.state.end.lost.restarts, 2s);
}

TEST(Rehearsal, FormsTheNextGenerationInPlaceAndCountsAsNoRecovery) {
    Job job = recoverable();
    job.policy.recover.rehearse = 100;
    const auto actions = job.tell(job_event::RehearsalDue{});
    ASSERT_EQ(all_of<job_action::Recover>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recover>(actions)[0].generation, 2u);
    EXPECT_EQ(all_of<job_action::Recover>(actions)[0].failed_rank, -1);
    EXPECT_TRUE(job.tell(job_event::RehearsalDue{}).empty()) << "one is under way";
    const auto joined = job.tell(job_event::NodeReady{0, Stage::Joined, "", 812});
    EXPECT_EQ(text_of(joined), "");
    EXPECT_EQ(job.state.recovery.rehearsals, 1);
    EXPECT_EQ(job.state.recovery.recoveries, 0);
    EXPECT_EQ(job.state.history.recovered_step, -1) << "a failure at this step is not stuck";
    EXPECT_EQ(describe_rehearsals(job.state, job.policy.recover),
              "1 rehearsal: all ranks let go and met again, 100 steps or more apart");
}

TEST(Rehearsal, BecomesARecoveryWhereARankFailsInIt) {
    Job job = recoverable();
    job.tell(job_event::RehearsalDue{});
    job.tell(job_event::NodeReady{0, Stage::Started});
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(2)).size(), 1u);
    EXPECT_THAT(text_of(job.tell(job_event::NodeReady{0, Stage::Joined, "", 812})),
                HasSubstr("rank 2 is back"));
    EXPECT_EQ(job.state.recovery.recoveries, 1);
    EXPECT_EQ(job.state.recovery.rehearsals, 0);
}

TEST(Rehearsal, ThatNotAllRanksJoinIsAFailure) {
    Job job = recoverable(4, 1);
    job.tell(job_event::RehearsalDue{});
    job.now += 2 * job.policy.recover.within + kJoinTimeout;
    EXPECT_THAT(
        text_of(job.tell(job_event::TimerFired{})),
        HasSubstr("root cause: a rehearsal (--rehearse); not recovered in place: not all ranks were ready"));
}

TEST(Rehearsal, IsRefusedWithOneLineWhereTheJobCannotRecoverInPlace) {
    Job refused = recoverable();
    refused.policy.recover.rehearse = 100;
    EXPECT_EQ(text_of(refused.tell(job_event::NodeReady{0, Stage::Refused, "rank 2: sharded"})),
              "there are no rehearsals (--rehearse): rank 2: sharded\n");
    EXPECT_TRUE(refused.tell(job_event::RehearsalDue{}).empty());
    EXPECT_EQ(describe_rehearsals(refused.state, refused.policy.recover), "") << "it was said";

    const Job silent(with_restarts(0));
    EXPECT_EQ(describe_rehearsals(silent.state, {.rehearse = 100}),
              "there was no rehearsal (--rehearse): all ranks restart (the program has not announced that it "
              "recovers in place)");
    EXPECT_EQ(describe_rehearsals(recoverable().state, {.rehearse = 100}),
              "there was no rehearsal (--rehearse): the job ended too soon for one");
}

TEST(InPlace, SaysForPsWhetherAFailureIsRecovered) {
    Job job(with_restarts(0), {2, 2});
    const auto described = [&](RecoverSpec::Mode mode = RecoverSpec::Mode::Auto) {
        return describe_recovery(job.state, mode);
    };
    EXPECT_THAT(described(), HasSubstr("has not announced"));
    EXPECT_THAT(described(RecoverSpec::Mode::Restart), HasSubstr("--recover=restart"));
    EXPECT_THAT(described(RecoverSpec::Mode::Program), HasSubstr("--recover=program"));
    job.tell(job_event::NodeReady{0, Stage::Announced});
    EXPECT_THAT(described(), HasSubstr("not all ranks are ready"));
    job.tell(job_event::NodeReady{1, Stage::Announced});
    EXPECT_THAT(described(), HasSubstr("in place"));
    job.tell(job_event::NodeReady{1, Stage::Refused, "rank 3: backend mpi"});
    EXPECT_THAT(described(), HasSubstr("rank 3: backend mpi"));
}

// ---- recovery in place with other nodes

/// A job of nodes with two workers each, which have all announced that they survive a generation's end.
struct Nodes : Job {
    explicit Nodes(int nodes, int restarts = 0)
        : Job(with_restarts(restarts), std::vector<int>(static_cast<std::size_t>(nodes), 2)) {
        for (int node = 0; node < nodes; ++node) tell(job_event::NodeReady{node, Stage::Announced});
    }
    std::vector<JobAction> loses(int node, bool others_go_on = true, Duration others_may_follow = 100ms) {
        return tell(job_event::NodeLost{node, "node node02: closed", others_go_on, others_may_follow});
    }
    std::vector<JobAction> confirm(std::vector<int> nodes, std::int64_t steps = -1) {
        std::vector<JobAction> last;
        for (const int node : nodes) last = tell(job_event::NodeReady{node, Stage::Suspended, "", steps});
        return last;
    }
    std::vector<JobAction> passes(Duration span) {
        now += span;
        return tell(job_event::TimerFired{});
    }
    std::vector<JobAction> join_all() {
        std::vector<JobAction> last;
        for (int node = 0; node < static_cast<int>(state.nodes.size()); ++node)
            last = tell(job_event::NodeReady{node, Stage::Joined, "", 812});
        return last;
    }
};

TEST(InPlaceNodes, ASpareTakesTheLostNodesPlaceAndNoRestartIsUsed) {
    Nodes job(4);
    const auto lost = job.loses(2);
    EXPECT_EQ(text_of(lost), "node node02: closed: ranks 4, 5 are lost, 6 workers wait to go on in place\n");
    ASSERT_EQ(all_of<job_action::Suspend>(lost).size(), 1u);
    EXPECT_EQ(all_of<job_action::Suspend>(lost)[0].failed_rank, 4);
    EXPECT_TRUE(all_of<job_action::StopGeneration>(lost).empty());
    EXPECT_TRUE(job.confirm({0, 1, 3}).empty()) << "others may follow";
    EXPECT_EQ(all_of<job_action::Reform>(job.passes(100ms)).size(), 1u);
    const auto formed = job.tell(job_event::WorldFormed{{2, 2, 2, 2}, {0, 1, -1, 3}});
    ASSERT_EQ(all_of<job_action::Recover>(formed).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recover>(formed)[0].generation, 2u);
    EXPECT_EQ(text_of(formed), "6 ranks go on in place, ranks 4, 5 start on another node\n");
    job.now += 500ms;
    const auto joined = job.join_all();
    EXPECT_EQ(text_of(joined), "recovered after 600 ms: ranks 4, 5 are back, at step 812\n");
    ASSERT_EQ(all_of<job_action::Recovered>(joined).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recovered>(joined)[0].cause, "node node02: closed");
    EXPECT_EQ(job.state.restarts_used, 0);
    EXPECT_EQ(job.state.recovery.recoveries, 1);
}

TEST(InPlaceNodes, WithoutASpareTheOthersGoOnInASmallerWorld) {
    Nodes job(4);
    job.loses(1);
    job.passes(100ms);
    EXPECT_EQ(all_of<job_action::Reform>(job.confirm({0, 2, 3})).size(), 1u) << "the last confirmation";
    const auto formed = job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 2, 3}});
    EXPECT_EQ(text_of(formed), "6 ranks go on in place; 3 instead of 4 nodes\n");
    EXPECT_EQ(text_of(job.join_all()), "recovered after 100 ms: 6 ranks go on, at step 812\n");
    EXPECT_EQ(job.state.ranks(), 6);
    EXPECT_TRUE(all_of<job_action::Recover>(job.fails(5)).size() == 1) << "and can be recovered again";
}

TEST(InPlaceNodes, TooFewNodesRestartAsEver) {
    Nodes job(2, 1);
    const auto actions = job.loses(1, false);
    EXPECT_EQ(text_of(actions), "root cause: node node02: closed; restart 1 of 1\n");
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
}

TEST(InPlaceNodes, MoreThanHalfOfTheRanksRestart) {
    Nodes job(3);
    EXPECT_EQ(all_of<job_action::Suspend>(job.loses(1)).size(), 1u);
    const auto actions = job.loses(2);
    EXPECT_THAT(text_of(actions),
                HasSubstr("not recovered in place: 4 of 6 ranks failed; going on without it"));
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(job.state.end.after, GenerationEnd::After::Rejoin);
}

TEST(InPlaceNodes, ANodeThatDoesNotConfirmTheEndOfItsGenerationIsNotAwaitedForEver) {
    Nodes job(4, 1);
    job.loses(1);
    job.passes(100ms);
    job.confirm({0, 2});
    const auto actions = job.passes(2 * job.policy.recover.within + kJoinTimeout);
    EXPECT_THAT(text_of(actions),
                HasSubstr("root cause: node node02: closed; not recovered in place: not all "
                          "nodes were ready 2 min 10 s later"));
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(job.state.end.after, GenerationEnd::After::Rejoin);
}

TEST(InPlaceNodes, TooFewNodesWhileTheOthersWaitRestart) {
    Nodes job(4, 1);
    job.loses(3);
    const auto actions = job.loses(2, false);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(job.state.restarts_used, 1);
    Nodes other(4, 1);
    other.loses(3);
    other.passes(100ms);
    other.confirm({0, 1, 2});
    EXPECT_EQ(all_of<job_action::StopGeneration>(other.tell(job_event::NodesMissing{})).size(), 1u)
        << "the spare has gone before it was taken";
    EXPECT_EQ(other.state.end.failure, "node node02: closed");
}

TEST(InPlaceNodes, ANodeLostDuringARecoveryIsPartOfIt) {
    Nodes job(4);
    job.fails(0);
    EXPECT_EQ(all_of<job_action::Suspend>(job.loses(2)).size(), 1u);
    job.passes(100ms);
    job.confirm({0, 1, 3});
    job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 1, 3}});
    EXPECT_THAT(text_of(job.join_all()), HasSubstr("rank 0 is back"));
    EXPECT_EQ(job.state.recovery.recoveries, 1);
}

TEST(InPlaceNodes, ARankThatDiesWhileTheOthersWaitStartsWithTheNextGenerationUnderItsNewNumber) {
    Nodes job(4);
    job.loses(1);
    EXPECT_TRUE(
        job.tell(job_event::WorkerEnded{3, 6, {false, true, SIGKILL, true}, true, false, "rank 6"}).empty());
    job.passes(100ms);
    job.confirm({0, 2, 3});
    const auto formed = job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 2, 3}});
    EXPECT_EQ(text_of(formed), "5 ranks go on in place, rank 4 starts again; 3 instead of 4 nodes\n");
}

TEST(InPlaceNodes, ARefusalWhileTheOthersWaitRestarts) {
    Nodes job(4, 1);
    job.loses(1);
    job.tell(job_event::NodeReady{0, Stage::Refused, "rank 1: backend mpi"});
    job.confirm({0, 2, 3});
    const auto actions = job.passes(100ms);
    EXPECT_THAT(text_of(actions), HasSubstr("not recovered in place: rank 1: backend mpi"));
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(job.state.end.after, GenerationEnd::After::Rejoin) << "one of its nodes is lost";
}

TEST(InPlaceNodes, AStopFollowsWhenWorkersThatWaitHaveAWorldInWhichTheyCanSave) {
    for (const bool is_preemption : {false, true}) {
        Nodes job(4);
        job.loses(1);
        const JobEvent stop = is_preemption ? JobEvent(job_event::PreemptAsked{SIGTERM, "walltime"})
                                            : JobEvent(job_event::StopAsked{SIGTERM, 1});
        EXPECT_TRUE(all_of<job_action::StopGeneration>(job.tell(stop)).empty());
        job.now += 50ms;
        EXPECT_EQ(all_of<job_action::Reform>(job.confirm({0, 2, 3})).size(), 1u)
            << "nothing else is waited for";
        const auto actions = job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 2, 3}});
        EXPECT_EQ(all_of<job_action::Recover>(actions).size(), 1u);
        ASSERT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
        const Duration grace = is_preemption ? job.policy.preempt_grace : job.policy.shutdown_timeout;
        EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].grace, grace - 50ms);
        EXPECT_EQ(all_of<job_action::NotifyPreempt>(actions).size(), 1u);
        EXPECT_EQ(job.state.end.after, GenerationEnd::After::Finish);
    }
}

/// A worker of node 1 that dies in a stop; ddprun has signalled it before.
job_event::WorkerEnded dies_in_stop(int signal) {
    return {1, 2, {false, true, signal, true}, true, true, "rank 2 on node01, signal 9 (SIGKILL)"};
}

TEST(InPlaceNodes, ARankThatDiesInAStopStartsAgainSoThatAllSave) {
    for (const bool is_preemption : {false, true}) {
        Nodes job(3);
        job.tell(job_event::WalltimeKnown{job.now});
        job.tell(is_preemption ? JobEvent(job_event::PreemptAsked{SIGTERM, "walltime"})
                               : JobEvent(job_event::StopAsked{SIGTERM, 1}));
        job.now += 20ms;
        const auto actions = job.tell(dies_in_stop(SIGKILL));
        EXPECT_EQ(text_of(actions),
                  "rank 2 on node01, signal 9 (SIGKILL): 5 ranks go on in place, rank 2 starts "
                  "again, to save before the stop\n");
        ASSERT_EQ(all_of<job_action::Recover>(actions).size(), 1u);
        EXPECT_EQ(all_of<job_action::Recover>(actions)[0].failed_rank, 2);
        ASSERT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
        EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].grace, 30s - 20ms);
        EXPECT_EQ(job.state.phase, Phase::Stopping);
        EXPECT_TRUE(all_of<job_action::EndCollectives>(actions).empty());
    }
}

TEST(InPlaceNodes, ADeathInAStopThatIsNotRecoveredIsToldToAllNodesOnce) {
    Job job(with_restarts(0), {2, 2, 2});  // its workers do not recover in place
    job.tell(job_event::StopAsked{SIGTERM, 1});
    const auto actions = job.tell(dies_in_stop(SIGKILL));
    EXPECT_TRUE(all_of<job_action::Recover>(actions).empty());
    ASSERT_EQ(all_of<job_action::EndCollectives>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::EndCollectives>(actions)[0].lost_rank, 2);
    EXPECT_TRUE(job.tell(dies_in_stop(SIGKILL)).empty());
}

TEST(InPlaceNodes, AWorkerThatEndsByTheStopItselfIsNotStartedAgain) {
    Nodes job(3);
    job.tell(job_event::StopAsked{SIGTERM, 1});
    const auto actions = job.tell(dies_in_stop(SIGTERM));
    EXPECT_TRUE(all_of<job_action::Recover>(actions).empty());
    EXPECT_EQ(all_of<job_action::EndCollectives>(actions).size(), 1u);
}

TEST(InPlaceNodes, ARankThatHasSavedIsNotAwaitedByThoseThatMeetAgainInAStop) {
    Nodes job(3);
    job.tell(job_event::StopAsked{SIGTERM, 1});
    job.tell(dies_in_stop(SIGKILL));
    EXPECT_EQ(all_of<job_action::EndCollectives>(job.tell(job_event::WorkerEnded{0, 0, {}, false, true, ""}))
                  .size(),
              1u);
    Nodes met(3);
    met.tell(job_event::StopAsked{SIGTERM, 1});
    met.tell(dies_in_stop(SIGKILL));
    met.join_all();
    EXPECT_TRUE(met.tell(job_event::WorkerEnded{0, 0, {}, false, true, ""}).size() <= 1u);
    EXPECT_FALSE(met.state.end.has_ended_collectives);
}

TEST(InPlaceNodes, ABrokenLinkInAStopIsMendedSoThatAllSave) {
    Nodes job(3);
    job.tell(job_event::StopAsked{SIGTERM, 1});
    const auto actions = job.tell(job_event::NodeReady{1, Stage::LetGo, "rank 2 has left its group"});
    EXPECT_EQ(all_of<job_action::Recover>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
}

TEST(InPlaceNodes, AStopWithoutAnotherWorldIsAStop) {
    Nodes job(4, 3);
    job.loses(1);
    job.tell(job_event::StopAsked{SIGTERM, 1});
    const auto actions = job.loses(2, false);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(job.state.end.after, GenerationEnd::After::Finish);
    EXPECT_EQ(job.state.restarts_used, 0);
    Nodes killed(4);
    killed.loses(1);
    killed.tell(job_event::StopAsked{SIGTERM, 1});
    EXPECT_EQ(all_of<job_action::KillGeneration>(killed.tell(job_event::StopAsked{SIGTERM, 1})).size(), 1u);
    EXPECT_EQ(killed.state.phase, Phase::Stopping);
}

TEST(InPlaceNodes, LossesWithoutAFurtherStepAreLimited) {
    Nodes job(4, 1);
    int recoveries = 0;
    while (job.state.phase == Phase::Running && recoveries < 100) {
        job.loses(1);
        job.passes(100ms);
        recoveries += static_cast<int>(all_of<job_action::Reform>(job.confirm({0, 2, 3}, 812)).size());
        job.tell(job_event::WorldFormed{{2, 2, 2, 2}, {0, -1, 2, 3}});
        job.join_all();
    }
    EXPECT_EQ(recoveries, kStuckGenerations + 1);
}

std::vector<JobAction> leave(Nodes& job, int node) {
    return job.tell(
        job_event::StopAsked{SIGTERM, static_cast<std::uint64_t>(10 + node), node, "node02", true});
}

TEST(InPlaceNodes, OnlyTheWorkersOfANodeThatLeavesAreStopped) {
    Nodes job(4);
    const auto asked = leave(job, 2);
    EXPECT_EQ(text_of(asked), "SIGTERM at the ddprun of node02, which leaves: the others go on in place\n");
    EXPECT_TRUE(all_of<job_action::Suspend>(asked).empty()) << "all nodes may be signalled, to save and stop";
    const auto due = job.passes(kOneChange);
    EXPECT_EQ(all_of<job_action::Suspend>(due).size(), 1u);
    ASSERT_EQ(all_of<job_action::StopNode>(due).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopNode>(due)[0].node, 2);
    EXPECT_EQ(all_of<job_action::StopNode>(due)[0].grace, job.policy.shutdown_timeout);
    EXPECT_TRUE(all_of<job_action::StopGeneration>(due).empty());
    job.tell(job_event::WorkerEnded{2, 4, {}, false, true, ""});
    EXPECT_EQ(all_of<job_action::Reform>(job.confirm({0, 1, 3})).size(), 1u) << "its end is not waited for";
    job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 1, 3}});
    job.join_all();
    EXPECT_EQ(job.state.recovery.recoveries, 1);
    EXPECT_EQ(job.state.restarts_used, 0);
}

TEST(InPlaceNodes, WhenAllRanksOfASmallerWorldFailNobodyHasTheState) {
    Nodes job(2, 1);
    leave(job, 1);
    job.passes(kOneChange);
    job.confirm({0});
    job.tell(job_event::WorldFormed{{2}, {0}});
    job.tell(job_event::NodeReady{0, Stage::Started});
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(0)).size(), 1u) << "one of two";
    job.tell(job_event::NodeReady{0, Stage::Started});
    const auto actions = job.fails(1);
    EXPECT_TRUE(all_of<job_action::Recover>(actions).empty()) << "two of the four that were there";
    EXPECT_THAT(text_of(actions), HasSubstr("not recovered in place: no rank is left that has the state"));
}

TEST(InPlaceNodes, WhenEveryNodeIsSignalledTheLeaveBecomesAStopOfWorkersThatStillRun) {
    Nodes job(3);
    leave(job, 1);
    job.now += 100ms;
    const auto actions = job.tell(job_event::StopAsked{SIGTERM, 1});
    ASSERT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions)[0].grace, job.policy.shutdown_timeout);
    EXPECT_EQ(job.state.end.after, GenerationEnd::After::Finish);
}

TEST(InPlaceNodes, AWorkerOfANodeThatLeavesIsNotStartedAgain) {
    Nodes job(4);
    leave(job, 2);
    const auto actions =
        job.tell(job_event::WorkerEnded{2, 4, {false, true, SIGTERM, true}, true, false, "rank 4"});
    EXPECT_TRUE(all_of<job_action::Recover>(actions).empty());
    EXPECT_EQ(all_of<job_action::Suspend>(actions).size(), 1u) << "the others do not wait for the second";
}

TEST(InPlaceNodes, AFailureWhileANodeIsAboutToLeaveIsRecoveredBefore) {
    Nodes job(4);
    leave(job, 2);
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(0)).size(), 1u);
    job.tell(job_event::NodeReady{0, Stage::Joined});
    EXPECT_EQ(all_of<job_action::Suspend>(job.passes(kOneChange)).size(), 1u) << "then it leaves";
}

TEST(InPlaceNodes, ABrokenLinkFormsTheSameWorldAgain) {
    Nodes job(2);
    EXPECT_TRUE(all_of<job_action::Suspend>(
                    job.tell(job_event::NodeReady{1, Stage::LetGo, "rank 2 has left its group (reset)"}))
                    .empty())
        << "an end may still be reported";
    const auto due = job.passes(kEndReportTimeout);
    EXPECT_EQ(
        text_of(due),
        "rank 2 has left its group (reset), though nobody has ended: 4 workers wait to go on in place\n");
    EXPECT_EQ(all_of<job_action::Suspend>(due)[0].failed_rank, -1);
    EXPECT_EQ(all_of<job_action::Reform>(job.confirm({0, 1})).size(), 1u);
    EXPECT_EQ(text_of(job.tell(job_event::WorldFormed{{2, 2}, {0, 1}})), "4 ranks go on in place\n");
    EXPECT_EQ(text_of(job.join_all()), "recovered after 0 s: 4 ranks go on, at step 812\n");
}

TEST(InPlaceNodes, AnEndExplainsWhyOthersHaveLeftTheirGroup) {
    Nodes job(2);
    job.tell(job_event::NodeReady{1, Stage::LetGo, "rank 2 has left its group (reset)"});
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(0)).size(), 1u);
    EXPECT_TRUE(job.passes(kEndReportTimeout).empty());
}

TEST(InPlaceNodes, TheEndOfARankThatHasReportedAnErrorIsAwaited) {
    Nodes job(2);
    job.tell(job_event::NodeReady{0, Stage::Failing, "rank 0 has reported an error"});
    job.tell(job_event::NodeReady{1, Stage::LetGo, "rank 2 has left its group (closed)"});
    EXPECT_TRUE(all_of<job_action::Suspend>(job.passes(kEndReportTimeout)).empty());
    Nodes silent = job;
    EXPECT_EQ(all_of<job_action::Recover>(job.fails(0)).size(), 1u) << "one generation follows";
    EXPECT_THAT(text_of(silent.passes(silent.policy.failure_grace)),
                HasSubstr("rank 0 has reported an error, though nobody has ended"));
}

TEST(InPlaceNodes, ALinkThatStaysBrokenRestartsTheGang) {
    Nodes job(2, 1);
    int recoveries = 0;
    while (job.state.phase == Phase::Running && recoveries < 100) {
        job.tell(job_event::NodeReady{1, Stage::LetGo, "rank 2 has left its group (reset)"});
        job.passes(kEndReportTimeout);
        recoveries += static_cast<int>(all_of<job_action::Reform>(job.confirm({0, 1})).size());
        job.tell(job_event::WorldFormed{{2, 2}, {0, 1}});
    }
    EXPECT_EQ(recoveries, kStuckGenerations);
    EXPECT_EQ(job.state.restarts_used, 1);
    EXPECT_EQ(job.state.end.failure, "rank 2 has left its group (reset)");
}

TEST(InPlaceNodes, ABrokenLinkOfAJobThatCannotRecoverIsAFailure) {
    Nodes job(2, 1);
    job.tell(job_event::NodeReady{0, Stage::Refused, "rank 0: backend mpi"});
    job.tell(job_event::NodeReady{1, Stage::LetGo, "rank 2 has left its group (reset)"});
    const auto due = job.passes(kEndReportTimeout);
    EXPECT_EQ(text_of(due),
              "root cause: rank 2 has left its group (reset); not recovered in place: rank 0: backend mpi; "
              "restart 1 of 1\n");
    EXPECT_EQ(all_of<job_action::StopGeneration>(due).size(), 1u);
}

TEST(InPlaceNodes, ANodeThatComesIsTakenInWhileTheOthersGoOn) {
    Nodes job(2);
    job.tell(job_event::NodesWaiting{1});
    const auto due = job.passes(kOneChange);
    EXPECT_EQ(text_of(due), "growing from 2 to 3 nodes: all workers go on in place\n");
    EXPECT_EQ(all_of<job_action::Suspend>(due).size(), 1u);
    EXPECT_EQ(all_of<job_action::Reform>(job.confirm({0, 1}, 811)).size(), 1u);
    EXPECT_EQ(text_of(job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 1, -1}})),
              "4 ranks go on in place, ranks 4, 5 start on another node; 3 instead of 2 nodes\n");
    job.now += 400ms;
    const auto joined = job.join_all();
    EXPECT_EQ(text_of(joined), "6 ranks run after 400 ms, at step 812\n");
    EXPECT_TRUE(all_of<job_action::Recovered>(joined).empty()) << "nothing had failed";
    EXPECT_EQ(job.state.recovery.recoveries, 0);
}

TEST(InPlaceNodes, AFailureWhileANodeIsTakenInIsARecovery) {
    Nodes job(2);
    job.tell(job_event::NodesWaiting{1});
    job.passes(kOneChange);
    job.tell(job_event::WorkerEnded{1, 3, {false, true, SIGKILL, true}, true, false, "rank 3"});
    job.confirm({0, 1}, 811);
    job.tell(job_event::WorldFormed{{2, 2, 2}, {0, 1, -1}});
    const auto joined = job.join_all();
    ASSERT_EQ(all_of<job_action::Recovered>(joined).size(), 1u);
    EXPECT_EQ(all_of<job_action::Recovered>(joined)[0].cause, "rank 3");
}

}  // namespace
}  // namespace ddprun
