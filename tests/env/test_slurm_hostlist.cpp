#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "env/nodes/host_lists.h"

namespace ddprun {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> hosts(std::string_view text) {
    Result<std::vector<std::string>> list = expand_hostlist(text);
    return list ? *list : std::vector<std::string>{"error: " + list.error().what};
}

TEST(SlurmHostlist, RangesKeepTheirZerosAndTheListItsOrder) {
    EXPECT_THAT(hosts("a[01-03,07],b"), ElementsAre("a01", "a02", "a03", "a07", "b"));
    EXPECT_THAT(hosts("n[8-11]"), ElementsAre("n8", "n9", "n10", "n11"));
    EXPECT_THAT(hosts("n[098-101]"), ElementsAre("n098", "n099", "n100", "n101"));
    EXPECT_THAT(hosts("login"), ElementsAre("login"));
}

TEST(SlurmHostlist, SeveralBracketsRunLikeAnOdometerAndMayBeFollowedByText) {
    EXPECT_THAT(hosts("r[1-2]n[0-1]"), ElementsAre("r1n0", "r1n1", "r2n0", "r2n1"));
    EXPECT_THAT(hosts("n[1-2]-ib,x"), ElementsAre("n1-ib", "n2-ib", "x"));
}

TEST(SlurmHostlist, MalformedListsAreRefused) {
    for (const char* text : {"", "a,", "a[1-", "a]1[", "a[]", "a[3-1]", "a[x]", "a[[1]]", "a[1-2-3]"}) {
        const Result<std::vector<std::string>> list = expand_hostlist(text);
        ASSERT_FALSE(list) << text;
        EXPECT_EQ(list.error().code, Errc::InvalidArgument) << text;
    }
}

TEST(SlurmHostlist, AListThatIsTooLargeIsRefused) {
    for (const char* text : {"n[0-99999999]", "n[0-999]m[0-999]", "n[0-18446744073709551615]"}) {
        const Result<std::vector<std::string>> list = expand_hostlist(text);
        ASSERT_FALSE(list) << text;
        EXPECT_EQ(list.error().code, Errc::Limit) << text;
    }
}

TEST(SlurmTasksPerNode, RepeatsAreWrittenOut) {
    EXPECT_THAT(*parse_tasks_per_node("2(x2),1"), ElementsAre(2, 2, 1));
    EXPECT_THAT(*parse_tasks_per_node("4"), ElementsAre(4));
}

TEST(SlurmTasksPerNode, MalformedCountsAreRefused) {
    for (const char* text : {"", "2(x", "2(x0)", "x", "2,,1", "-1", "2(3)", "1(x65537)"}) {
        EXPECT_FALSE(parse_tasks_per_node(text)) << text;
    }
    EXPECT_EQ(parse_tasks_per_node("1(x60000),1(x60000)").error().code, Errc::Limit);
}

}  // namespace
}  // namespace ddprun
