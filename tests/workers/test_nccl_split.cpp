#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/workers/nccl_world.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

void split_by_parity(NcclRank& rank) {
    const int me = rank.group.rank();
    const auto part = rank.group.split(me % 2, -me);
    const int size = me % 2 == 0 ? 3 : 2;
    EXPECT_EQ(part->size(), size);
    EXPECT_EQ(part->rank(), size - 1 - me / 2);
    const Buffer sum = rank.filled({static_cast<float>(me)});
    part->all_reduce(sum).synchronize();
    EXPECT_THAT(rank.values_of(sum), ElementsAre(me % 2 == 0 ? 0 + 2 + 4 : 1 + 3));
    const Buffer first = rank.filled({static_cast<float>(me)});
    part->broadcast(first, 0).synchronize();
    EXPECT_THAT(rank.values_of(first), ElementsAre(me % 2 == 0 ? 4 : 3));
}

TEST(NcclSplit, MakesAGroupPerColorInTheOrderOfTheKeys) { expect_all_well(failures_of(5, split_by_parity)); }

TEST(NcclSplit, WorksOnAnNcclThatCannotSplit) {
    expect_all_well(failures_of(5, split_by_parity, {.hidden = {"ncclCommSplit"}}));
}

TEST(NcclSplit, GivesRanksOfANegativeColorNoGroup) {
    for (const char* hidden : {"", "ncclCommSplit"}) {
        expect_all_well(failures_of(3,
                                    [](NcclRank& rank) {
                                        const bool out = rank.group.rank() == 1;
                                        EXPECT_EQ(rank.group.split(out ? -1 : 0, 0) == nullptr, out);
                                    },
                                    {.hidden = {hidden}}));
    }
}

TEST(NcclSplit, OutlivesItsParentAndCanBeSplitAgain) {
    expect_all_well(failures_of(4, [](NcclRank& rank) {
        auto half = rank.group.split(rank.group.rank() / 2, 0);
        const auto single = half->split(half->rank(), 0);
        half.reset();
        EXPECT_THAT(single->all_gather_bytes("x"), ElementsAre("x"));
        EXPECT_EQ(single->device(), rank.group.device());
    }));
}

TEST(NcclSplit, DoesNotShowItsNumbersToTheLauncher) {
    expect_all_well(failures_of(2, [](NcclRank& rank) {
        const auto part = rank.group.split(rank.group.rank(), 0);
        const ddprun::RankLine& line = rank.segment.line(static_cast<std::uint32_t>(rank.group.rank()));
        const std::uint64_t before = line.started_seq;
        part->barrier().wait();
        EXPECT_EQ(line.started_seq, before);
    }));
}

TEST(NcclSplit, ExplainsEveryErrorCodeAndBreaksTheGroup) {
    for (int code = 1; code <= 6; ++code) {
        for (const char* what : {"fail", "async"}) {
            const auto failures = failures_of(1,
                                              [](NcclRank& rank) {
                                                  EXPECT_THROW(rank.group.split(0, 0), Error);
                                                  rank.group.barrier().wait();
                                              },
                                              {.faults = fmt::format("0:split:{}:{}", what, code)});
            EXPECT_THAT(message_of(failures[0]),
                        AllOf(StartsWith("rank 0: splitting NCCL communicator 0: "),
                              HasSubstr("(" + nccl::name_of(static_cast<nccl::Code>(code)) + ")")));
        }
    }
}

TEST(NcclSplit, EndsAtTheTimeOutWhenARankHangs) {
    const auto failures = failures_of(3, [](NcclRank& rank) { rank.group.split(0, 0); },
                                      {.faults = "1:split:hang", .timeout = std::chrono::milliseconds(400)});
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<TimeoutError>(failure));
        EXPECT_THAT(message_of(failure),
                    HasSubstr("splitting NCCL communicator 0: NCCL was not done within the time-out"));
    }
}

TEST(NcclSplit, EndsWithTheGenerationLongBeforeItsTimeOut) {
    Clock::time_point ended;
    const auto failures = failures_of(2,
                                      [&](NcclRank& rank) {
                                          if (rank.group.rank() == 1) {
                                              // the first part of split; then this rank is gone
                                              rank.group.all_gather_bytes(std::string(8, '\0'));
                                              ended = Clock::now();
                                              rank.segment.header().aborted = 2;
                                              return;
                                          }
                                          rank.group.split(0, 0);
                                      },
                                      {.generation = 4});
    EXPECT_LT(Clock::now() - ended, std::chrono::seconds(10));
    EXPECT_TRUE(is<PeerLostError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]), HasSubstr("rank 1 was lost, the launcher ended generation 4"));
}

TEST(NcclSplit, NamesTheRankOfTheWorldInAPartsFailureAndKeepsTheParent) {
    expect_all_well(failures_of(
        2,
        [](NcclRank& rank) {
            const int me = rank.group.rank();
            const auto part = rank.group.split(0, -me);
            try {
                part->barrier().wait();
                ADD_FAILURE() << "the fake was told to fail";
            } catch (const Error& error) {
                EXPECT_THAT(error.what(), StartsWith(fmt::format("rank {}: barrier #1: internal error", me)));
            }
            rank.group.barrier().wait();
        },
        {.faults = "0:s1:fail:3,1:s1:fail:3"}));
}

TEST(NcclSplit, TellsAllMembersOfAnIdThatCannotBeMade) {
    const auto failures = failures_of(2,
                                      [](NcclRank& rank) {
                                          ::setenv("FAKE_NCCL", "0:id:fail:2", 1);
                                          rank.group.barrier().wait();
                                          rank.group.split(0, 0);
                                      },
                                      {.hidden = {"ncclCommSplit"}});
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("ncclGetUniqueId of rank 0 failed: unhandled system error"));
    EXPECT_THAT(message_of(failures[1]), HasSubstr("ncclGetUniqueId of rank 0 failed"));
}

}  // namespace
