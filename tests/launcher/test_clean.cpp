#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/tools/commands.h"

namespace ddprun {
namespace {

using ::testing::IsEmpty;

constexpr const char* kJob = "00f1e2d3c4b5";

std::vector<pid_t> abandoned(const std::vector<MarkedProcess>& all, const LiveJobs& live) {
    std::vector<pid_t> pids;
    for (const MarkedProcess& process : abandoned_processes(all, live)) pids.push_back(process.pid);
    return pids;
}

TEST(Clean, AProcessWhoseDdprunIsGoneIsAbandoned) {
    const std::vector<MarkedProcess> all{{71, 1, 1000, kJob}, {72, 71, 1000, kJob}};
    EXPECT_EQ(adopter_of(all[1], all), 1);
    EXPECT_EQ(abandoned(all, {{"aaaaaaaaaaaaaaaa"}, {50}}), (std::vector<pid_t>{71, 72}));
}

TEST(Clean, AProcessOfAJobWithAControlSocketOrACgroupInUseIsNotAbandoned) {
    EXPECT_THAT(abandoned({{71, 1, 1000, kJob}}, {{"00f1e2d3c4b5a697"}, {}}), IsEmpty());
}

TEST(Clean, AProcessBelowADdprunIsNotAbandonedWhateverItsSocketSays) {
    EXPECT_THAT(abandoned({{71, 50, 1000, kJob}, {72, 71, 1000, kJob}}, {{}, {50}}), IsEmpty());
}

TEST(Clean, AProcessWhoseParentIsOutsideOfOurPidNamespaceIsNotAbandoned) {
    EXPECT_THAT(abandoned({{1, 0, 1000, kJob}, {7, 1, 1000, kJob}}, {}), IsEmpty());
}

TEST(Clean, ATreeThatChangesWhileItIsReadEndsTheSearch) {
    const std::vector<MarkedProcess> loop{{71, 72, 1000, kJob}, {72, 71, 1000, kJob}};
    EXPECT_EQ(adopter_of(loop[0], loop), 0);
}

}  // namespace
}  // namespace ddprun
