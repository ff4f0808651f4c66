#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "launcher/start/meet.h"

namespace ddprun {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Lt;
using Told = std::map<std::string, std::string, std::less<>>;

EnvironmentLookup lookup_in(const Told& variables) {
    return [variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
}

LauncherChoice task_of(LauncherFamily family, int rank, std::string job) {
    LauncherChoice choice;
    choice.placement = Placement{family, rank, 3, 0, 1, rank, 3, std::move(job)};
    return choice;
}

const Told kStep{{"SLURM_STEP_NODELIST", "cn[07-08],cn12"}, {"SLURMD_NODENAME", "cn07"}};

TEST(FirstHost, IsTheFirstOfASlurmStepsListWithPortsMadeFromTheJob) {
    const auto one =
        find_first_host(task_of(LauncherFamily::Slurm, 0, "77.0"), lookup_in(kStep), "", std::nullopt);
    ASSERT_TRUE(one && *one);
    EXPECT_EQ((*one)->host, "cn07");
    EXPECT_EQ((*one)->job, "slurm-77.0");
    EXPECT_EQ((*one)->ports.size(), 4u);
    EXPECT_THAT((*one)->ports, Each(AllOf(Ge(20000), Lt(32000))));
    const auto other =
        find_first_host(task_of(LauncherFamily::Slurm, 2, "77.0"),
                        lookup_in({{"SLURM_STEP_NODELIST", "cn[07-08],cn12"}, {"SLURMD_NODENAME", "cn12"}}),
                        "", std::nullopt);
    EXPECT_EQ((*other)->ports, (*one)->ports) << "all tasks must look at the same ports";
    const auto next =
        find_first_host(task_of(LauncherFamily::Slurm, 0, "77.1"), lookup_in(kStep), "", std::nullopt);
    EXPECT_NE((*next)->ports, (*one)->ports) << "two steps on one host must not meet";
}

TEST(FirstHost, RefusesATaskZeroOnAnotherHostAndNamesBoth) {
    const auto host = find_first_host(
        task_of(LauncherFamily::Slurm, 0, "77.0"),
        lookup_in({{"SLURM_STEP_NODELIST", "cn[07-08]"}, {"SLURMD_NODENAME", "cn08"}}), "", std::nullopt);
    ASSERT_FALSE(host);
    EXPECT_EQ(host.error().code, Errc::Mismatch);
    EXPECT_THAT(host.error().what, AllOf(HasSubstr("cn07"), HasSubstr("cn08"), HasSubstr("--rdzv-endpoint")));
}

TEST(FirstHost, NamesAMalformedList) {
    const auto host = find_first_host(task_of(LauncherFamily::Slurm, 0, "77.0"),
                                      lookup_in({{"SLURM_STEP_NODELIST", "cn[07"}}), "", std::nullopt);
    ASSERT_FALSE(host);
    EXPECT_THAT(host.error().what, HasSubstr("SLURM_STEP_NODELIST="));
}

TEST(FirstHost, IsTheFirstOfSkyPilotsAddressesWithAPortMadeFromTheTask) {
    const auto lookup = lookup_in({{"SKYPILOT_NODE_IPS", "10.0.0.7\n10.0.0.9\n"}});
    const auto host =
        find_first_host(task_of(LauncherFamily::SkyPilot, 1, "sky-3"), lookup, "", std::nullopt);
    ASSERT_TRUE(host && *host);
    EXPECT_EQ((*host)->host, "10.0.0.7");
    const auto other =
        find_first_host(task_of(LauncherFamily::SkyPilot, 1, "sky-4"), lookup, "", std::nullopt);
    ASSERT_TRUE(other && *other);
    EXPECT_NE((*host)->ports, (*other)->ports);
}

TEST(FirstHost, IsTheFirstLineOfTheNodeFileUnderPals) {
    const auto host = find_first_host(task_of(LauncherFamily::Pals, 1, "abc"), lookup_in({}),
                                      "x1000c0\nx1000c0\nx1001c0\n", std::nullopt);
    ASSERT_TRUE(host && *host);
    EXPECT_EQ((*host)->host, "x1000c0");
}

TEST(FirstHost, IsTheHostOfRankZeroInPalsApplicationRatherThanTheNodeFiles) {
    const PalsApplication application{{{0, 1}, {0, 0}}, {"x1001c0", "x1002c0"}};
    const auto host =
        find_first_host(task_of(LauncherFamily::Pals, 1, "abc"), lookup_in({}), "x1000c0\n", application);
    ASSERT_TRUE(host && *host);
    EXPECT_EQ((*host)->host, "x1002c0");
}

TEST(FirstHost, IsNotGuessedForOtherLaunchers) {
    EXPECT_FALSE(
        *find_first_host(task_of(LauncherFamily::OpenMpi, 0, "1"), lookup_in(kStep), "node\n", std::nullopt));
    EXPECT_FALSE(*find_first_host(task_of(LauncherFamily::Pals, 0, "abc"), lookup_in({}), "", std::nullopt));
    EXPECT_FALSE(*find_first_host(task_of(LauncherFamily::Slurm, 0, "77.0"), lookup_in({}), "", std::nullopt))
        << "a step without a list";
}

}  // namespace
}  // namespace ddprun
