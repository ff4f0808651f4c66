#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "launcher/supervise/job_state.h"

namespace ddprun {
namespace {

using Phase = JobState::Phase;
using namespace std::chrono_literals;
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

JobPolicy with_restarts(int restarts) {
    JobPolicy policy;
    policy.restart.max_restarts = restarts;
    return policy;
}

struct Job {
    JobPolicy policy;
    JobState state;
    TimePoint now = kStart;

    explicit Job(JobPolicy p = {}, std::vector<int> workers = {4}) : policy(std::move(p)) {
        tell(job_event::WorldFormed{std::move(workers)});
    }
    std::vector<JobAction> tell(const JobEvent& event) { return step(state, event, policy, now); }
    std::vector<JobAction> fails(int rank, FailureFacts facts = {false, true, SIGKILL, true}) {
        return tell(job_event::WorkerEnded{0, rank, facts, true, false, "rank 2 on node00, signal 9 (SIGKILL)"});
    }
    std::vector<JobAction> succeeds(int node = 0) {
        return tell(job_event::WorkerEnded{node, 0, {}, false, false, ""});
    }
};

TEST(JobStep, StartsTheFirstGenerationWhenTheWorldIsFormed) {
    JobState state;
    const auto actions = step(state, job_event::WorldFormed{{4, 4}}, {}, kStart);
    ASSERT_EQ(all_of<job_action::StartGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].generation, 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].restart_count, 0);
}

TEST(JobStep, FinishesOnlyWhenEveryWorkerSucceededAndItsNodeDrained) {
    Job job({}, {2});
    EXPECT_TRUE(job.succeeds().empty());
    EXPECT_TRUE(job.succeeds().empty());
    EXPECT_EQ(job.state.phase, Phase::Succeeded);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeDrained{0})).size(), 1u);
}

TEST(JobStep, AnEarlyExitZeroIsNoEvent) {
    Job job;
    EXPECT_TRUE(job.succeeds().empty());
    EXPECT_EQ(job.state.phase, Phase::Running);
}

TEST(JobStep, TheFirstFailureStopsTheGangAndOnlyTheFirst) {
    Job job;
    const auto first = job.fails(2);
    ASSERT_EQ(all_of<job_action::StopGeneration>(first).size(), 1u);
    EXPECT_EQ(all_of<job_action::StopGeneration>(first)[0].failed_rank, 2);
    EXPECT_EQ(all_of<job_action::StopGeneration>(first)[0].grace, job.policy.failure_grace);
    EXPECT_TRUE(job.fails(3).empty());
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeDrained{0})).size(), 1u);
}

TEST(JobStep, SaysTheRootCauseAndWhatFollows) {
    Job job(with_restarts(3));
    const auto said = all_of<job_action::Say>(job.fails(2));
    ASSERT_EQ(said.size(), 1u);
    EXPECT_EQ(said[0].text, "root cause: rank 2 on node00, signal 9 (SIGKILL); restart 1 of 3 restarts");
}

TEST(JobStep, RestartsWithANewGenerationAfterTheOldOneHasDrained) {
    Job job(with_restarts(1));
    EXPECT_TRUE(all_of<job_action::StartGeneration>(job.fails(0)).empty());
    const auto actions = job.tell(job_event::NodeDrained{0});
    ASSERT_EQ(all_of<job_action::StartGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].generation, 2u);
    EXPECT_EQ(all_of<job_action::StartGeneration>(actions)[0].restart_count, 1);

    job.fails(0);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeDrained{0})).size(), 1u);
}

TEST(JobStep, BacksOffBeforeTheSecondRestart) {
    JobPolicy policy = with_restarts(5);
    policy.restart.backoff = 2s;
    policy.random = 1.0;
    Job job(policy);
    job.fails(0);
    job.tell(job_event::NodeDrained{0});
    EXPECT_EQ(all_of<job_action::SetTimer>(job.fails(0)).at(0).when, kStart + 2s);
    EXPECT_TRUE(all_of<job_action::StartGeneration>(job.tell(job_event::NodeDrained{0})).empty());
    EXPECT_EQ(job.state.phase, Phase::BackingOff);
    job.now += 2s;
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::TimerFired{})).size(), 1u);
}

TEST(JobStep, AProgramThatCannotRunIsNeverRestarted) {
    Job job(with_restarts(3));
    const auto actions = job.fails(0, {true, false, 127, true});
    EXPECT_THAT(all_of<job_action::Say>(actions).at(0).text, HasSubstr("could not be started"));
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeDrained{0})).size(), 1u);
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

TEST(JobStep, TheSameSignalAtEveryNodeIsOneStopAndTakesNoGraceAway) {
    Job job({}, {2, 2, 2});
    EXPECT_EQ(all_of<job_action::StopGeneration>(job.tell(job_event::StopAsked{SIGTERM, 2})).size(), 1u);
    for (const std::uint64_t other : {0, 1}) EXPECT_TRUE(job.tell(job_event::StopAsked{SIGTERM, other}).empty());
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGTERM, 1})).size(), 1u) << "the second time there";
}

TEST(JobStep, ASchedulersSigtermThatComesByTwoWaysIsOneStop) {
    JobPolicy policy;
    policy.one_stop = 5s;
    Job job(policy);
    job.tell(job_event::StopAsked{SIGTERM, 0});
    job.now += 30ms;
    EXPECT_TRUE(job.tell(job_event::StopAsked{SIGTERM, 0}).empty()) << "from PBS itself, and from its pbsdsh";
    job.now += 10s;
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGTERM, 0})).size(), 1u) << "asked for again";
}

TEST(JobStep, CtrlCTwiceInABatchJobIsNotTakenForOne) {
    JobPolicy policy;
    policy.one_stop = 5s;
    Job job(policy);
    job.tell(job_event::StopAsked{SIGINT, 0});
    EXPECT_EQ(all_of<job_action::KillGeneration>(job.tell(job_event::StopAsked{SIGINT, 0})).size(), 1u);
}

TEST(JobStep, OurNoticeAndTheSchedulersSigtermAreOneStop) {
    JobPolicy policy;
    policy.one_stop = 5s;
    Job job(policy);
    EXPECT_EQ(all_of<job_action::StopGeneration>(job.tell(job_event::PreemptAsked{SIGTERM, "walltime in 60 s"})).size(), 1u);
    for (int way = 0; way < 2; ++way) {
        const auto actions = job.tell(job_event::StopAsked{SIGTERM, 0});
        EXPECT_TRUE(all_of<job_action::StopGeneration>(actions).empty()) << "their grace runs on";
        EXPECT_TRUE(all_of<job_action::KillGeneration>(actions).empty());
    }
}

TEST(JobStep, NoRestartIsBegunThatTheWalltimeWouldEndBeforeItGetsAnywhere) {
    Job job(with_restarts(3));
    job.tell(job_event::WalltimeKnown{kStart + 10min});
    job.now += 9min + 20s;
    const auto actions = job.fails(2);
    EXPECT_THAT(all_of<job_action::Say>(actions).at(0).text, HasSubstr("no restart: it would get nowhere in the 40 s that the walltime leaves"));
    EXPECT_TRUE(job.state.out_of_time);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeDrained{0})).size(), 1u);
}

TEST(JobStep, ARestartLongBeforeTheWalltimesEndIsAsAnyOther) {
    Job job(with_restarts(3));
    job.tell(job_event::WalltimeKnown{kStart + 10min});
    job.now += 8min;
    job.fails(2);
    EXPECT_FALSE(job.state.out_of_time);
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::NodeDrained{0})).size(), 1u);
}

TEST(JobStep, TheSameSignalAtEveryNodeWhileAFailureStopsThemTakesNoGraceAway) {
    Job job(with_restarts(1), {2, 2});
    job.fails(0);
    EXPECT_EQ(all_of<job_action::Say>(job.tell(job_event::StopAsked{SIGTERM, 1})).size(), 1u);
    EXPECT_TRUE(job.tell(job_event::StopAsked{SIGTERM, 0}).empty());
    EXPECT_FALSE(job.state.killing);
}

TEST(JobStep, ASignalWhileWaitingForNodesEndsTheJobAtOnce) {
    JobState state;
    const auto actions = step(state, job_event::StopAsked{SIGINT, 0}, {}, kStart);
    EXPECT_EQ(all_of<job_action::Finish>(actions).size(), 1u);
}

TEST(JobStep, ASignalDuringARestartCancelsTheRestart) {
    Job job(with_restarts(3));
    job.fails(1);
    job.tell(job_event::StopAsked{SIGTERM, 0});
    const auto actions = job.tell(job_event::NodeDrained{0});
    EXPECT_TRUE(all_of<job_action::StartGeneration>(actions).empty());
    EXPECT_EQ(all_of<job_action::Finish>(actions).size(), 1u);
}

TEST(JobStep, APreemptionNotifiesBeforeItStops) {
    Job job;
    const auto actions = job.tell(job_event::PreemptAsked{SIGTERM, "walltime in 60 s"});
    ASSERT_EQ(actions.size(), 3u);
    EXPECT_TRUE(std::holds_alternative<job_action::NotifyPreempt>(actions[1]));
    EXPECT_TRUE(std::holds_alternative<job_action::StopGeneration>(actions[2]));
    EXPECT_TRUE(job.state.preempted);
}

TEST(JobStep, AnEndBeforeAnyWorkerRunsSaysWhy) {
    const JobEvent ends[] = {job_event::PreemptAsked{SIGTERM, "walltime in 60 s"}, job_event::StopAsked{SIGTERM, 0}};
    const char* const said[] = {"walltime in 60 s: stopping before any worker runs", "SIGTERM: stopping before any worker runs"};
    for (std::size_t i = 0; i < 2; ++i) {
        JobState joining;
        const auto actions = step(joining, ends[i], {}, TimePoint{});
        EXPECT_EQ(all_of<job_action::Say>(actions).at(0).text, said[i]);
        EXPECT_EQ(all_of<job_action::Finish>(actions).size(), 1u);
    }
}

TEST(JobStep, ALostNodeStopsTheOthersAndWaitsForASpare) {
    Job job(with_restarts(1), {2, 2});
    const auto actions = job.tell(job_event::NodeLost{1, "node01: connection lost"});
    EXPECT_EQ(all_of<job_action::StopGeneration>(actions).size(), 1u);
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::NodeDrained{0})).size(), 1u);
    EXPECT_EQ(job.state.phase, Phase::Joining);
    EXPECT_EQ(all_of<job_action::StartGeneration>(job.tell(job_event::WorldFormed{{2, 2}})).at(0).generation, 2u);
}

TEST(JobStep, ANodeThatIsLostAfterItsWorkersSucceededIsNoFailure) {
    Job job({}, {1, 1});
    job.succeeds(1);
    job.tell(job_event::NodeDrained{1});
    EXPECT_TRUE(all_of<job_action::StopGeneration>(job.tell(job_event::NodeLost{1, "gone"})).empty());
    EXPECT_EQ(job.state.phase, Phase::Running);
    job.succeeds(0);
    EXPECT_EQ(all_of<job_action::Finish>(job.tell(job_event::NodeDrained{0})).size(), 1u) << "and the job ends with the others";
}

JobPolicy with_backoff(Duration backoff) {
    JobPolicy policy = with_restarts(5);
    policy.restart.backoff = backoff;
    policy.random = 1.0;
    return policy;
}

TEST(JobStep, BacksOffAlsoBeforeItWaitsForANodeThatWasLost) {
    Job job(with_backoff(2s), {2, 2});
    job.fails(0);  // the first restart is at once
    for (int node : {0, 1}) job.tell(job_event::NodeDrained{node});
    job.tell(job_event::NodeLost{1, "gone"});
    EXPECT_TRUE(all_of<job_action::Rejoin>(job.tell(job_event::NodeDrained{0})).empty());
    EXPECT_EQ(job.state.phase, Phase::BackingOff);
    job.now += 2s;
    EXPECT_EQ(all_of<job_action::Rejoin>(job.tell(job_event::TimerFired{})).size(), 1u);
    EXPECT_EQ(job.state.phase, Phase::Joining);
}

TEST(JobStep, ANodeLostDuringTheBackOffDoesNotEndIt) {
    Job job(with_backoff(2s), {2, 2});
    for (int round : {1, 2}) {
        job.fails(0);
        for (int node : {0, 1}) job.tell(job_event::NodeDrained{node});
        EXPECT_EQ(job.state.phase, round == 1 ? Phase::Running : Phase::BackingOff);
    }
    ASSERT_EQ(job.state.phase, Phase::BackingOff);
    EXPECT_TRUE(all_of<job_action::Rejoin>(job.tell(job_event::NodeLost{1, "gone"})).empty());
    job.now += 2s;
    const auto actions = job.tell(job_event::TimerFired{});
    EXPECT_EQ(all_of<job_action::Rejoin>(actions).size(), 1u);
    EXPECT_TRUE(all_of<job_action::StartGeneration>(actions).empty()) << "not without the node";
}

TEST(RestartPolicy, ABudgetWithAWindowForgetsOldRestarts) {
    RestartSpec spec;
    spec.max_restarts = 2;
    spec.window = 1h;
    const RestartHistory recent{{kStart, kStart + 10min}, 0};
    EXPECT_FALSE(decide_restart(spec, recent, {}, kStart + 20min, 0).restart);
    EXPECT_TRUE(decide_restart(spec, recent, {}, kStart + 61min, 0).restart);
}

TEST(RestartPolicy, ExitCodesThatCannotGetBetterAreFinal) {
    for (const int code : {64, 65, 66, 78, 93, 126, 127}) {
        EXPECT_FALSE(permanent_failure({false, false, code, true}).empty()) << code;
    }
    for (const int code : {1, 2, 3, 137}) EXPECT_TRUE(permanent_failure({false, false, code, true}).empty()) << code;
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

TEST(RestartPolicy, AFailureThatIsFinalAnywayIsNotForLackOfTime) {
    RestartSpec spec;
    spec.max_restarts = 1;
    EXPECT_FALSE(decide_restart(spec, {}, {false, false, 64, true}, kStart, 0, kStart).out_of_time);
    EXPECT_FALSE(decide_restart({}, {}, {}, kStart, 0, kStart).out_of_time) << "none was asked for";
    EXPECT_TRUE(decide_restart(spec, {}, {}, kStart, 0, kStart).out_of_time);
}

TEST(RestartPolicy, BackOffDoublesIsSpreadAndIsCapped) {
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

}  // namespace
}  // namespace ddprun
