#include "launcher/job/requeue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using Kind = RunEnd::Kind;

RunEnd ended(Kind kind, std::int64_t steps, Duration ran = 1h) {
    RunEnd end;
    end.kind = kind;
    end.what = "train failed";
    end.steps = steps;
    end.ran = ran;
    return end;
}

RunState in_run(int run, std::int64_t last_step = -1) {
    RunState state;
    state.job = "12.pbs01";
    state.run = run;
    state.last_step = last_step;
    return state;
}

RequeueSpec self(int limit = 10) { return {RequeueSpec::Mode::Self, limit, "train.pbs"}; }

TEST(Requeue, AJobWhoseTimeIsUpGoesBackAndKeepsCount) {
    const RequeueDecision decision = decide_requeue(self(), in_run(2, 100), ended(Kind::TimeUp, 250), "");
    EXPECT_TRUE(decision.requeue);
    EXPECT_EQ(decision.why, "its time is up; run 3 of at most 11");
    EXPECT_EQ(decision.state.last_step, 250);
    EXPECT_EQ(decision.state.phase, "queued");
}

TEST(Requeue, ASuccessorOfTheHeadGoesOnWithItsRun) {
    EXPECT_EQ(same_run(in_run(3, 100), "12.pbs01"), in_run(3, 100));
    EXPECT_EQ(same_run(std::nullopt, "12.pbs01").run, 1);
    EXPECT_EQ(next_run(in_run(3, 100), "12.pbs01").run, 4);
}

TEST(Requeue, ASuccessEndsItSilently) {
    const RequeueDecision decision = decide_requeue(self(), in_run(1), ended(Kind::Succeeded, 10), "");
    EXPECT_FALSE(decision.requeue);
    EXPECT_EQ(decision.why, "");
}

TEST(Requeue, AWrongConfigurationEndsIt) {
    RunEnd end = ended(Kind::Final, 500);
    end.what = "exit code 64 means wrong usage: a restart cannot help";
    EXPECT_EQ(decide_requeue(self(), in_run(1), end, "").why, end.what);
}

TEST(Requeue, AJobStoppedByASignalIsNotPutBack) {
    RunEnd end = ended(Kind::Stopped, 500);
    end.what = "SIGTERM";
    const RequeueDecision decision = decide_requeue(self(), in_run(1), end, "");
    EXPECT_FALSE(decision.requeue) << "qdel, or a scheduler that puts it back by itself";
    EXPECT_EQ(decision.why, "it was stopped by SIGTERM, not by its walltime");
}

TEST(Requeue, AWorkerThatWasAskedToStopPutsTheJobBack) {
    EXPECT_TRUE(decide_requeue(self(), in_run(1), ended(Kind::Unfinished, -1, 2s), "").requeue);
}

TEST(Requeue, AStopFileEndsIt) {
    EXPECT_EQ(decide_requeue(self(), in_run(1), ended(Kind::TimeUp, 500), "/logs/ddprun.stop").why,
              "/logs/ddprun.stop is there");
}

TEST(Requeue, TheLimitCountsRequeues) {
    EXPECT_TRUE(decide_requeue(self(2), in_run(2), ended(Kind::TimeUp, 500), "").requeue);
    EXPECT_EQ(decide_requeue(self(2), in_run(3), ended(Kind::TimeUp, 500), "").why,
              "all 2 requeues are used up (--requeue-limit)");
    EXPECT_FALSE(decide_requeue(self(0), in_run(1), ended(Kind::TimeUp, 500), "").requeue);
}

TEST(Requeue, AFailureNeedsProgressInItsOwnRun) {
    EXPECT_TRUE(decide_requeue(self(), in_run(1, 100), ended(Kind::Failed, 101), "").requeue);
    EXPECT_THAT(decide_requeue(self(), in_run(1, 100), ended(Kind::Failed, 100), "").why,
                HasSubstr("failed without any progress in this run"));
}

TEST(Requeue, TwoRunsInARowWithoutProgressEndIt) {
    const RequeueDecision first = decide_requeue(self(), in_run(1, 100), ended(Kind::TimeUp, 100), "");
    EXPECT_TRUE(first.requeue) << "it may have been stopped before its first checkpoint";
    EXPECT_EQ(first.state.runs_without_progress, 1);
    EXPECT_EQ(decide_requeue(self(), next_run(first.state, "13.pbs01"), ended(Kind::TimeUp, 99), "").why,
              "2 runs in a row made no progress");
    const RequeueDecision better =
        decide_requeue(self(), next_run(first.state, "13.pbs01"), ended(Kind::TimeUp, 101), "");
    EXPECT_TRUE(better.requeue);
    EXPECT_EQ(better.state.runs_without_progress, 0) << "in a row";
}

TEST(Requeue, TimeIsProgressWithoutReportedSteps) {
    EXPECT_EQ(
        decide_requeue(self(), in_run(1), ended(Kind::TimeUp, -1, 2min), "").state.runs_without_progress, 0);
    EXPECT_EQ(decide_requeue(self(), in_run(1), ended(Kind::TimeUp, 0, 2min), "").state.runs_without_progress,
              0)
        << "libddp, without steps";
    EXPECT_EQ(decide_requeue(self(), in_run(1), ended(Kind::TimeUp, -1, 10s), "").state.runs_without_progress,
              1);
    EXPECT_EQ(
        decide_requeue(self(), in_run(2, 100), ended(Kind::TimeUp, -1, 2h), "").state.runs_without_progress,
        1)
        << "the runs before told steps, this one got to none";
}

// ---- the end of a run

JobEnd with_cause(bool signaled, int status) {
    JobEnd end;
    WorkerEnd worker{};
    worker.signaled = signaled;
    worker.status = status;
    worker.order = 1;
    end.workers = {worker};
    return end;
}

TEST(RunEnd, KnowsEachKindOfEnd) {
    JobEnd end;
    end.workers = {WorkerEnd{}};
    EXPECT_EQ(run_end(end, false).kind, Kind::Succeeded);
    EXPECT_EQ(run_end(with_cause(false, 3), false).kind, Kind::Failed);
    EXPECT_EQ(run_end(with_cause(true, SIGKILL), false).kind, Kind::Failed);
    for (const int code : {64, 65, 66, 78, 93, 126, 127})
        EXPECT_EQ(run_end(with_cause(false, code), false).kind, Kind::Final) << code;
    EXPECT_EQ(run_end(with_cause(true, SIGKILL), true).kind, Kind::TimeUp)
        << "the scheduler's, at the walltime's end";

    JobEnd stopped = with_cause(true, SIGTERM);
    stopped.stopped_by_signal = SIGTERM;
    EXPECT_EQ(run_end(stopped, false).kind, Kind::Stopped);
    EXPECT_EQ(run_end(stopped, false).what, "SIGTERM");
    EXPECT_EQ(run_end(stopped, true).kind, Kind::TimeUp);

    const RunEnd early = run_end(with_cause(false, 75), false);
    EXPECT_EQ(early.kind, Kind::Unfinished) << "a worker was asked to stop, and ddprun was not";
    EXPECT_THAT(early.what, HasSubstr("stopped before its end"));
    JobEnd preempted = stopped;
    preempted.preempted = true;
    EXPECT_EQ(run_end(preempted, false).kind, Kind::TimeUp);
    JobEnd out_of_time = with_cause(false, 3);
    out_of_time.out_of_time = true;
    EXPECT_EQ(run_end(out_of_time, false).kind, Kind::TimeUp);
    JobEnd lost;
    lost.failure = "node node07: connection lost";
    EXPECT_EQ(run_end(lost, false).kind, Kind::Failed);
}

// ---- the command

BatchJob pbs_script() { return {Scheduler::Pbs, "12.pbs01", "/home/u/run", true, false}; }

TEST(RequeueWay, OfPbsSubmitsTheScriptAfterThisJob) {
    const Result<RequeueWay> way = requeue_way(pbs_script(), "/home/u/run/train.pbs");
    ASSERT_TRUE(way);
    EXPECT_THAT(way->command, ElementsAre("qsub", "-W", "depend=afterany:12.pbs01", "/home/u/run/train.pbs"));
    EXPECT_EQ(way->directory, "/home/u/run") << "so that the next run's PBS_O_WORKDIR is this one's";
}

TEST(RequeueWay, OfSlurmRequeuesTheJobItself) {
    EXPECT_THAT(requeue_way(BatchJob{Scheduler::Slurm, "17", "/home/u", true, false}, "")->command,
                ElementsAre("scontrol", "requeue", "17"));
    EXPECT_THAT(requeue_way(BatchJob{Scheduler::Slurm, "17_3", "/home/u", true, true}, "")->command,
                ElementsAre("scontrol", "requeue", "17_3"));
}

TEST(RequeueWay, IsRefusedWithTheReason) {
    const auto why = [](const std::optional<BatchJob>& job, const std::string& script) {
        const Result<RequeueWay> way = requeue_way(job, script);
        return way ? std::string("there is one") : way.error().what;
    };
    EXPECT_EQ(why(std::nullopt, ""), "this is no job of PBS or Slurm");
    EXPECT_THAT(why(pbs_script(), ""), HasSubstr("--requeue-script FILE"));
    BatchJob element = pbs_script();
    element.id = "5[3].pbs01";
    element.is_array_element = true;
    EXPECT_EQ(
        why(element, "/a"),
        "PBS puts no element of an array back alone (5[3].pbs01); when it has ended: qsub -J 3-4:2 SCRIPT");
    BatchJob interactive = pbs_script();
    interactive.is_script = false;
    EXPECT_THAT(why(interactive, "/a"), HasSubstr("interactive"));
    EXPECT_THAT(why(BatchJob{Scheduler::Lsf, "17", "", true, false}, ""),
                HasSubstr("REQUEUE_EXIT_VALUES=75"));
}

// ---- the file

TEST(RunStateFile, IsReadAsItWasWritten) {
    RunState state;
    state.job = "13.pbs01";
    state.first_job = "12.pbs01";
    state.run = 3;
    state.generation = 2;
    state.restarts_used = 1;
    state.last_step = 12'000;
    state.runs_without_progress = 1;
    state.phase = "queued";
    state.why = "its time is up";
    EXPECT_EQ(*parse_run_state(render_run_state(state)), state);
}

TEST(RunStateFile, RefusesAnotherFile) {
    for (const char* text :
         {"", "[]", "{}", R"({"version":2})", R"({"version":1,"run":0})", R"({"version":1,"run":-3})"}) {
        EXPECT_FALSE(parse_run_state(text)) << text;
    }
    const std::string whole = render_run_state(RunState{});
    for (std::size_t cut = 0; cut + 2 < whole.size(); ++cut)
        EXPECT_FALSE(parse_run_state(whole.substr(0, cut))) << cut;
}

TEST(RunStateFile, IsSeparateForEachElementOfAnArray) {
    EXPECT_EQ(run_state_path("/logs", "5[0].pbs01"), "/logs/ddprun-5_0_.pbs01.json");
    EXPECT_NE(run_state_path("/logs", "5[0].pbs01"), run_state_path("/logs", "5[1].pbs01"));
}

TEST(RunStateFile, GoesOnCountingWhenTheSchedulerRunsTheJobAgain) {
    RunState killed = in_run(2, 100);  // the run was killed before it wrote its end
    killed.first_job = "11.pbs01";
    const RunState next = next_run(killed, "12.pbs01");
    EXPECT_EQ(next.run, 3);
    EXPECT_EQ(next.first_job, "11.pbs01");
    EXPECT_EQ(next.last_step, 100);
    EXPECT_EQ(next_run(std::nullopt, "12.pbs01").run, 1);
}

}  // namespace
}  // namespace ddprun
