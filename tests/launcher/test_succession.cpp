#include "launcher/head/succession.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

const TimePoint kDawn{1000s};

/// The head of this number of nodes, with agents 1 (its own), 2, 3 ...; agent 2 is the standby, and all know
/// it.
struct HeadOf {
    explicit HeadOf(int nodes) {
        state.can_be_succeeded = true;
        job.phase = JobState::Phase::Running;
        job.generation = 1;
        std::vector<rdzv::AgentId> world;
        for (int node = 1; node <= nodes; ++node) {
            world.push_back(static_cast<rdzv::AgentId>(node));
            feed(succession_event::Joined{world.back(), node == 1});
        }
        feed(succession_event::GenerationBegan{world});
        feed(succession_event::StandbyListens{2, {"node1", {}, 4000}});
    }
    SuccessionActions feed(const SuccessionEvent& event) { return step(state, event, job, kDawn); }
    /// False: the job ends.
    bool goes_on_without(rdzv::AgentId agent, bool is_silent) {
        using Lost = succession_event::Lost;
        return feed(Lost{agent, "", is_silent ? Lost::Silent : Lost::Closed}).overrule.empty();
    }
    SuccessionState state;
    JobState job;
};

/// The standby of a job with this number of agents, whose head is lost. It has joined itself, and its workers
/// have ended.
struct Standby {
    explicit Standby(int agents, bool head_is_dead, int running = 0) {
        state.own_host = "standby";
        state.arrival_timeout = 8s;
        state.head_notices = 1s;
        rdzv::JobSnapshot snapshot;
        snapshot.generation = 4;
        snapshot.agents = agents;
        snapshot.running = running;
        feed(follower_event::Appointed{snapshot, 4000});
        feed(rdzv::Successor{"standby", {}, 4000});
        feed(follower_event::LinkLost{{"head", 1}, {Errc::Closed, "gone", 0}, true, head_is_dead});
        feed(follower_event::WorkersEnded{});
    }
    FollowerActions feed(const FollowerEvent& event) { return step(state, event, now); }
    FollowerActions come(rdzv::AgentId agent, std::uint64_t kept_generation = 4) {
        rdzv::AgentHello hello;
        hello.host = "node" + std::to_string(agent);
        hello.kept_generation = kept_generation;
        return feed(follower_event::AgentCame{agent, hello});
    }
    FollowerActions wait(Duration span) {
        now += span;
        return feed(follower_event::TimerFired{});
    }
    FollowerState state;
    TimePoint now = kDawn;
};
TEST(Succession, TheStandbyIsKnownByItsHostAndNotByItsPortNumberAlone) {
    FollowerState state;
    state.own_host = "node5";
    step(state, follower_event::Appointed{{}, 4000}, kDawn);
    step(state, rdzv::Successor{"node2", {"10.0.0.2"}, 4000}, kDawn);
    EXPECT_FALSE(state.is_standby());
    step(state, follower_event::LinkLost{{"head", 1}, {Errc::Closed, "gone", 0}, true, true}, kDawn);
    const FollowerActions actions = step(state, follower_event::WorkersEnded{}, kDawn);
    EXPECT_THAT(actions.join, ElementsAre(Endpoint{"10.0.0.2", 4000}));
}

TEST(Succession, TheHeadsOwnNodeObeysNoShutdownAndLeavesWhenItsLinkEnds) {
    for (const bool is_head : {true, false}) {
        FollowerState state;
        state.is_head = is_head;
        state.has_restarts = true;
        step(state, rdzv::Successor{"node2", {}, 4000}, kDawn);
        EXPECT_NE(step(state, rdzv::Shutdown{0, ""}, kDawn).end.has_value(), is_head);
        const follower_event::LinkLost lost{{"head", 1}, {Errc::Timeout, "silent", 0}, true, false};
        const FollowerActions actions = step(state, lost, kDawn);
        EXPECT_EQ(actions.leave, is_head);
        EXPECT_EQ(actions.stop_workers.empty(), is_head);
    }
}

TEST(Succession, TheStandbyIsTheFirstConnectedNodeAfterTheHeads) {
    HeadOf head(3);
    EXPECT_EQ(head.state.standby, 2U);
    head.goes_on_without(2, false);
    EXPECT_EQ(head.state.standby, 3U);
    head.goes_on_without(3, false);
    EXPECT_EQ(head.state.standby, 0U);
    HeadOf stopping(3);
    stopping.job.phase = JobState::Phase::Stopping;
    stopping.goes_on_without(2, false);
    EXPECT_EQ(stopping.state.successor.host, "")
        << "it may join again, and must not be told to wait for itself";
}

TEST(Succession, TheJobContinuesWhenAllRemainingNodesHaveCome) {
    Standby standby(3, false);
    EXPECT_FALSE(standby.come(1).take_over);
    standby.wait(2s);
    EXPECT_FALSE(standby.come(2).take_over);
    EXPECT_TRUE(standby.wait(1s).take_over);
    EXPECT_TRUE(Standby(2, true).come(1).take_over) << "the head's process has ended: there is nobody else";
}

TEST(Succession, NodesThatStillStopWorkersAreAwaitedAlsoAfterANewSpareJoined) {
    Standby standby(3, true, 2);
    standby.come(1);
    EXPECT_FALSE(standby.come(9, 0).take_over) << "a spare";
    EXPECT_TRUE(Standby(standby).wait(8s).take_over) << "the other may be lost as well";
    EXPECT_TRUE(standby.come(2).take_over);
}

TEST(Succession, NodesThatMayBeCutOffFromALivingHeadNeedMoreThanHalf) {
    EXPECT_NE(Standby(2, false).come(1).give_up, "");
    for (const bool head_is_dead : {false, true}) {
        Standby standby(4, head_is_dead);
        standby.come(1);
        EXPECT_EQ(standby.come(2).give_up, "");
        EXPECT_EQ(standby.wait(8s).take_over.has_value(), head_is_dead);
    }
}

TEST(Succession, NoNodeTakesOverWhileTheHeadMayNotHaveNoticedTheLoss) {
    Standby standby(3, false);
    standby.come(1);
    EXPECT_FALSE(standby.come(2).take_over) << "its workers still run: two would write one checkpoint";
    EXPECT_TRUE(standby.wait(1s).take_over);
}

TEST(Succession, AHeadThatMayLiveNoticesTheLossOfEachNodeFromItsOwnTimeOn) {
    Standby standby(4, false);
    standby.come(1);
    standby.wait(1500ms);
    standby.come(2);
    EXPECT_FALSE(standby.come(3).take_over) << "the head may have begun a generation with these two";
    EXPECT_FALSE(standby.wait(900ms).take_over);
    EXPECT_TRUE(standby.wait(100ms).take_over);
}

TEST(Succession, AtMostOnePartOfASplitNetworkContinues) {
    for (int agents = 2; agents <= 9; ++agents) {
        for (int with_head = 1; with_head < agents; ++with_head) {
            HeadOf head(agents);
            Standby standby(agents, false);
            bool head_goes_on = true;
            for (int one = with_head + 1; one <= agents; ++one) {
                head_goes_on = head.goes_on_without(static_cast<rdzv::AgentId>(one), true) && head_goes_on;
                standby.come(static_cast<rdzv::AgentId>(one));
            }
            EXPECT_NE(head_goes_on, standby.wait(8s).take_over.has_value())
                << with_head << " of " << agents << " on the head's side";
        }
    }
}

TEST(Succession, NodesWhoseEndTheHeadSawDoNotCount) {
    HeadOf alone(4), silent(4);
    for (const rdzv::AgentId agent : {4U, 3U}) EXPECT_TRUE(alone.goes_on_without(agent, false));
    EXPECT_TRUE(alone.goes_on_without(2, false)) << "their processes have ended: it is alone";
    for (const rdzv::AgentId agent : {4U, 3U}) EXPECT_TRUE(silent.goes_on_without(agent, true));
    EXPECT_FALSE(silent.goes_on_without(2, true));
}

TEST(Succession, AReplacementOfADeadNodeCounts) {
    HeadOf head(3);
    EXPECT_TRUE(head.goes_on_without(3, false));
    head.feed(succession_event::Joined{4, false});
    EXPECT_TRUE(head.goes_on_without(4, true));
    EXPECT_FALSE(head.goes_on_without(2, true)) << "two of three may go on without this head";
}

TEST(Succession, TheEndDoesNotWaitForALostStandby) {
    HeadOf head(2);
    EXPECT_FALSE(head.feed(succession_event::JobEnds{}).tell_end);
    EXPECT_TRUE(head.feed(succession_event::Lost{2, "", succession_event::Lost::Silent}).tell_end);
}

TEST(Succession, ARestartedHeadJoinsItsSuccessorOrEnds) {
    const auto meet = [](std::uint64_t generation, bool is_successor, bool can_join) {
        SuccessionState state;
        state.is_successor = is_successor;
        JobState job;
        job.generation = generation;
        const SuccessionActions actions =
            step(state, succession_event::SuccessorMet{{"node1", {}, 4000}, can_join}, job, kDawn);
        return std::pair(!actions.hand_over.empty(), !actions.overrule.empty());
    };
    EXPECT_EQ(meet(0, false, true), std::pair(true, false));
    EXPECT_EQ(meet(0, false, false), std::pair(false, true)) << "it cannot join";
    EXPECT_EQ(meet(1, false, true), std::pair(false, true))
        << "the job runs twice: the one that was there first goes on";
    EXPECT_EQ(meet(5, true, true), std::pair(false, false));
}

TEST(Succession, AReplacedStandbyDoesNotTakeOver) {
    Standby standby(3, true);
    standby.state.successor.port = 4001;
    standby.come(1);
    EXPECT_FALSE(standby.come(2).take_over);
}

TEST(Succession, TheBudgetOfRestartsIsInherited) {
    JobState state;
    state.generation = 4;
    state.restarts_used = 3;
    state.history = {{kDawn - 50s, kDawn - 20s}, 2, 812};
    state.generation_started = kDawn - 20s;
    state.recovery.recoveries = 8;
    state.recovery.longest_start = 41s;
    const JobState heirs = inherited(snapshot_of(state, kDawn), kDawn + 7s);
    EXPECT_EQ(heirs.generation, 5U) << "that may have begun, and been heard of by others";
    EXPECT_EQ(heirs.restarts_used, 3);
    EXPECT_EQ(heirs.history.without_progress, 2);
    EXPECT_EQ(heirs.history.furthest_step, 812) << "by which another run knows whether this one got anywhere";
    EXPECT_THAT(heirs.history.restarts, ElementsAre(kDawn - 43s, kDawn - 13s))
        << "their ages are what travels";
    EXPECT_EQ(heirs.recovery.recoveries, 8);
    EXPECT_EQ(heirs.recovery.longest_start, 41s);
}

TEST(Succession, ABudgetOfVeryManyRestartsFitsIntoAMessage) {
    JobState state;
    state.restarts_used = 200'000;
    for (int i = 0; i < state.restarts_used; ++i) state.history.restarts.push_back(kDawn - 1h + i * 1ms);
    const rdzv::JobSnapshot snapshot = snapshot_of(state, kDawn);
    EXPECT_TRUE(rdzv::encode_message(snapshot));
    const JobState heirs = inherited(snapshot, kDawn);
    EXPECT_EQ(heirs.history.restarts.size(), 200'000U);
    EXPECT_EQ(heirs.history.restarts.back(), state.history.restarts.back());
}

TEST(Succession, ASuccessorAdoptsTheNodesWhoseWorkersWait) {
    rdzv::JobSnapshot snapshot;
    snapshot.ranks = 7;
    JobState job = inherited(snapshot, kDawn);
    EXPECT_EQ(adopt(job, {{0, 2}, {4, 3}}), 1U) << "the lost head had ranks 2 and 3";
    ASSERT_EQ(job.nodes.size(), 3U);
    EXPECT_EQ(job.nodes[0].workers, 2);
    EXPECT_EQ(job.nodes[1].workers, 2) << "all other ranks are lost";
    EXPECT_EQ(job.nodes[2].workers, 3);
    EXPECT_EQ(job.ranks(), 7);
    EXPECT_EQ(job.nodes_there, 3);
}

TEST(Succession, ALostHeadMayHaveHadTheLastRanks) {
    rdzv::JobSnapshot snapshot;
    snapshot.ranks = 6;
    JobState job = inherited(snapshot, kDawn);
    EXPECT_EQ(adopt(job, {{0, 2}, {2, 2}}), 2U) << "whatever gaps there were between the places";
}

TEST(Succession, ASuccessorKeepsWhatTheHeadToldAnyAgent) {
    JobState heirs = inherited({}, kDawn);
    catch_up(heirs, 7, 2, kDawn);
    catch_up(heirs, 5, 1, kDawn);
    EXPECT_EQ(heirs.generation, 8U);
    EXPECT_EQ(heirs.restarts_used, 2);
    EXPECT_EQ(heirs.history.restarts.size(), 2U) << "they are what the budget is counted by";
}

TEST(Succession, ANodeKeepsTheNewestPlaceThatItHad) {
    Standby standby(3, true);
    standby.come(1, 1);
    EXPECT_EQ(standby.come(2, 4).joined.front().second.host, "node2") << "of the last world";
}

TEST(Succession, AJobThatMayNotBeRestartedEndsWithItsHead) {
    JobState heirs = inherited({}, kDawn);
    const JobSpec spec;
    const std::vector<JobAction> actions =
        step(heirs, job_event::NodeLost{0, "the head is lost"}, JobPolicy{spec}, kDawn);
    EXPECT_EQ(heirs.phase, JobState::Phase::Finished);
    EXPECT_EQ(heirs.end.failure, "the head is lost");
    EXPECT_TRUE(std::holds_alternative<job_action::Finish>(actions.back()));
}

/// The state of a node after it lost its head for this reason, with or without a successor of the head.
std::string lose(Errc code, bool is_succeeded, bool has_restarts = true) {
    FollowerState state;
    state.has_restarts = has_restarts;
    if (is_succeeded) step(state, rdzv::Successor{"node1", {}, 4000}, kDawn);
    const FollowerActions actions =
        step(state, follower_event::LinkLost{{"head", 1}, {code, "gone", 0}, true, false}, kDawn);
    return actions.leave ? "leaves" : actions.renew ? "returns" : "stops its workers";
}

TEST(LostHead, IsSucceededOrReturnsOrEndsTheNode) {
    EXPECT_EQ(lose(Errc::Closed, true), "stops its workers");
    EXPECT_EQ(lose(Errc::Timeout, true), "stops its workers");
    EXPECT_EQ(lose(Errc::Closed, false), "leaves");
    EXPECT_EQ(lose(Errc::Timeout, false), "returns") << "the head may have been stopped";
    EXPECT_EQ(lose(Errc::Timeout, false, false), "leaves") << "the head ends the job";
    EXPECT_EQ(lose(Errc::StaleGeneration, true, false), "returns") << "the head lives";
    EXPECT_EQ(lose(Errc::Refused, true), "leaves");
}

}  // namespace
}  // namespace ddprun
