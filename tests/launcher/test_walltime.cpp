#include "launcher/report/walltime.h"

#include <gtest/gtest.h>

#include <map>

namespace ddprun {
namespace {

using namespace std::chrono_literals;

std::optional<Duration> left(std::map<std::string, std::string> variables, std::optional<Duration> age = std::nullopt) {
    const auto look = [variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(std::string(name));
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
    return walltime_left(look, 1000, age);
}

TEST(WalltimeLeft, IsToldBySlurmAsATimeOfDay) {
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "1060"}}), 60s);
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "990"}}), -10s);
}

TEST(WalltimeLeft, ATimeThatDoesNotFitIsNone) {
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "57528403267"}}), std::nullopt);
    EXPECT_EQ(left({{"SLURM_JOB_END_TIME", "9223372036854775807"}}), std::nullopt);
}

TEST(WalltimeLeft, IsToldByTorqueAsASpan) {
    EXPECT_EQ(left({{"PBS_WALLTIME", "3600"}}, 600s), 50min);
    EXPECT_EQ(left({{"PBS_WALLTIME", "01:00:00"}}, 600s), 50min);
    EXPECT_EQ(left({{"PBS_WALLTIME", "3600"}}), std::nullopt) << "since when is not known";
    EXPECT_EQ(left({{"PBS_WALLTIME", "0"}}, 600s), std::nullopt);
}

TEST(WalltimeLeft, IsNotKnownWithoutAScheduler) { EXPECT_EQ(left({}, 600s), std::nullopt); }

TEST(WalltimeNote, SaysHowFarFromTheLimitTheJobEnded) {
    EXPECT_EQ(walltime_note(-12s), "killed at walltime: the scheduler's limit was over 12 s before");
    EXPECT_EQ(walltime_note(20s), "stopped at walltime: 20 s before the scheduler's limit");
    EXPECT_EQ(walltime_note(10min), "");
}

}  // namespace
}  // namespace ddprun
