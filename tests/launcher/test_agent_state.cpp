#include <gtest/gtest.h>
#include <signal.h>

#include "launcher/node/agent_state.h"

namespace ddprun {
namespace {

using Phase = AgentState::Phase;
using namespace std::chrono_literals;

const TimePoint kStart{1h};

template <class T>
std::vector<T> all_of(const std::vector<AgentAction>& actions) {
    std::vector<T> found;
    for (const AgentAction& action : actions) {
        if (const T* one = std::get_if<T>(&action)) found.push_back(*one);
    }
    return found;
}

/// A node whose workers have pids 101, 102, ...
AgentState running(int workers) {
    AgentState state;
    step(state, agent_event::StartRequested{7, workers}, kStart);
    for (int i = 0; i < workers; ++i) step(state, agent_event::Spawned{i, 101 + i}, kStart);
    return state;
}

os::ChildExit exited(pid_t pid, int code) { return {pid, false, code, false}; }

TEST(WorkerStep, SendsTermOnceHoweverOftenStopIsRequested) {
    const WorkerStep first = step(WorkerState::Running, WorkerEvent::StopRequested);
    EXPECT_EQ(first, (WorkerStep{WorkerState::Stopping, WorkerAction::SendStop}));
    const WorkerStep second = step(first.next, WorkerEvent::StopRequested);
    EXPECT_EQ(second, (WorkerStep{WorkerState::Stopping, WorkerAction::None}));
}

TEST(WorkerStep, NeverStopsAfterAKill) {
    const WorkerStep killed = step(WorkerState::Running, WorkerEvent::KillRequested);
    EXPECT_EQ(killed.next, WorkerState::Killed);
    EXPECT_EQ(step(killed.next, WorkerEvent::StopRequested).action, WorkerAction::None);
}

TEST(WorkerStep, IgnoresEventsAfterTheEnd) {
    for (const WorkerEvent event :
         {WorkerEvent::StopRequested, WorkerEvent::KillRequested, WorkerEvent::Exited}) {
        EXPECT_EQ(step(WorkerState::Ended, event), (WorkerStep{WorkerState::Ended, WorkerAction::None}));
    }
}

TEST(AgentStep, SpawnsOneAfterTheOtherAndReportsOnce) {
    AgentState state;
    auto actions = step(state, agent_event::StartRequested{1, 2}, kStart);
    ASSERT_EQ(all_of<agent_action::SpawnNext>(actions).size(), 1u);
    actions = step(state, agent_event::Spawned{0, 101}, kStart);
    ASSERT_EQ(all_of<agent_action::SpawnNext>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(actions)[0].local_rank, 1);
    EXPECT_TRUE(all_of<agent_action::ReportStarted>(actions).empty());
    actions = step(state, agent_event::Spawned{1, 102}, kStart);
    EXPECT_EQ(all_of<agent_action::ReportStarted>(actions).size(), 1u);
    EXPECT_EQ(state.phase, Phase::Running);
}

TEST(AgentStep, KillsTheGroupBeforeItReportsTheExit) {
    AgentState state = running(2);
    const auto actions = step(state, agent_event::Exited{exited(102, 3)}, kStart);
    ASSERT_EQ(actions.size(), 2u);
    EXPECT_EQ(std::get<agent_action::BuryGroup>(actions[0]).pid, 102);
    const auto& report = std::get<agent_action::ReportExit>(actions[1]);
    EXPECT_EQ(report.local_rank, 1);
    EXPECT_EQ(report.exit.status, 3);
    EXPECT_FALSE(report.by_us);
}

TEST(AgentStep, AnExitAfterAStopCountsAsStoppedByDdprun) {
    AgentState state = running(1);
    step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    const auto actions = step(state, agent_event::Exited{{101, true, SIGTERM, false}}, kStart);
    EXPECT_TRUE(all_of<agent_action::ReportExit>(actions).at(0).by_us);
}

TEST(AgentStep, ContinuesStoppedWorkersSoThatTheyGetTheSignal) {
    AgentState state = running(1);
    const auto signals =
        all_of<agent_action::SignalWorker>(step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart));
    ASSERT_EQ(signals.size(), 2u);
    EXPECT_EQ(signals[0].signal, SIGTERM);
    EXPECT_EQ(signals[1].signal, SIGCONT);
}

TEST(AgentStep, KillsWhenTheGraceIsOverAndNotBefore) {
    AgentState state = running(3);
    step(state, agent_event::Exited{exited(101, 0)}, kStart);
    step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    EXPECT_TRUE(step(state, agent_event::DeadlinePassed{}, kStart + 29s).empty());
    const auto killed =
        all_of<agent_action::SignalWorker>(step(state, agent_event::DeadlinePassed{}, kStart + 30s));
    ASSERT_EQ(killed.size(), 2u);  // without the one that has ended
    EXPECT_EQ(killed[0].pid, 102);
    EXPECT_TRUE(killed[0].alone);
    EXPECT_EQ(state.phase, Phase::Killing);
}

std::vector<int> sweep_signals(const std::vector<AgentAction>& actions) {
    std::vector<int> signals;
    for (const auto& sweep : all_of<agent_action::Sweep>(actions)) signals.push_back(sweep.signal);
    return signals;
}

TEST(AgentStep, SendsTermToTheChildrenOfAnEndedWorkerBeforeItKillsThem) {
    AgentState state = running(2);
    const auto actions = step(state, agent_event::Exited{{102, true, SIGKILL, false}}, kStart);
    EXPECT_EQ(all_of<agent_action::BuryGroup>(actions).at(0).signal, SIGTERM);
}

TEST(AgentStep, SendsNoSecondTermToChildrenThatWereStoppedWithTheirWorker) {
    AgentState state = running(1);
    step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    const auto actions = step(state, agent_event::Exited{exited(101, 0)}, kStart);
    EXPECT_EQ(all_of<agent_action::BuryGroup>(actions).at(0).signal, 0);
}

TEST(AgentStep, KillsLeftProcessesAfterTheirGraceAndReportsItOnce) {
    AgentState state = running(1);
    EXPECT_EQ(sweep_signals(step(state, agent_event::Exited{exited(101, 0)}, kStart)),
              std::vector<int>{SIGTERM});
    EXPECT_TRUE(step(state, agent_event::Swept{{555, 556}}, kStart).empty());
    const auto look = step(state, agent_event::Exited{exited(556, 0)}, kStart + 1ms);
    EXPECT_EQ(sweep_signals(look), std::vector<int>{SIGTERM}) << "for those that the first look missed";
    EXPECT_EQ(state.asked_strays, (std::vector<pid_t>{555, 556})) << "555 gets no second one";
    EXPECT_TRUE(step(state, agent_event::Swept{{555}}, kStart + 1ms).empty());

    const TimePoint over = kStart + kStrayGrace;
    EXPECT_EQ(sweep_signals(step(state, agent_event::DeadlinePassed{}, over)), std::vector<int>{SIGKILL});
    EXPECT_EQ(
        all_of<agent_action::ReportStrays>(step(state, agent_event::Swept{{555, 557}}, over)).at(0).count,
        2u);
    EXPECT_EQ(sweep_signals(step(state, agent_event::Exited{exited(555, 0)}, over)),
              std::vector<int>{SIGKILL});
    EXPECT_TRUE(step(state, agent_event::Swept{{557}}, over).empty()) << "the line was said";
    step(state, agent_event::Exited{exited(557, 0)}, over);
    EXPECT_EQ(all_of<agent_action::ReportEnded>(step(state, agent_event::Swept{{}}, over)).size(), 1u);
}

TEST(AgentStep, NamesProcessesThatSurviveTheKill) {
    AgentState state = running(1);
    step(state, agent_event::Exited{exited(101, 0)}, kStart);
    step(state, agent_event::DeadlinePassed{}, kStart + kStrayGrace);
    const TimePoint end = kStart + kStrayGrace + kKillTimeout;
    EXPECT_EQ(sweep_signals(step(state, agent_event::DeadlinePassed{}, end)), std::vector<int>{SIGKILL});
    const auto actions = step(state, agent_event::Swept{{555}}, end);
    EXPECT_EQ(all_of<agent_action::ReportEnded>(actions).at(0).unkillable, std::vector<pid_t>{555});
}

TEST(AgentStep, GivesNoGraceAfterAKillRequest) {
    AgentState state = running(1);
    const auto signals =
        all_of<agent_action::SignalWorker>(step(state, agent_event::KillRequested{}, kStart));
    ASSERT_EQ(signals.size(), 1u);
    EXPECT_EQ(signals[0].signal, SIGKILL);
    EXPECT_FALSE(signals[0].alone);
    const auto actions = step(state, agent_event::Exited{{101, true, SIGKILL, false}}, kStart);
    EXPECT_EQ(all_of<agent_action::BuryGroup>(actions).at(0).signal, SIGKILL);
    EXPECT_EQ(sweep_signals(actions), std::vector<int>{SIGKILL});
}

TEST(AgentStep, AKillRequestEndsTheGraceOfLeftProcesses) {
    AgentState state = running(1);
    step(state, agent_event::Exited{exited(101, 0)}, kStart);
    step(state, agent_event::Swept{{555}}, kStart);
    EXPECT_EQ(sweep_signals(step(state, agent_event::KillRequested{}, kStart)), std::vector<int>{SIGKILL});
}

TEST(AgentStep, EndsOnlyAfterASearchFindsNoProcess) {
    AgentState state = running(1);
    auto actions = step(state, agent_event::Exited{exited(101, 0)}, kStart);
    EXPECT_EQ(all_of<agent_action::Sweep>(actions).size(), 1u);
    EXPECT_TRUE(all_of<agent_action::ReportEnded>(actions).empty());

    EXPECT_TRUE(step(state, agent_event::Swept{{555}}, kStart + 1ms).empty());
    actions = step(state, agent_event::Exited{{555, true, SIGKILL, false}}, kStart + 2ms);
    EXPECT_EQ(std::get<agent_action::ReapStranger>(actions.at(0)).pid, 555);
    EXPECT_EQ(all_of<agent_action::Sweep>(actions).size(), 1u);

    actions = step(state, agent_event::Swept{{}}, kStart + 3ms);
    ASSERT_EQ(all_of<agent_action::ReportEnded>(actions).size(), 1u);
    EXPECT_TRUE(all_of<agent_action::ReportEnded>(actions)[0].unkillable.empty());
    EXPECT_EQ(state.phase, Phase::Idle);
}

TEST(AgentStep, SignalsALateFoundProcessAndNoneTwice) {
    AgentState state = running(1);
    const auto first = step(state, agent_event::Exited{exited(101, 0)}, kStart);
    EXPECT_EQ(sweep_signals(first), std::vector<int>{SIGTERM});
    step(state, agent_event::Swept{{555}}, kStart + 1ms);
    EXPECT_EQ(state.asked_strays, std::vector<pid_t>{555});
    const auto second = step(state, agent_event::Exited{exited(555, 0)}, kStart + 2ms);
    EXPECT_EQ(sweep_signals(second), std::vector<int>{SIGTERM}) << "555 had forked 556";
    step(state, agent_event::Swept{{556}}, kStart + 3ms);
    EXPECT_EQ(state.asked_strays, std::vector<pid_t>{556});
}

TEST(AgentStep, NamesProcessesThatCannotBeKilledAfterABoundedWait) {
    AgentState state = running(2);
    step(state, agent_event::KillRequested{}, kStart);
    step(state, agent_event::Exited{{101, true, SIGKILL, false}}, kStart);
    const auto actions = step(state, agent_event::DeadlinePassed{}, kStart + kKillTimeout);
    EXPECT_EQ(all_of<agent_action::ReportEnded>(actions).at(0).unkillable, std::vector<pid_t>{102});
}

TEST(AgentStep, AStopDuringTheStartReachesRunningWorkersAndStartsNoMore) {
    AgentState state;
    step(state, agent_event::StartRequested{1, 3}, kStart);
    step(state, agent_event::Spawned{0, 101}, kStart);
    const auto actions = step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(actions).at(0).pid, 101);
    const auto after = step(state, agent_event::Exited{{101, true, SIGTERM, false}}, kStart);
    EXPECT_EQ(all_of<agent_action::Sweep>(after).size(), 1u);
    EXPECT_TRUE(all_of<agent_action::SpawnNext>(after).empty());
}

TEST(AgentStep, AWorkerThatNeverRanIsReportedAndNoOtherIsStarted) {
    AgentState state;
    step(state, agent_event::StartRequested{1, 2}, kStart);
    const auto actions =
        step(state,
             agent_event::SpawnFailed{0, {Errc::Refused, "exec ./trian: No such file or directory", ENOENT}},
             kStart);
    EXPECT_EQ(all_of<agent_action::ReportExit>(actions).at(0).start_failure->what,
              "exec ./trian: No such file or directory");
    EXPECT_TRUE(all_of<agent_action::SpawnNext>(actions).empty());
    EXPECT_EQ(all_of<agent_action::Sweep>(actions).size(), 1u);
}

TEST(AgentStep, WaitsForTheGpusBeforeItStartsWorkers) {
    AgentState state;
    const auto waiting = step(state, agent_event::StartRequested{2, 2, true}, kStart);
    EXPECT_EQ(all_of<agent_action::AwaitGpus>(waiting).size(), 1u);
    EXPECT_TRUE(all_of<agent_action::SpawnNext>(waiting).empty());
    EXPECT_EQ(all_of<agent_action::SpawnNext>(step(state, agent_event::GpusFree{}, kStart)).size(), 1u);
    EXPECT_TRUE(step(state, agent_event::GpusFree{}, kStart).empty()) << "once";
}

TEST(AgentStep, StoppedWhileItWaitsForTheGpusHasEnded) {
    for (const AgentEvent& stop :
         {AgentEvent(agent_event::StopRequested{SIGTERM, 5s}), AgentEvent(agent_event::KillRequested{})}) {
        AgentState state;
        step(state, agent_event::StartRequested{2, 2, true}, kStart);
        const auto actions = step(state, stop, kStart);
        EXPECT_EQ(all_of<agent_action::ReportEnded>(actions).size(), 1u);
        EXPECT_EQ(actions.size(), 1u);
        EXPECT_EQ(state.phase, Phase::Idle);
        EXPECT_TRUE(step(state, agent_event::GpusFree{}, kStart).empty()) << "too late";
    }
}

TEST(ForwardedSignals, SentToEveryNodeAreForwardedOnce) {
    ForwardedSignals signals;
    EXPECT_TRUE(signals.is_new(SIGUSR1, SignalFrom::Here, kStart));
    EXPECT_FALSE(signals.is_new(SIGUSR1, SignalFrom::Head, kStart + std::chrono::milliseconds(300)));
    EXPECT_TRUE(signals.is_new(SIGUSR1, SignalFrom::Head, kStart + std::chrono::milliseconds(400)))
        << "another one";
    EXPECT_FALSE(signals.is_new(SIGUSR1, SignalFrom::Here, kStart + std::chrono::milliseconds(500)));
}

TEST(ForwardedSignals, FromOneNodeWithAnotherNumberOrAtAnotherTimeAreForwardedAgain) {
    ForwardedSignals signals;
    EXPECT_TRUE(signals.is_new(SIGUSR1, SignalFrom::Head, kStart));
    EXPECT_TRUE(signals.is_new(SIGUSR1, SignalFrom::Head, kStart));
    EXPECT_TRUE(signals.is_new(SIGUSR2, SignalFrom::Here, kStart));
    EXPECT_TRUE(signals.is_new(SIGUSR1, SignalFrom::Here, kStart + 2 * ForwardedSignals::kApart));
}

// ---- recovery in place

using Stage = AgentState::Stage;

/// The same, whose workers can recover in place and have announced it.
AgentState recoverable(int workers) {
    AgentState state;
    step(state, agent_event::StartRequested{7, workers, false, 60s}, kStart);
    for (int i = 0; i < workers; ++i) step(state, agent_event::Spawned{i, 101 + i}, kStart);
    for (int i = 0; i < workers; ++i) step(state, agent_event::StageReached{i, Stage::Announced}, kStart);
    return state;
}

/// Tells the state that this worker was killed from outside.
std::vector<AgentAction> die(AgentState& state, pid_t pid) {
    return step(state, agent_event::Exited{{pid, true, SIGKILL, false}}, kStart);
}

std::vector<AgentAction> join(AgentState& state, int local_rank, std::uint64_t generation) {
    return step(state, agent_event::StageReached{local_rank, Stage::Joined, generation}, kStart);
}

TEST(AgentRecovery, ReportsAStageWhenTheLastWorkerHasReachedIt) {
    AgentState state = running(2);
    state.recover_within = 60s;
    EXPECT_TRUE(step(state, agent_event::StageReached{1, Stage::Announced}, kStart).empty());
    const auto actions = step(state, agent_event::StageReached{0, Stage::Announced}, kStart);
    ASSERT_EQ(all_of<agent_action::ReportStage>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::ReportStage>(actions)[0].stage, Stage::Announced);
    EXPECT_TRUE(step(state, agent_event::StageReached{0, Stage::Announced}, kStart).empty())
        << "reported once";
}

TEST(AgentRecovery, IgnoresAnnouncementsWhereNothingIsRecovered) {
    AgentState state = running(1);
    EXPECT_TRUE(step(state, agent_event::StageReached{0, Stage::Announced}, kStart).empty());
    EXPECT_TRUE(step(state, agent_event::Refused{0, "backend mpi"}, kStart).empty());
    EXPECT_FALSE(state.can_recover());
}

TEST(AgentRecovery, ReportsTheFirstRefusal) {
    AgentState state = recoverable(2);
    EXPECT_EQ(all_of<agent_action::ReportRefusal>(step(state, agent_event::Refused{1, "backend mpi"}, kStart))
                  .size(),
              1u);
    EXPECT_TRUE(step(state, agent_event::Refused{0, "backend mpi"}, kStart).empty());
    EXPECT_FALSE(state.can_recover());
}

TEST(AgentRecovery, AFailureEndsNothingUntilTheHeadDecides) {
    AgentState state = recoverable(1);
    EXPECT_TRUE(all_of<agent_action::Sweep>(die(state, 101)).empty());
    EXPECT_EQ(state.phase, Phase::Running);
    const auto actions = step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    EXPECT_EQ(all_of<agent_action::Sweep>(actions).size(), 1u) << "the head has decided against it";
}

TEST(AgentRecovery, StartsTheWorkersThatHaveEndedAndNoOthers) {
    AgentState state = recoverable(4);
    die(state, 102);
    die(state, 104);
    const auto actions = step(state, agent_event::RecoverRequested{8}, kStart);
    ASSERT_EQ(all_of<agent_action::SpawnNext>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(actions)[0].local_rank, 1);
    const auto next = step(state, agent_event::Spawned{1, 201}, kStart);
    ASSERT_EQ(all_of<agent_action::SpawnNext>(next).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(next)[0].local_rank, 3);
    const auto last = step(state, agent_event::Spawned{3, 202}, kStart);
    EXPECT_EQ(all_of<agent_action::ReportStarted>(last).size(), 1u);
    EXPECT_EQ(state.alive(), 4);
    EXPECT_EQ(state.local_rank_of(101), 0) << "survivors keep their process";
    EXPECT_EQ(state.generation, 8u);
}

TEST(AgentRecovery, ASecondDeathDuringTheStartIsStartedByTheNextRequest) {
    AgentState state = recoverable(3);
    die(state, 101);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{0, 201}, kStart);
    die(state, 201);
    const auto actions = step(state, agent_event::RecoverRequested{9}, kStart);
    ASSERT_EQ(all_of<agent_action::SpawnNext>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(actions)[0].local_rank, 0);
    const auto next = step(state, agent_event::Spawned{0, 301}, kStart);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(next)[0].local_rank, 1);
}

TEST(AgentRecovery, HasJoinedWhenSurvivorsAndReplacementsHave) {
    AgentState state = recoverable(2);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    EXPECT_TRUE(join(state, 0, 7).empty()) << "that is the last generation";
    EXPECT_TRUE(join(state, 0, 8).empty());
    step(state, agent_event::StageReached{1, Stage::Announced}, kStart);
    const auto actions = join(state, 1, 8);
    ASSERT_EQ(all_of<agent_action::ReportStage>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::ReportStage>(actions)[0].stage, Stage::Joined);
    EXPECT_EQ(state.deadline, kNever);
}

TEST(AgentRecovery, KillsThoseThatHaveNotJoinedInTime) {
    AgentState state = recoverable(3);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    join(state, 0, 8);
    EXPECT_TRUE(step(state, agent_event::DeadlinePassed{}, kStart + 59s).empty());
    const auto actions = step(state, agent_event::DeadlinePassed{}, kStart + 60s);
    ASSERT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions)[0].local_ranks, (std::vector<int>{1, 2}));
    EXPECT_FALSE(all_of<agent_action::ReportExit>(die(state, 201))[0].by_us) << "its end is a failure";
}

TEST(AgentRecovery, WorkersThatWaitForAnotherNodeAreNotKilled) {
    AgentState state = recoverable(2);
    step(state, agent_event::RecoverRequested{8}, kStart);
    const auto actions = step(state, agent_event::DeadlinePassed{{{true}, {true}}}, kStart + 60s);
    EXPECT_TRUE(all_of<agent_action::KillLate>(actions).empty());
    const auto again = step(state, agent_event::DeadlinePassed{{{true}, {true, true}}}, kStart + 120s);
    ASSERT_EQ(all_of<agent_action::KillLate>(again).size(), 1u) << "one of them was stopped meanwhile";
    EXPECT_EQ(all_of<agent_action::KillLate>(again)[0].local_ranks, std::vector<int>{1});
}

TEST(AgentRecovery, AWorkerThatSaysThatItHasComeIsNotLate) {
    AgentState state = recoverable(2);
    die(state, 102);
    step(state, agent_event::Came{0, 8}, kStart);
    step(state, agent_event::RecoverRequested{8}, kStart);
    const auto late = [&] {
        AgentState copy = state;
        const auto actions = step(copy, agent_event::DeadlinePassed{}, kStart + 60s);
        return all_of<agent_action::KillLate>(actions).at(0).local_ranks;
    };
    step(state, agent_event::Spawned{1, 201}, kStart);
    EXPECT_EQ(late(), (std::vector<int>{0, 1})) << "no worker can have come before it was told";
    step(state, agent_event::Came{0, 7}, kStart);
    EXPECT_EQ(late(), (std::vector<int>{0, 1})) << "that was the last generation";
    step(state, agent_event::Came{0, 8}, kStart);
    EXPECT_EQ(late(), std::vector<int>{1});
    step(state, agent_event::RecoverRequested{9}, kStart);
    EXPECT_EQ(late(), (std::vector<int>{0, 1})) << "it has not come to the next one";
}

TEST(AgentRecovery, TheHeadHearsWhileAStateIsReceived) {
    AgentState state = recoverable(1);
    step(state, agent_event::RecoverRequested{8}, kStart);
    const auto look = [&](Duration after, std::uint64_t moves) {
        const auto actions = step(state, agent_event::DeadlinePassed{{{true, false, moves}}}, kStart + after);
        EXPECT_TRUE(all_of<agent_action::KillLate>(actions).empty());
        return all_of<agent_action::ReportSlow>(actions).size();
    };
    EXPECT_EQ(look(60s, 100), 1u);
    EXPECT_EQ(look(120s, 200), 1u);
    EXPECT_EQ(look(180s, 200), 0u) << "nothing has moved";
}

TEST(AgentRecovery, AWorkerMayComputeForThriceItsSlowestUnit) {
    for (const bool is_recovering : {false, true}) {
        AgentState state = recoverable(1);
        if (is_recovering) step(state, agent_event::RecoverRequested{8}, kStart);
        else step(state, agent_event::SuspendRequested{}, kStart);
        const auto look = [&](Duration after, bool is_stopped = false) {
            AgentState copy = state;
            return step(copy, agent_event::DeadlinePassed{{{false, is_stopped, 0, 50s}}}, kStart + after);
        };
        EXPECT_TRUE(all_of<agent_action::KillLate>(look(60s)).empty());
        EXPECT_EQ(all_of<agent_action::ReportSlow>(look(60s)).size(), is_recovering ? 1u : 0u);
        EXPECT_EQ(all_of<agent_action::KillLate>(look(60s, true)).size(), 1u) << "it does not compute";
        EXPECT_TRUE(all_of<agent_action::KillLate>(look(149s)).empty());
        EXPECT_EQ(all_of<agent_action::KillLate>(look(150s)).size(), 1u);
    }
    AgentState state = recoverable(1);
    step(state, agent_event::SuspendRequested{3s}, kStart);
    const auto actions = step(state, agent_event::DeadlinePassed{{{false, false, 0, 50s}}}, kStart + 3s);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u)
        << "the head is lost, and its standby waits";
}

TEST(AgentRecovery, AReplacementMayTakeTwiceAsLongAsTheFirstStart) {
    AgentState state = recoverable(2);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8, 180s}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    EXPECT_EQ(
        all_of<agent_action::ReportSlow>(step(state, agent_event::DeadlinePassed{{{true}, {}}}, kStart + 60s))
            .size(),
        1u);
    const auto actions = step(state, agent_event::DeadlinePassed{{{true}, {}}}, kStart + 180s);
    ASSERT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions)[0].local_ranks, std::vector<int>{1});
}

TEST(AgentRecovery, KillsAWorkerForWhichOthersHaveLeftTheirGroupInVain) {
    AgentState state = recoverable(2);
    step(state, agent_event::LetGo{0, 7}, kStart);
    const auto actions = step(state, agent_event::DeadlinePassed{}, kStart + 60s);
    ASSERT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions)[0].local_ranks, std::vector<int>{1});
}

TEST(AgentRecovery, TellsAWorkerThatHasLetGoThatNoGenerationFollows) {
    AgentState state = recoverable(2);
    step(state, agent_event::LetGo{0, 7}, kStart);
    const auto stop = step(state, agent_event::StopRequested{SIGTERM, 5s}, kStart);
    ASSERT_EQ(all_of<agent_action::TellLast>(stop).size(), 1u);
    EXPECT_EQ(all_of<agent_action::TellLast>(stop)[0].local_rank, 0);
    const auto later = step(state, agent_event::LetGo{1, 7}, kStart);
    EXPECT_EQ(all_of<agent_action::TellLast>(later).size(), 1u);
}

TEST(AgentRecovery, WorkersThatStopMeetAgainWhenTheHeadReplacesADeadOne) {
    AgentState state = recoverable(2);
    step(state, agent_event::StopRequested{SIGTERM, 30s, false}, kStart);
    die(state, 102);
    const auto left = step(state, agent_event::LetGo{0, 7}, kStart);
    EXPECT_TRUE(all_of<agent_action::TellLast>(left).empty());
    EXPECT_EQ(all_of<agent_action::ReportLetGo>(left).size(), 1u);
    const auto begun = step(state, agent_event::RecoverRequested{8}, kStart);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(begun).size(), 1u);
    EXPECT_TRUE(step(state, agent_event::StopRequested{SIGTERM, 29s, false}, kStart).empty())
        << "the dead one's successor has to be started first";
    const auto stop = step(state, agent_event::Spawned{1, 201}, kStart);
    EXPECT_EQ(state.phase, Phase::Stopping);
    EXPECT_TRUE(all_of<agent_action::SignalWorker>(stop).empty()) << "the other one knows";
    ASSERT_EQ(all_of<agent_action::SetDeadline>(stop).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SetDeadline>(stop)[0].when, kStart + 29s);
    join(state, 0, 8);
    const auto joined = join(state, 1, 8);
    EXPECT_EQ(all_of<agent_action::ReportStage>(joined).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(joined).size(), 1u);
}

TEST(AgentRecovery, WorkersThatStopEndWhenTheHeadReplacesNone) {
    AgentState state = recoverable(2);
    step(state, agent_event::StopRequested{SIGTERM, 30s, false}, kStart);
    die(state, 102);
    step(state, agent_event::LetGo{0, 7}, kStart);
    EXPECT_EQ(all_of<agent_action::TellLast>(step(state, agent_event::NoneFollows{}, kStart)).size(), 1u);
}

TEST(AgentRecovery, ANodeWhoseWorkersHaveAllDiedInAStopAwaitsTheHead) {
    AgentState state = recoverable(1);
    step(state, agent_event::StopRequested{SIGTERM, 30s, false}, kStart);
    EXPECT_TRUE(all_of<agent_action::Sweep>(die(state, 101)).empty());
    EXPECT_EQ(all_of<agent_action::Sweep>(step(state, agent_event::NoneFollows{}, kStart)).size(), 1u);
    AgentState saved = recoverable(1);
    step(saved, agent_event::StopRequested{SIGTERM, 30s, false}, kStart);
    const auto ended = step(saved, agent_event::Exited{exited(101, 75)}, kStart);
    EXPECT_EQ(all_of<agent_action::Sweep>(ended).size(), 1u);
    AgentState early = recoverable(1);
    const auto before = step(early, agent_event::Exited{exited(101, 75)}, kStart);
    EXPECT_EQ(all_of<agent_action::Sweep>(before).size(), 1u)
        << "the scheduler's signal came before ddprun's";
}

TEST(AgentRecovery, AStopLetsReplacementsJoinBeforeTheyGetTheSignal) {
    AgentState state = recoverable(2);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    const auto stop = step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    for (const auto& one : all_of<agent_action::SignalWorker>(stop)) EXPECT_EQ(one.pid, 101);
    const auto joined = join(state, 1, 8);
    ASSERT_EQ(all_of<agent_action::SignalWorker>(joined).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(joined)[0].pid, 201);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(joined)[0].signal, SIGTERM);
}

TEST(AgentRecovery, AReplacementThatNobodyWaitsForGetsTheStopSignalAtOnce) {
    AgentState state = recoverable(2);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    const auto actions = step(state, agent_event::Exited{{101, true, SIGTERM, false}}, kStart);
    ASSERT_EQ(all_of<agent_action::SignalWorker>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(actions)[0].pid, 201);
}

TEST(AgentRecovery, AWorkerThatFinishesDuringAStopWaitsForNobody) {
    AgentState state = recoverable(3);
    step(state, agent_event::StageReached{0, Stage::Finished, 7}, kStart);
    const auto stop = step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    ASSERT_EQ(all_of<agent_action::TellRelease>(stop).size(), 1u);
    EXPECT_EQ(all_of<agent_action::TellRelease>(stop)[0].local_rank, 0);
    const auto later = step(state, agent_event::StageReached{1, Stage::Finished, 7}, kStart);
    EXPECT_EQ(all_of<agent_action::TellRelease>(later).size(), 1u);
}

TEST(AgentRecovery, ARankThatFinishesAfterTheReleaseMayEndAtOnce) {
    AgentState state = recoverable(2);
    step(state, agent_event::StageReached{0, Stage::Finished, 7}, kStart);
    EXPECT_EQ(all_of<agent_action::TellRelease>(step(state, agent_event::Released{}, kStart)).size(), 1u);
    const auto later = step(state, agent_event::StageReached{1, Stage::Finished, 7}, kStart);
    EXPECT_EQ(all_of<agent_action::TellRelease>(later).size(), 1u);
}

TEST(AgentRecovery, SuspendsItsWorkersWithoutASignalUntilTheNextGeneration) {
    AgentState state = recoverable(3);
    const auto suspended = step(state, agent_event::SuspendRequested{}, kStart);
    EXPECT_EQ(all_of<agent_action::ReportSuspended>(suspended).size(), 1u);
    EXPECT_TRUE(all_of<agent_action::SignalWorker>(suspended).empty());
    EXPECT_TRUE(all_of<agent_action::TellLast>(step(state, agent_event::LetGo{0, 7}, kStart)).empty());
    EXPECT_TRUE(all_of<agent_action::ReportStage>(join(state, 0, 7)).empty()) << "that generation is over";
    die(state, 102);
    const auto actions = step(state, agent_event::RecoverRequested{8}, kStart);
    ASSERT_EQ(all_of<agent_action::SpawnNext>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::SpawnNext>(actions)[0].local_rank, 1);
    EXPECT_EQ(state.local_rank_of(103), 2) << "survivors keep their process";
}

TEST(AgentRecovery, WorkersThatJoinOthersInPlaceAreAwaitedAsReplacementsAre) {
    AgentState state;
    step(state, agent_event::StartRequested{8, 2, false, 60s, true}, kStart);
    for (int i = 0; i < 2; ++i) step(state, agent_event::Spawned{i, 101 + i}, kStart);
    EXPECT_TRUE(all_of<agent_action::Sweep>(die(state, 101)).empty()) << "the head decides";
    step(state, agent_event::RecoverRequested{9}, kStart);
    step(state, agent_event::Spawned{0, 201}, kStart);
    join(state, 0, 9);
    EXPECT_EQ(all_of<agent_action::ReportStage>(join(state, 1, 9)).at(0).stage, Stage::Joined);
}

TEST(AgentRecovery, TellsOnceThatAWorkerHasLeftItsGenerationByItself) {
    AgentState state = recoverable(2);
    const auto first = step(state, agent_event::LetGo{1, 7, "reset"}, kStart);
    ASSERT_EQ(all_of<agent_action::ReportLetGo>(first).size(), 1u);
    EXPECT_EQ(all_of<agent_action::ReportLetGo>(first)[0].local_rank, 1);
    EXPECT_TRUE(all_of<agent_action::ReportLetGo>(step(state, agent_event::LetGo{0, 7}, kStart)).empty());
    step(state, agent_event::SuspendRequested{}, kStart);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::SuspendRequested{}, kStart);
    EXPECT_TRUE(all_of<agent_action::ReportLetGo>(step(state, agent_event::LetGo{0, 8}, kStart)).empty())
        << "it was told to";
}

TEST(AgentRecovery, SuspendedWorkersThatHaveAllDiedEndNothing) {
    AgentState state = recoverable(1);
    step(state, agent_event::SuspendRequested{}, kStart);
    EXPECT_TRUE(all_of<agent_action::Sweep>(die(state, 101)).empty());
    const auto actions = step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    EXPECT_EQ(all_of<agent_action::Sweep>(actions).size(), 1u);
}

TEST(AgentRecovery, KillsASuspendedWorkerThatDoesNotLeaveItsGeneration) {
    AgentState state = recoverable(2);
    step(state, agent_event::SuspendRequested{}, kStart);
    step(state, agent_event::LetGo{0, 7}, kStart);
    const auto actions = step(state, agent_event::DeadlinePassed{}, kStart + 60s);
    ASSERT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions)[0].local_ranks, std::vector<int>{1});
}

TEST(AgentRecovery, ASuspendedGenerationIsLeftWhenEachWorkerHasLeftItOrIsDead) {
    AgentState state = recoverable(3);
    step(state, agent_event::LetGo{0, 7}, kStart);
    step(state, agent_event::SuspendRequested{3s}, kStart);
    die(state, 102);
    EXPECT_FALSE(state.is_left()) << "the third may still commit a step";
    const auto actions = step(state, agent_event::DeadlinePassed{}, kStart + 3s);
    ASSERT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions)[0].local_ranks, std::vector<int>{2});
    die(state, 103);
    EXPECT_TRUE(state.is_left());
}

TEST(AgentRecovery, AWorkerThatHasFinishedHasLeftItsGeneration) {
    AgentState state = recoverable(2);
    step(state, agent_event::StageReached{0, Stage::Finished, 7}, kStart);
    step(state, agent_event::SuspendRequested{3s}, kStart);
    EXPECT_FALSE(state.is_left());
    const auto actions = step(state, agent_event::DeadlinePassed{}, kStart + 3s);
    ASSERT_EQ(all_of<agent_action::KillLate>(actions).size(), 1u);
    EXPECT_EQ(all_of<agent_action::KillLate>(actions)[0].local_ranks, std::vector<int>{1});
    step(state, agent_event::LetGo{1, 7}, kStart);
    EXPECT_TRUE(state.is_left());
}

TEST(AgentRecovery, WorkersThatHaveFinishedForGoodAreNotKeptForAnotherGeneration) {
    AgentState state = recoverable(2);
    EXPECT_TRUE(state.may_be_left());
    step(state, agent_event::Released{}, kStart);
    EXPECT_FALSE(state.may_be_left());
}

TEST(AgentRecovery, AStopEndsSuspendedWorkersAsOthers) {
    AgentState state = recoverable(3);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    step(state, agent_event::SuspendRequested{}, kStart);
    step(state, agent_event::LetGo{0, 8}, kStart);
    const auto stop = step(state, agent_event::StopRequested{SIGTERM, 30s}, kStart);
    ASSERT_EQ(all_of<agent_action::TellLast>(stop).size(), 1u);
    EXPECT_EQ(all_of<agent_action::TellLast>(stop)[0].local_rank, 0);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(stop).size(), 6u)
        << "the signal and SIGCONT, also for the replacement: nobody waits for it any more";
    EXPECT_EQ(
        all_of<agent_action::SignalWorker>(step(state, agent_event::DeadlinePassed{}, kStart + 30s)).size(),
        3u)
        << "the grace is over";
}

TEST(AgentRecovery, AKillOfTheJobKillsReplacementsToo) {
    AgentState state = recoverable(2);
    die(state, 102);
    step(state, agent_event::RecoverRequested{8}, kStart);
    step(state, agent_event::Spawned{1, 201}, kStart);
    EXPECT_EQ(all_of<agent_action::SignalWorker>(step(state, agent_event::KillRequested{}, kStart)).size(),
              2u);
}

}  // namespace
}  // namespace ddprun
