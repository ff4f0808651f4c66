#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ddp/ddp.h"
#include "ddp/testing.h"

namespace {

using ddp::NamedValue;
using ddp::ProcessGroup;

/// The exception of every rank, which must be the same on all.
std::string mismatch(int ranks, const std::function<void(ProcessGroup&)>& compare) {
    std::string what;
    for (const std::exception_ptr& failure : ddp::testing::failures_of_ranks(ranks, compare)) {
        try {
            if (!failure) return "nothing";
            std::rethrow_exception(failure);
        } catch (const ddp::MismatchError& error) {
            if (!what.empty()) {
                EXPECT_EQ(error.what(), what) << "the ranks' messages differ";
            }
            what = error.what();
        }
    }
    return what;
}

TEST(VerifyEqual, DoesNotThrowWhenAllRanksAgree) {
    ddp::testing::run_ranks(4, [](ProcessGroup& group) {
        ddp::verify_equal(group, "--lr", 0.1);
        ddp::verify_equal(group, "--seed", std::numeric_limits<std::uint64_t>::max());
        ddp::verify_equal(group, "--resume", false);
        ddp::verify_equal(group, "data", std::string_view("a\0b", 3));
        ddp::verify_equal(group, {{"a", "1"}, {"b", ""}});
        ddp::verify_equal(group, std::span<const NamedValue>());
    });
}

TEST(VerifyEqual, NamesTheValueBothRanksAndBothValues) {
    EXPECT_EQ(
        mismatch(
            3, [](ProcessGroup& group) { ddp::verify_equal(group, "--lr", group.rank() == 2 ? 0.1 : 0.02); }),
        "--lr is 0.1 on rank 2, 0.02 on rank 0");
    EXPECT_EQ(
        mismatch(4,
                 [](ProcessGroup& group) { ddp::verify_equal(group, "--seed", group.rank() == 0 ? 1 : 2); }),
        "--seed is 2 on ranks 1-3, 1 on rank 0");
}

TEST(VerifyEqual, NamesTheFirstOfSeveralDifferences) {
    EXPECT_EQ(mismatch(2,
                       [](ProcessGroup& group) {
                           ddp::verify_equal(group, {{"same", "x"},
                                                     {"--a", group.rank() == 0 ? "" : "1"},
                                                     {"--b", std::to_string(group.rank())}});
                       }),
              "--a is 1 on rank 1, empty on rank 0");
}

TEST(VerifyEqual, DetectsADifferenceInTheLastBitOfANumber) {
    EXPECT_EQ(mismatch(2,
                       [](ProcessGroup& group) {
                           ddp::verify_equal(group, "x", group.rank() == 0 ? 0.1 : std::nextafter(0.1, 1.0));
                       }),
              "x is 0.10000000000000002 on rank 1, 0.1 on rank 0");
}

TEST(VerifyEqual, EscapesTextThatNoLineCanHold) {
    EXPECT_EQ(mismatch(2,
                       [](ProcessGroup& group) {
                           const std::string_view zero("a\0b", 3), newline("a\nb");
                           ddp::verify_equal(group, std::string_view("x\0y", 3),
                                             group.rank() == 0 ? zero : newline);
                       }),
              "x\\x00y is a\\nb on rank 1, a\\x00b on rank 0");
}

TEST(VerifyEqual, SeparatesNamesFromValues) {
    EXPECT_EQ(
        mismatch(
            2,
            [](ProcessGroup& group) {
                ddp::verify_equal(group, {group.rank() == 0 ? NamedValue{"ab", "c"} : NamedValue{"a", "bc"}});
            }),
        "verify_equal: the name of a value is a on rank 1, ab on rank 0");
    EXPECT_EQ(mismatch(2,
                       [](ProcessGroup& group) {
                           const std::vector<NamedValue> values(group.rank() == 0 ? 1 : 2, {"a", "b"});
                           ddp::verify_equal(group, values);
                       }),
              "verify_equal: the number of values is 2 on rank 1, 1 on rank 0");
}

}  // namespace
