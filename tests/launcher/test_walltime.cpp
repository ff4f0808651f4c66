#include "launcher/ends/walltime.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <time.h>

#include <map>

namespace ddprun {
namespace {

using namespace std::chrono_literals;

std::optional<Duration> left(std::map<std::string, std::string> variables,
                             std::optional<Duration> age = std::nullopt) {
    const auto look = [variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(std::string(name));
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
    return walltime_left(look, 1000, age);
}

TEST(WalltimeLeft, ReadsSlurmsTimeOfDay) {
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "1060"}}), 60s);
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "990"}}), -10s);
}

TEST(WalltimeLeft, IgnoresATimeThatDoesNotFit) {
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "57528403267"}}), std::nullopt);
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "9223372036854775807"}}), std::nullopt);
}

TEST(WalltimeLeft, ReadsTorquesSpan) {
    EXPECT_EQ(left({{"PBS_WALLTIME", "3600"}}, 600s), 50min);
    EXPECT_EQ(left({{"PBS_WALLTIME", "01:00:00"}}, 600s), 50min);
    EXPECT_EQ(left({{"PBS_WALLTIME", "3600"}}), std::nullopt) << "since when is not known";
    EXPECT_EQ(left({{"PBS_WALLTIME", "0"}}, 600s), std::nullopt);
}

TEST(WalltimeLeft, IsNotKnownWithoutAScheduler) { EXPECT_EQ(left({}, 600s), std::nullopt); }

// ---- the answers of schedulers' programs

Result<Duration> told_by(Scheduler scheduler, std::string_view answer) {
    return walltime_answer(scheduler, answer, 1'000'000, std::nullopt);
}

std::string refused_by(Scheduler scheduler, std::string_view answer) {
    const Result<Duration> left = told_by(scheduler, answer);
    return left ? "taken" : left.error().what;
}

TEST(WalltimeAnswer, ReadsSqueuesTimeOfDay) {
    EXPECT_EQ(*told_by(Scheduler::Slurm, "1003600\n"), 1h);
    EXPECT_EQ(*told_by(Scheduler::Slurm, "999990\n"), -10s) << "it is over";
    ::setenv("TZ", "UTC0", 1);
    ::tzset();
    EXPECT_EQ(*told_by(Scheduler::Slurm, "1970-01-12T14:46:40\n"), 1h) << "by a squeue that does not know %s";
    ::unsetenv("TZ");
    ::tzset();
}

TEST(WalltimeAnswer, ReadsTheRestOfBjobsHardLimit) {
    EXPECT_EQ(*told_by(Scheduler::Lsf, "2:30 L\n"), 2h + 30min);
    EXPECT_EQ(*told_by(Scheduler::Lsf, "0:5 L\n"), 5min);
}

TEST(WalltimeAnswer, AJobWithoutALimitHasNoWalltime) {
    for (const char* answer : {"NONE", "N/A", "Unknown"})
        EXPECT_EQ(refused_by(Scheduler::Slurm, answer), "the job has no walltime") << answer;
    for (const char* answer : {"-", "2:30 E", "0:0 X"})
        EXPECT_EQ(refused_by(Scheduler::Lsf, answer), "the job has no walltime") << answer;
}

TEST(WalltimeAnswer, NamesTheProgramWhenItIsNotUnderstood) {
    EXPECT_EQ(refused_by(Scheduler::Slurm, ""), "squeue gave no answer");
    EXPECT_EQ(refused_by(Scheduler::Pbs, "\n"), "qstat gave no answer");
    EXPECT_EQ(refused_by(Scheduler::Slurm, "soon"), "squeue: unknown answer 'soon'");
    EXPECT_EQ(refused_by(Scheduler::Slurm, "2026-11-22T12:00:00Z+1"),
              "squeue: unknown answer '2026-11-22T12:00:00Z+1'");
    for (const char* answer : {"2:30", "L", ": L", "x:1 L", "-1:00 L", "1:99 L", "Job <17> is not found"}) {
        EXPECT_EQ(refused_by(Scheduler::Lsf, answer), std::string("bjobs: unknown answer '") + answer + "'");
    }
}

// ---- later questions

const TimePoint kAsked{100h};

TEST(WalltimeQuestion, IsAskedAgainEveryTenMinutesAndNotTogetherWithOtherJobs) {
    EXPECT_EQ(next_walltime_question(kAsked, kAsked + 48h, 0s), kAsked + 10min);
    EXPECT_EQ(next_walltime_question(kAsked, kAsked + 48h, 80s), kAsked + 11min + 20s);
    EXPECT_EQ(next_walltime_question(kAsked, kNever, 0s), kAsked + 10min) << "a limit can be set later";
}

TEST(WalltimeQuestion, ComesSoonerTowardsTheEndAFewTimesAndNotAfterIt) {
    const TimePoint due = kAsked + 10min;
    int questions = 0;
    for (TimePoint at = kAsked; at != kNever; at = next_walltime_question(at, due, 119s)) {
        EXPECT_LT(at, due);
        ASSERT_LT(questions++, 10);
    }
    EXPECT_GT(questions, 5);
    EXPECT_EQ(next_walltime_question(due + 1s, due, 0s), kNever);
}

TEST(WalltimeChange, NamesTheOldEndAndTheNew) {
    EXPECT_EQ(walltime_change(kAsked + 10min, kAsked + 2h, kAsked),
              "the end of the walltime has changed: in 2 h (before: in 10 min)");
    EXPECT_EQ(walltime_change(kAsked + 2h, kAsked - 10s, kAsked),
              "the end of the walltime has changed: in 0 s (before: in 2 h)");
    EXPECT_EQ(walltime_change(kAsked + 10min, kNever, kAsked),
              "the end of the walltime has changed: none (before: in 10 min)");
    EXPECT_EQ(walltime_change(kNever, kAsked + 10min, kAsked),
              "the end of the walltime has changed: in 10 min (before: none)");
}

TEST(WalltimeChange, IgnoresWhatASchedulerRounds) {
    EXPECT_EQ(walltime_change(kAsked + 2h, kAsked + 2h + 59s, kAsked), "");
    EXPECT_EQ(walltime_change(kNever, kNever, kAsked), "");
}

TEST(WalltimeNote, SaysHowFarFromTheLimitTheJobEnded) {
    EXPECT_EQ(walltime_note(-12s), "killed at walltime: the scheduler's limit was over 12 s before");
    EXPECT_EQ(walltime_note(20s), "stopped at walltime: 20 s before the scheduler's limit");
    EXPECT_EQ(walltime_note(10min), "");
}

}  // namespace
}  // namespace ddprun
