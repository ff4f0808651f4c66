#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/hang/hang_detector.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Four ranks under a detector of 10 s that is fed every second; between two samples every rank works.
class HangDetection : public ::testing::Test {
  protected:
    HangDetection() {
        for (int rank = 0; rank < 4; ++rank) {
            ranks_.emplace_back();
            ranks_.back().rank = rank;
        }
    }
    void in_collective(int rank, std::uint64_t seq) {
        HangSample& sample = ranks_[static_cast<std::size_t>(rank)];
        sample.joined = true;
        sample.started_seq = seq;
        sample.finished_seq = seq - 1;
        sample.operation = SegmentOp::AllReduce;
        sample.bytes = 25 << 20;
    }
    void finished(int rank, std::uint64_t seq) {
        in_collective(rank, seq);
        ranks_[static_cast<std::size_t>(rank)].finished_seq = seq;
    }
    /// The first verdict of `looks` samples, one second apart.
    std::optional<HangVerdict> watch(int looks) {
        for (int i = 0; i < looks; ++i) {
            now_ += 1s;
            for (HangSample& sample : ranks_) {
                if (works_) sample.cpu += 500ms;
            }
            if (beats_) ++ranks_[0].progress_ns;
            if (auto verdict = detector_.feed(ranks_, now_)) return verdict;
        }
        return std::nullopt;
    }

    HangDetector detector_{10s};
    std::vector<HangSample> ranks_;
    TimePoint now_ = TimePoint{} + 1000s;
    bool works_ = true;
    bool beats_ = false;
};

TEST_F(HangDetection, RanksThatWorkDoNotHang) { EXPECT_FALSE(watch(100)); }

TEST_F(HangDetection, TheRankThatDoesNotCallTheCollectiveIsNamed) {
    for (const int rank : {0, 1, 3}) in_collective(rank, 812);
    finished(2, 811);
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 2);
    EXPECT_EQ(verdict->what,
              "rank 2 has not called all_reduce #812 (25 MiB) (it is busy with something else); "
              "ranks 0-1, 3 wait for it since 10 s");
}

TEST_F(HangDetection, ARankInAnEarlierCollectiveIsNamedWithIt) {
    for (const int rank : {0, 1, 3}) in_collective(rank, 813);
    in_collective(2, 812);
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_THAT(verdict->what, HasSubstr("rank 2 is in all_reduce #812 (25 MiB); ranks 0-1, 3 wait for it"));
}

TEST_F(HangDetection, AMissingRankThatHasEndedIsReportedAsEnded) {
    for (const int rank : {0, 1, 3}) in_collective(rank, 5);
    finished(2, 4);
    ranks_[2].alive = false;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_THAT(verdict->what, HasSubstr("rank 2 has not called all_reduce #5 (25 MiB) (it has ended)"));
}

TEST_F(HangDetection, TheStoppedRankIsNamedWhenAllAreInTheCollective) {
    for (const int rank : {0, 1, 2, 3}) in_collective(rank, 9);
    ranks_[1].stopped = true;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 1);
    EXPECT_THAT(verdict->what,
                AllOf(HasSubstr("all ranks have been in all_reduce #9"), HasSubstr("rank 1 is stopped")));
}

TEST_F(HangDetection, TheStoppedRankIsNamedInAnEarlierCollectiveToo) {
    for (const int rank : {0, 1, 3}) in_collective(rank, 813);
    in_collective(2, 812);
    ranks_[2].stopped = true;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_THAT(verdict->what, AllOf(HasSubstr("rank 2 is in all_reduce #812"),
                                     HasSubstr("; rank 2 is stopped, by SIGSTOP or a debugger")));
}

TEST_F(HangDetection, CollectivesThatGoOnAreNoHangHoweverManyThereAre) {
    for (std::uint64_t seq = 1; seq < 50; ++seq) {
        for (const int rank : {0, 1, 2, 3}) in_collective(rank, seq);
        EXPECT_FALSE(watch(1));
    }
}

TEST_F(HangDetection, AStoppedRankIsNamedWithoutAnyCollective) {
    ranks_[3].stopped = true;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 3);
    EXPECT_THAT(verdict->what, HasSubstr("rank 3 has been stopped"));
}

TEST_F(HangDetection, HeartbeatsThatEndAreAHangAlthoughTheRankIsBusy) {
    beats_ = true;
    ranks_[0].progress_ns = 1;
    EXPECT_FALSE(watch(30));
    beats_ = false;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_THAT(verdict->what,
                AllOf(HasSubstr("rank 0 has reported no progress for 10 s"), HasSubstr("busy")));
}

TEST_F(HangDetection, TheRankBehindIsNamedAmongThoseThatStoppedReportingHoweverBusyItIs) {
    for (HangSample& sample : ranks_) {
        sample.progress_ns = 1;
        sample.step = sample.rank == 2 ? 811 : 812;
    }
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 2);
    EXPECT_EQ(
        verdict->what,
        "ranks 0-3 have reported no progress for 10 s; rank 2 is behind, at step 811 of 812 (it is busy with something else)");
}

TEST_F(HangDetection, RanksThatNeverReportAreNamedOnlyWithThoseThatStoppedReporting) {
    beats_ = true;
    ranks_[0].progress_ns = 1;
    EXPECT_FALSE(watch(100)) << "only rank 0 reports, and it does";
    beats_ = false;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 0);
    EXPECT_THAT(verdict->what, AllOf(HasSubstr("rank 0 has reported no progress"),
                                     HasSubstr("; ranks 1-3 have never reported any")));
}

TEST_F(HangDetection, CollectivesThatMoveAreProgressWithoutAnyReport) {
    for (HangSample& sample : ranks_) sample.progress_ns = 1;
    for (std::uint64_t seq = 1; seq < 50; ++seq) {
        for (const int rank : {0, 1, 2, 3}) finished(rank, seq);
        EXPECT_FALSE(watch(1));
    }
}

TEST_F(HangDetection, AllRanksIdleIsAHangOnlyAfterTheTimeout) {
    works_ = false;
    EXPECT_FALSE(watch(10));
    const auto verdict = watch(1);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, -1);
    EXPECT_THAT(verdict->what, HasSubstr("no rank has used processor time"));
}

TEST_F(HangDetection, TheStoppedRankIsNamedWhenAllWereIdleBeforeItWasStopped) {
    works_ = false;
    EXPECT_FALSE(watch(5));
    ranks_[2].stopped = true;
    const auto verdict = watch(6);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 2);
    EXPECT_THAT(verdict->what,
                AllOf(HasSubstr("no rank has used processor time"), HasSubstr("rank 2 is stopped")));
}

TEST_F(HangDetection, OneRankThatReadsKeepsAllFromHanging) {
    works_ = false;
    for (int i = 0; i < 50; ++i) {
        ++ranks_[2].io_bytes;
        EXPECT_FALSE(watch(1));
    }
}

TEST_F(HangDetection, TimeInWhichWeWereSuspendedDoesNotCount) {
    works_ = false;
    EXPECT_FALSE(watch(8));
    now_ += 3600s;
    EXPECT_FALSE(watch(10));
    EXPECT_TRUE(watch(1));
}

TEST_F(HangDetection, RanksThatWaitForAnAwaitedRankDoNotHang) {
    for (const int rank : {1, 2, 3}) in_collective(rank, 812);
    finished(0, 811);
    beats_ = false;
    works_ = false;
    ranks_[0].awaited = true;
    EXPECT_FALSE(watch(100));
    ranks_[0].awaited = false;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 0);
}

TEST_F(HangDetection, AStoppedRankForWhichOthersWaitIsAHang) {
    for (const int rank : {1, 2, 3}) in_collective(rank, 812);
    finished(0, 811);
    ranks_[0].awaited = ranks_[0].stopped = true;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 0);
}

TEST_F(HangDetection, ARankThatComputesIsOverdueAfterThriceItsSlowestUnit) {
    for (const int rank : {1, 2, 3}) in_collective(rank, 812);
    finished(0, 811);
    const auto is_overdue = [&] {
        const auto verdict = watch(1);
        return verdict && verdict->is_overdue;
    };
    EXPECT_FALSE(watch(10));
    for (int i = 0; i < 100; ++i) EXPECT_FALSE(is_overdue()) << "it has committed nothing yet";
    ranks_[0].slowest_unit = 50s;
    for (int i = 0; i < 40; ++i) EXPECT_FALSE(is_overdue()) << i;
    EXPECT_TRUE(is_overdue());
}

TEST_F(HangDetection, ARankThatDoesNothingIsOverdueAtOnceAndTheOneThatComputesIsNotToBlame) {
    for (const int rank : {1, 3}) in_collective(rank, 812);
    for (const int rank : {0, 2}) finished(rank, 811);
    ranks_[2].stopped = true;
    const auto verdict = watch(20);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 2);
    EXPECT_TRUE(verdict->is_overdue);
}

TEST_F(HangDetection, NoRankIsOverdueWhereNobodyWaits) {
    for (HangSample& sample : ranks_) {
        sample.progress_ns = 1;
        sample.slowest_unit = 1s;
    }
    const auto silent = watch(100);
    ASSERT_TRUE(silent) << "all ranks compute in a long evaluation, for example";
    EXPECT_FALSE(silent->is_overdue);
    for (HangSample& sample : ranks_) sample.step = sample.rank == 2 ? 811 : 812;
    const auto behind = watch(100);
    ASSERT_TRUE(behind);
    EXPECT_TRUE(behind->is_overdue);
}

TEST_F(HangDetection, ANewGenerationBeginsAnew) {
    works_ = false;
    EXPECT_FALSE(watch(8));
    detector_.reset();
    EXPECT_FALSE(watch(10));
}

}  // namespace
}  // namespace ddprun
