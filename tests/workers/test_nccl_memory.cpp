#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/workers/nccl_world.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

int count_of(const char* name) { return reinterpret_cast<int (*)()>(fake_library().resolve(name))(); }

/// Every rank allocates, reduces in that memory, and shuts down; nothing may stay registered, or be freed too
/// early.
struct Counters {
    bool symmetric = false;
    int registered = 0;  ///< number of registrations while the group lived
};
Counters allocate_in(const NcclWorldOptions& options, int ranks = 2) {
    Counters seen;
    std::atomic<int> symmetric_ranks{0};
    const int misuses = count_of("fake_nccl_misuses");
    const auto failures = failures_of(
        ranks,
        [&](NcclRank& rank) {
            const auto memory = rank.group.allocate_shared(2 * sizeof(float));
            const std::span values(reinterpret_cast<float*>(memory.data()), 2);
            values[1] = 2;
            rank.group.all_reduce({values.data(), 2, DType::F32, rank.group.device()}).synchronize();
            EXPECT_EQ(values[1], 2.0F * static_cast<float>(ranks));
            symmetric_ranks += rank.group.shared_memory_is_symmetric() ? 1 : 0;
            rank.group.barrier().wait();
            if (rank.group.rank() == 0) seen.registered = count_of("fake_nccl_registered");
            rank.group.barrier().wait();
        },
        options);
    for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
    EXPECT_TRUE(symmetric_ranks == 0 || symmetric_ranks == ranks) << "ranks disagree about symmetry";
    seen.symmetric = symmetric_ranks == ranks;
    EXPECT_EQ(count_of("fake_nccl_registered"), 0);
    EXPECT_EQ(count_of("fake_nccl_misuses"), misuses);
    return seen;
}

TEST(NcclMemory, IsASymmetricWindowOnAllRanksAndDeregisteredBeforeItIsFreed) {
    const Counters seen = allocate_in({});
    EXPECT_TRUE(seen.symmetric);
    EXPECT_EQ(seen.registered, 2);
}

TEST(NcclMemory, IsARegisteredBufferOnAnNcclWithoutWindows) {
    for (const char* hidden : {"ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclMemAlloc"}) {
        const Counters seen = allocate_in({.hidden = {hidden}});
        EXPECT_FALSE(seen.symmetric) << hidden;
        EXPECT_EQ(seen.registered, 2) << hidden;
    }
}

TEST(NcclMemory, IsNotRegisteredByAnNcclWithoutRegistration) {
    for (const char* hidden : {"ncclCommRegister", "ncclCommDeregister"}) {
        const Counters seen = allocate_in({.hidden = {hidden, "ncclCommWindowRegister"}});
        EXPECT_FALSE(seen.symmetric) << hidden;
        EXPECT_EQ(seen.registered, 0) << hidden;
    }
}

TEST(NcclMemory, IsSymmetricOnNoRankWhenOneGotNoWindow) {
    const Counters seen = allocate_in({.faults = "1:window:null"});
    EXPECT_FALSE(seen.symmetric);
    EXPECT_EQ(seen.registered, 3) << "rank 0's window, and a buffer on each rank";
}

TEST(NcclMemory, IsUsedWhenNcclRefusesToRegisterIt) {
    EXPECT_FALSE(allocate_in({.faults = "0:window:fail:4"}, 1).symmetric);
    const Counters seen = allocate_in({.faults = "0:window:fail:4,0:buffer:fail:5"}, 1);
    EXPECT_FALSE(seen.symmetric);
    EXPECT_EQ(seen.registered, 0);
}

TEST(NcclMemory, BreaksTheGroupWithTheReasonWhenItsRegistrationFailsLater) {
    for (const char* when : {"async", "early"}) {
        for (int code = 1; code <= 6; ++code) {
            const auto failures = failures_of(1, [](NcclRank& rank) { rank.group.allocate_shared(4096); },
                                              {.faults = fmt::format("0:window:{}:{}", when, code)});
            EXPECT_THAT(message_of(failures[0]),
                        AllOf(HasSubstr("rank 0: registering memory with NCCL communicator 0: "),
                              HasSubstr("(" + nccl::name_of(static_cast<nccl::Code>(code)) + ")")));
        }
    }
    EXPECT_EQ(count_of("fake_nccl_registered"), 0);
}

TEST(NcclMemory, EndsAtTheTimeOutWhenItsRegistrationHangs) {
    const auto failures = failures_of(2, [](NcclRank& rank) { rank.group.allocate_shared(4096); },
                                      {.faults = "1:window:hang", .timeout = std::chrono::milliseconds(400)});
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<TimeoutError>(failure)) << message_of(failure);
        EXPECT_THAT(message_of(failure), HasSubstr("registering memory with NCCL communicator 0"));
    }
}

TEST(NcclMemory, IsNotFreedBeforeAnAbortHasReturned) {
    const int misuses = count_of("fake_nccl_misuses");
    const auto failures = failures_of(
        1,
        [](NcclRank& rank) {
            const auto memory = rank.group.allocate_shared(4 * sizeof(float));
            for (;;) rank.group.all_reduce({memory.data(), 4, DType::F32, rank.group.device()}).synchronize();
        },
        {.faults = "0:4:async:6,0:abort:delay:1500"});
    EXPECT_TRUE(is<PeerLostError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]), HasSubstr("do not free them before the process ends"));
    while (count_of("fake_nccl_registered") > 0) std::this_thread::yield();  // until the abort has returned
    EXPECT_EQ(count_of("fake_nccl_misuses"), misuses) << "registered memory was freed";
}

TEST(NcclMemory, IsRegisteredWithItsSubGroup) {
    const auto failures = failures_of(2, [](NcclRank& rank) {
        const auto part = rank.group.split(0, 0);
        EXPECT_FALSE(part->shared_memory_is_symmetric());
        part->allocate_shared(100);
        EXPECT_TRUE(part->shared_memory_is_symmetric());
        EXPECT_FALSE(rank.group.shared_memory_is_symmetric());
    });
    for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
    EXPECT_EQ(count_of("fake_nccl_registered"), 0);
}

}  // namespace
