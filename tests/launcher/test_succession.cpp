#include "launcher/supervise/succession.h"

#include <gtest/gtest.h>

namespace ddprun {
namespace {

using namespace std::chrono_literals;

TEST(Succession, TheStandbyIsTheFirstNodeThatIsThereAndNotTheHeads) {
    EXPECT_EQ(choose_standby({{true, true}, {false, false}, {true, false}, {true, false}}), 2);
    EXPECT_EQ(choose_standby({{true, true}}), -1);
}

TEST(Succession, TheJobGoesOnAsSoonAsAllWhoAreLeftAreThere) {
    EXPECT_EQ(judge_succession({3, false, false, 1}, false), Succession::Wait);
    EXPECT_EQ(judge_succession({3, false, false, 2}, false), Succession::TakeOver);
    EXPECT_EQ(judge_succession({2, true, false, 1}, false), Succession::TakeOver)
        << "the head's process has ended: there is nobody else";
}

TEST(Succession, WhoStillStopsWorkersIsWaitedForWhenASpareThatNobodyKnewHasCome) {
    EXPECT_EQ(judge_succession({5, false, false, 4, 1}, false), Succession::Wait);
    EXPECT_EQ(judge_succession({5, false, false, 5, 0}, false), Succession::TakeOver);
    EXPECT_EQ(judge_succession({5, false, false, 4, 1}, true), Succession::TakeOver)
        << "it may be lost as well";
}

TEST(Succession, WhoMayBeCutOffFromALivingHeadNeedsMoreThanHalf) {
    EXPECT_EQ(judge_succession({2, false, false, 1}, false), Succession::GiveUp);
    EXPECT_EQ(judge_succession({4, false, false, 2}, false), Succession::Wait);
    EXPECT_EQ(judge_succession({4, false, false, 2}, true), Succession::GiveUp);
    EXPECT_EQ(judge_succession({4, true, false, 2}, true), Succession::TakeOver);
}

TEST(Succession, NobodyTakesOverWhileALostHeadMayNotHaveNoticedItYet) {
    EXPECT_EQ(judge_succession({3, false, true, 2}, false), Succession::Wait)
        << "its workers still run: two would write one checkpoint";
    EXPECT_EQ(judge_succession({3, false, false, 2}, false), Succession::TakeOver);
    EXPECT_EQ(judge_succession({2, false, true, 1}, false), Succession::GiveUp);
}

TEST(Succession, OfANetworkInTwoPartsOneAtMostGoesOn) {
    for (int agents = 2; agents <= 9; ++agents) {
        for (int with_head = 1; with_head < agents; ++with_head) {
            const bool head_goes_on = head_keeps_job(agents, with_head, 0);
            const bool others_go_on =
                judge_succession({agents, false, false, agents - with_head}, true) == Succession::TakeOver;
            EXPECT_FALSE(head_goes_on && others_go_on)
                << with_head << " of " << agents << " on the head's side";
            EXPECT_TRUE(head_goes_on || others_go_on)
                << with_head << " of " << agents << " on the head's side";
        }
    }
}

TEST(Succession, NodesThatDiedBeforeTheHeadsEyesDoNotOutvoteIt) {
    EXPECT_FALSE(head_keeps_job(4, 1, 0));
    EXPECT_TRUE(head_keeps_job(4, 1, 3)) << "their processes have ended: it is alone";
}

TEST(Succession, AHeadThatWasStartedAgainJoinsItsSuccessorOrEnds) {
    EXPECT_EQ(meet_successor({0, false, true}), Encounter::Join);
    EXPECT_EQ(meet_successor({0, false, false}), Encounter::Stop) << "it cannot";
    EXPECT_EQ(meet_successor({1, false, true}), Encounter::Stop)
        << "the job runs twice: the one that was there first goes on";
    EXPECT_EQ(meet_successor({5, true, true}), Encounter::Ignore);
}

TEST(Succession, TheBudgetOfRestartsIsInherited) {
    const TimePoint now = MonotonicClock::now();
    JobState state;
    state.generation = 4;
    state.restarts_used = 3;
    state.history = {{now - 50s, now - 20s}, 2, 812};
    state.generation_started = now - 20s;
    const JobState heirs = inherited(legacy_of(state, 5, now), now + 7s);
    EXPECT_EQ(heirs.generation, 5U) << "that may have begun, and been heard of by others";
    EXPECT_EQ(heirs.restarts_used, 3);
    EXPECT_EQ(heirs.history.without_progress, 2);
    EXPECT_EQ(heirs.history.furthest_step, 812) << "by which another run knows whether this one got anywhere";
    EXPECT_EQ(heirs.history.restarts, (std::vector<TimePoint>{now - 43s, now - 13s}))
        << "their ages are what travels";
}

TEST(Succession, WhatOneOfItsAgentsWasToldStaysTrueThoughTheStandbyHadNotHeardOfIt) {
    const TimePoint now = MonotonicClock::now();
    JobState heirs = inherited({}, now);
    take_word(heirs, 7, 2, now);
    take_word(heirs, 5, 1, now);
    EXPECT_EQ(heirs.generation, 8U);
    EXPECT_EQ(heirs.restarts_used, 2);
    EXPECT_EQ(heirs.history.restarts.size(), 2U) << "they are what the budget is counted by";
}

TEST(Succession, APlaceIsWhoseItWasLast) {
    rdzv::AgentHello early, late;
    early.host = "lost long ago";
    early.kept_generation = 1;
    late.host = "of the last world";
    late.kept_generation = 4;
    EXPECT_EQ(newest_first({{1, early}, {2, late}}).front().second.host, "of the last world");
}

TEST(Succession, AJobThatMayNotBeRestartedEndsWithItsHead) {
    const TimePoint now = MonotonicClock::now();
    JobState heirs = inherited({}, now);
    const std::vector<JobAction> actions = step(heirs, job_event::NodeLost{0, "the head is lost"}, {}, now);
    EXPECT_EQ(heirs.phase, JobState::Phase::Finished);
    EXPECT_EQ(heirs.failure, "the head is lost");
    EXPECT_TRUE(std::holds_alternative<job_action::Finish>(actions.back()));
}

}  // namespace
}  // namespace ddprun
