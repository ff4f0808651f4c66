#include "launcher/guard/descriptors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ddprun {
namespace {

using testing::AllOf;
using testing::HasSubstr;

OutputSpec kept(StreamsMap redirects, StreamsMap tee) {
    OutputSpec output;
    output.log_dir = "/logs";
    output.redirects = std::move(redirects);
    output.tee = std::move(tee);
    return output;
}

TEST(Descriptors, APlainWorkerTakesTwoPipesAndItsLifeline) {
    EXPECT_EQ(descriptors_for_workers({}, 1), 3);
    EXPECT_EQ(descriptors_for_workers({}, 64), 192);
}

TEST(Descriptors, TeedStreamsTakeAFileEachAndRedirectedOnesNothing) {
    EXPECT_EQ(descriptors_for_workers(kept({}, {Streams::All, {}}), 1), 5);
    EXPECT_EQ(descriptors_for_workers(kept({Streams::All, {}}, {}), 1), 1);
    EXPECT_EQ(descriptors_for_workers(kept({Streams::None, {{1, Streams::Out}}}, {}), 2), 3 + 2);
}

TEST(Descriptors, ARotatedFileIsWrittenByUs) {
    OutputSpec output = kept({Streams::All, {}}, {});
    output.max_file_bytes = 1 << 20;
    EXPECT_EQ(descriptors_for_workers(output, 1), 5);
}

TEST(Descriptors, AWorkerThatIsNotShownTakesAPipeForStderrOnly) {
    OutputSpec output;
    output.local_ranks = {0};
    EXPECT_EQ(descriptors_for_workers(output, 2), 3 + 2);
}

TEST(Descriptors, ALimitThatIsTooSmallIsReportedWithTheNumberNeededAndTheRemedy) {
    EXPECT_TRUE(check_descriptor_limit({}, 64, 10, 1024));
    const Status refused = check_descriptor_limit({}, 64, 10, 200);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().what,
                AllOf(HasSubstr("64 workers"), HasSubstr("242"), HasSubstr("200"), HasSubstr("ulimit")));
}

TEST(Descriptors, InheritedNumbersStayBelowTheWorkersLimit) {
    EXPECT_EQ(inherited_numbers(0).store, 252);
    EXPECT_EQ(inherited_numbers(254).store, 252);
    for (const std::uint64_t limit : {252, 200, 64, 7}) {
        EXPECT_LT(static_cast<std::uint64_t>(inherited_numbers(limit).kept), limit);
        EXPECT_GT(inherited_numbers(limit).segment, 2);
    }
}

}  // namespace
}  // namespace ddprun
