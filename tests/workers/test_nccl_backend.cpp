#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "ddp/worker/device_error.h"
#include "tests/support/environment_variable.h"
#include "tests/workers/forked_child.h"
#include "tests/workers/nccl_world.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

/// The rank's part of every failure test: a barrier, then collective #2, which FAKE_NCCL disturbs.
void reduce_once(NcclRank& rank) {
    Buffer buffer = rank.filled({1, 2, 3, 4});
    rank.group.all_reduce(buffer).synchronize();
}

TEST(NcclBackend, EveryCollectiveGivesTheRightValues) {
    expect_all_well(failures_of(3, [](NcclRank& rank) {
        const auto r = static_cast<float>(rank.group.rank());
        const Buffer sum = rank.filled({r, 10 * r});
        rank.group.all_reduce(sum).synchronize();
        EXPECT_THAT(rank.values_of(sum), ElementsAre(3, 30));

        const Buffer mean = rank.filled({r, 10 * r});
        rank.group.all_reduce(mean, ReduceOp::Avg).synchronize();
        EXPECT_THAT(rank.values_of(mean), ElementsAre(1, 10));

        const Buffer sent = rank.filled({r, r + 5});
        rank.group.broadcast(sent, 2).synchronize();
        EXPECT_THAT(rank.values_of(sent), ElementsAre(2, 7));

        const Buffer one = rank.filled({r});
        const Buffer all = rank.filled({0, 0, 0});
        rank.group.all_gather(all, one).synchronize();
        EXPECT_THAT(rank.values_of(all), ElementsAre(0, 1, 2));

        rank.group.reduce_scatter(one, all).synchronize();
        EXPECT_THAT(rank.values_of(one), ElementsAre(3 * r));
    }));
}

TEST(NcclBackend, MessagesOfAnyLengthReachEveryRank) {
    expect_all_well(failures_of(3, [](NcclRank& rank) {
        const std::string mine(static_cast<std::size_t>(rank.group.rank()) * 300, 'x');
        EXPECT_THAT(rank.group.all_gather_bytes(mine),
                    ElementsAre("", std::string(300, 'x'), std::string(600, 'x')));
        EXPECT_THAT(rank.group.all_gather_bytes(""), ElementsAre("", "", ""));
    }));
}

TEST(NcclBackend, WaitBlocksTheStreamAndNotTheThread) {
    expect_all_well(failures_of(2,
                                [](NcclRank& rank) {
                                    const Buffer buffer = rank.filled({1});
                                    Work work = rank.group.all_reduce(buffer);
                                    work.wait();
                                    EXPECT_FALSE(work.done());
                                    work.synchronize();
                                    EXPECT_THAT(rank.values_of(buffer), ElementsAre(2));
                                },
                                {.faults = "1:2:delay:300"}));
}

/// Makes events tell the watchdog that nothing has ended.
class BlindWatchdog {
  public:
    BlindWatchdog() { blind("ddp-watchdog"); }
    ~BlindWatchdog() { blind(nullptr); }
    BlindWatchdog(const BlindWatchdog&) = delete;
    BlindWatchdog& operator=(const BlindWatchdog&) = delete;

  private:
    static void blind(const char* thread) {
        reinterpret_cast<void (*)(const char*)>(fake_library().resolve("fake_cuda_blind"))(thread);
    }
};

TEST(NcclBackend, SynchronizePollsTheDeviceInsteadOfWaitingForTheWatchdog) {
    const BlindWatchdog blind;
    const auto failures =
        failures_of(2,
                    [](NcclRank& rank) {
                        rank.group.barrier().wait();
                        EXPECT_THAT(rank.group.all_gather_bytes("x"), ElementsAre("x", "x"));
                        const Buffer buffer = rank.filled({1, 2});
                        Work first = rank.group.all_reduce(buffer), second = rank.group.all_reduce(buffer);
                        second.synchronize();
                        EXPECT_TRUE(first.done()) << "it came earlier";
                        EXPECT_THAT(rank.values_of(buffer), ElementsAre(4, 8));
                    },
                    {.faults = "1:3:delay:50", .timeout = std::chrono::seconds(10)});
    expect_all_well(failures);
}

TEST(NcclBackend, WorksOnAnNcclWithoutAnyOptionalEntryPoint) {
    expect_all_well(failures_of(
        2, reduce_once,
        {.hidden = {"ncclGetLastError", "ncclCommInitRankScalable", "ncclMemAlloc", "ncclMemFree"}}));
}

TEST(NcclBackend, ShowsItsCollectiveToTheLauncher) {
    expect_all_well(failures_of(2, [](NcclRank& rank) {
        reduce_once(rank);
        const ddprun::RankLine& line = rank.segment.line(static_cast<std::uint32_t>(rank.group.rank()));
        EXPECT_EQ(line.started_seq.load(), 2u);
        EXPECT_EQ(line.finished_seq.load(), 2u);
        EXPECT_EQ(line.bytes.load(), 16u);
        EXPECT_GT(rank.group.communication_seconds(), 0);
    }));
}

TEST(NcclBackend, DescribesItsLibraryAndDevice) {
    expect_all_well(failures_of(1, [](NcclRank& rank) {
        EXPECT_EQ(rank.group.describe(),
                  "nccl (NCCL 2.28.9, CUDA runtime 13.0, driver 13.1, rank 0 on device 0)");
    }));
}

TEST(NcclBackend, RefusesHostMemoryAndOtherDevices) {
    const auto failures = failures_of(1, [](NcclRank& rank) {
        float value = 0;
        (void)rank.group.all_reduce({&value, 1, DType::F32, {}});
    });
    EXPECT_EQ(
        message_of(failures[0]),
        "all_reduce: rank 0's nccl backend takes memory of CUDA device 0, the buffer is in host memory");
}

TEST(NcclBackend, RefusesAnEnvironmentThatWouldDisableTimeOuts) {
    ::setenv("NCCL_COMM_BLOCKING", "1", 1);
    const auto failures = failures_of(1, [](NcclRank&) {});
    ::unsetenv("NCCL_COMM_BLOCKING");
    EXPECT_TRUE(is<InvalidInput>(failures[0]));
    EXPECT_EQ(message_of(failures[0]),
              "NCCL_COMM_BLOCKING=1: calls that block inside NCCL would have no time-out: unset it");
}

TEST(NcclBackend, TakesCallsFromAThreadOnAnotherDeviceAndKeepsItsDevice) {
    expect_all_well(failures_of(2, [&](NcclRank& rank) {
        const int other = rank.group.device().index + 2;
        ASSERT_EQ(cudaSetDevice(other), cudaSuccess);
        const Buffer buffer = rank.filled({1, 2});
        const std::span<std::byte> shared = rank.group.allocate_shared(64);
        rank.group.all_reduce({shared.data(), 16, DType::F32, rank.group.device()}).wait();
        rank.group.all_reduce(buffer).wait();
        EXPECT_EQ(rank.group.all_gather_bytes("ab").size(), 2U);
        const auto part = rank.group.split(0, 0);
        part->all_reduce(buffer).synchronize();
        EXPECT_EQ(rank.values_of(buffer), (std::vector<float>{4, 8}));
        int device = -1;
        cudaGetDevice(&device);
        EXPECT_EQ(device, other);
    }));
}

TEST(NcclBackend, SaysHowManyWorkersFitWhenThereAreTooFewDevices) {
    ::setenv("FAKE_CUDA_DEVICES", "1", 1);
    ::setenv("CUDA_VISIBLE_DEVICES", "4", 1);
    const auto failures = failures_of(2, reduce_once, {.timeout = std::chrono::milliseconds(300)});
    ::unsetenv("FAKE_CUDA_DEVICES");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    EXPECT_EQ(message_of(failures[1]),
              "rank 1: local rank 1 needs CUDA device 1, 1 device is visible (CUDA_VISIBLE_DEVICES=4): start "
              "at most 1 "
              "workers here");
}

TEST(NcclBackend, SaysThatTheMachineHasNoDevice) {
    ::setenv("FAKE_CUDA_DEVICES", "0", 1);
    const auto failures = failures_of(1, reduce_once);
    ::unsetenv("FAKE_CUDA_DEVICES");
    EXPECT_EQ(
        message_of(failures[0]),
        "rank 0: counting CUDA devices: no CUDA-capable device is detected (CUDA error 100): no device is "
        "visible: see CUDA_VISIBLE_DEVICES and the allocation");
}

// Failures while joining.

TEST(NcclJoin, ExplainsEveryErrorCode) {
    for (int code = 1; code <= 6; ++code) {
        for (const char* what : {"fail", "async"}) {
            const auto failures =
                failures_of(1, reduce_once, {.faults = fmt::format("0:init:{}:{}", what, code)});
            EXPECT_TRUE(is<Error>(failures[0]));
            EXPECT_THAT(message_of(failures[0]),
                        AllOf(StartsWith("rank 0: joining NCCL communicator 0 of 1 ranks: "),
                              HasSubstr("(" + nccl::name_of(static_cast<nccl::Code>(code)) + ")"),
                              HasSubstr("NCCL_DEBUG=INFO")));
        }
    }
}

TEST(NcclJoin, ExplainsAnIdThatCannotBeMade) {
    const auto failures =
        failures_of(2, reduce_once, {.faults = "0:id:fail:2", .timeout = std::chrono::milliseconds(300)});
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("ncclGetUniqueId: unhandled system error (ncclSystemError)"));
    EXPECT_TRUE(is<TimeoutError>(failures[1]));
    EXPECT_EQ(
        message_of(failures[1]),
        "rank 1: joining a world of 2: rank 0 did not publish its NCCL unique id (nccl/0/0/0) within the "
        "time-out");
}

TEST(NcclJoin, EndsAtTheTimeOutWhenARankHangs) {
    const auto failures =
        failures_of(3, reduce_once, {.faults = "1:init:hang", .timeout = std::chrono::milliseconds(400)});
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<TimeoutError>(failure));
        EXPECT_THAT(message_of(failure),
                    HasSubstr("joining NCCL communicator 0 of 3 ranks: NCCL was not done"));
    }
}

TEST(NcclJoin, EndsWithTheGeneration) {
    const auto failures =
        failures_of(2, reduce_once, {.faults = "0:init:hang,1:init:hang", .generation = 4, .lost_rank = 1});
    EXPECT_TRUE(is<PeerLostError>(failures[0]));
    EXPECT_EQ(message_of(failures[0]),
              "rank 0: joining NCCL communicator 0 of 2 ranks: rank 1 was lost, the launcher "
              "ended generation 4");
}

TEST(NcclJoin, AnErrorBehindALostRankNamesTheRank) {
    const auto failures =
        failures_of(2, reduce_once, {.faults = "0:init:fail:2", .generation = 4, .lost_rank = 1});
    EXPECT_TRUE(is<PeerLostError>(failures[0])) << message_of(failures[0]);
    EXPECT_THAT(message_of(failures[0]), HasSubstr("rank 1 was lost, the launcher ended generation 4"));
}

// Failures in a collective. Number 1 is the barrier of `filled`.

TEST(NcclWatchdog, AnErrorBeforeTheLaunchersWordOfALostRankNamesTheRank) {
    note_device_error(DeviceLibrary::Nccl, "");
    const auto failures = failures_of(2,
                                      [](NcclRank& rank) {
                                          if (rank.group.rank() == 0) return reduce_once(rank);
                                          (void)rank.filled({1, 2, 3, 4});
                                          while (*last_device_error(DeviceLibrary::Nccl) == '\0')
                                              std::this_thread::yield();
                                          rank.segment.header().aborted = 2;
                                      },
                                      {.faults = "0:2:async:2", .generation = 4});
    EXPECT_TRUE(is<PeerLostError>(failures[0])) << message_of(failures[0]);
    EXPECT_THAT(message_of(failures[0]), HasSubstr("rank 1 was lost, the launcher ended generation 4"));
}

TEST(NcclWatchdog, PassesEveryAsynchronousErrorToTheWaiterWithRankCollectiveAndNumber) {
    for (int code = 1; code <= 6; ++code) {
        const auto begin = Clock::now();
        const auto failures = failures_of(1, reduce_once, {.faults = fmt::format("0:2:async:{}", code)});
        EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
        EXPECT_THAT(message_of(failures[0]),
                    AllOf(StartsWith("rank 0: all_reduce #2 (4 float32, 16 B, sum): "),
                          HasSubstr("(" + nccl::name_of(static_cast<nccl::Code>(code)) +
                                    "): the fake's last words")));
        EXPECT_EQ(is<PeerLostError>(failures[0]), code == 6);
    }
}

TEST(NcclWatchdog, PassesEveryReturnedErrorToTheWaiter) {
    for (int code = 1; code <= 6; ++code) {
        const auto failures = failures_of(1, reduce_once, {.faults = fmt::format("0:2:fail:{}", code)});
        EXPECT_THAT(message_of(failures[0]),
                    AllOf(StartsWith("rank 0: all_reduce #2"),
                          HasSubstr("(" + nccl::name_of(static_cast<nccl::Code>(code)) + ")")));
    }
}

TEST(NcclWatchdog, EndsAHangingCollectiveAtItsTimeOutAndShowsThePeersActivity) {
    const auto failures =
        failures_of(2, reduce_once, {.faults = "1:2:hang", .timeout = std::chrono::milliseconds(300)});
    EXPECT_TRUE(is<TimeoutError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]),
                AllOf(HasSubstr("rank 0: all_reduce #2"), HasSubstr("did not finish within"),
                      HasSubstr("rank 1 is in all_reduce #2")));
}

TEST(NcclWatchdog, EndsACollectiveAtATimeOutOfItsOwn) {
    const auto failures =
        failures_of(2,
                    [](NcclRank& rank) {
                        const Buffer buffer = rank.filled({1});
                        const TimeoutScope limit(rank.group, std::chrono::milliseconds(300));
                        rank.group.all_reduce(buffer).synchronize();
                    },
                    {.faults = "1:2:hang", .timeout = std::chrono::minutes(10)});
    EXPECT_THAT(message_of(failures[0]), HasSubstr("did not finish within 300 ms"));
}

TEST(NcclWatchdog, EndsACallThatNcclNeverFinishesAtTheTimeOut) {
    const auto failures =
        failures_of(1, reduce_once, {.faults = "0:2:stuck", .timeout = std::chrono::milliseconds(300)});
    EXPECT_TRUE(is<TimeoutError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("all_reduce #2 (4 float32, 16 B, sum): NCCL did not start it"));
}

TEST(NcclWatchdog, EndsACollectiveWithTheGenerationLongBeforeItsTimeOut) {
    for (const char* fault : {"1:2:hang", "0:2:stuck,1:2:hang"}) {
        const auto failures =
            failures_of(2,
                        [](NcclRank& rank) {
                            const Buffer buffer = rank.filled({1});
                            if (rank.group.rank() == 1) {
                                (void)rank.group.all_reduce(buffer);  // its peer does not call it
                                // Until the watchdog has seen its end, a loss is that of the barrier.
                                wait_until_reached(rank.segment.line(0).finished_seq, 1);
                                wait_until_reached(rank.segment.line(0).started_seq, 2);
                                rank.segment.header().aborted = 2;  // rank 1, plus one
                                return;
                            }
                            const auto begin = Clock::now();
                            EXPECT_THROW(rank.group.all_reduce(buffer).synchronize(), PeerLostError);
                            EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
                            rank.group.all_reduce(buffer).wait();  // a broken group throws the same again
                        },
                        {.faults = fault, .generation = 4});
        EXPECT_TRUE(is<PeerLostError>(failures[0]));
        EXPECT_THAT(message_of(failures[0]),
                    AllOf(HasSubstr("rank 0: all_reduce #2"),
                          HasSubstr("rank 1 was lost, the launcher ended generation 4")));
    }
}

TEST(NcclWatchdog, NamesADeviceFault) {
    const auto failures = failures_of(1, reduce_once, {.faults = "0:2:cuda:700"});
    EXPECT_EQ(message_of(failures[0]),
              "rank 0: all_reduce #2 (4 float32, 16 B, sum): an illegal memory access was encountered (CUDA "
              "error 700): a kernel crashed, this one or one before it; compute-sanitizer finds where");
}

TEST(NcclWatchdog, NamesALostDeviceAndTheGroupIsDestroyed) {
    std::optional<LostDevice> lost;
    const auto failures = failures_of(1, [&](NcclRank& rank) {
        const Buffer buffer = rank.filled({1});
        lost.emplace();
        rank.group.all_reduce(buffer).synchronize();
    });
    lost.reset();
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("an illegal memory access was encountered (CUDA error 700)"));
}

TEST(NcclWatchdog, SaysThatAnAbortDidNotReturnAndDoesNotBlockTheWaiter) {
    const auto begin = Clock::now();
    const auto failures = failures_of(1, reduce_once, {.faults = "0:2:async:6,0:abort:hang"});
    EXPECT_TRUE(is<PeerLostError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("; ncclCommAbort did not return within 500 ms: kernels may still use the buffers"));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

// Failures while shutting down: one line on standard error, and an end.

TEST(NcclLeaving, WaitsForAPeerUntilTheTimeOut) {
    ::testing::internal::CaptureStderr();
    expect_all_well(failures_of(2, reduce_once,
                                {.faults = "1:finalize:hang", .timeout = std::chrono::milliseconds(500)}));
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr("ddp: rank 0: leaving NCCL communicator 0: it did not end within the time-out; "
                          "aborted it\n"));
}

TEST(NcclLeaving, OnlyAbortsAfterAPeersAbortFromNccl231OnWhereFinalizeDoesNotReturn) {
    const Variable version("FAKE_NCCL_VERSION", "23100");
    ::testing::internal::CaptureStderr();
    std::atomic<bool> is_over = false;
    const auto failures = failures_of(2,
                                      [&](NcclRank& rank) {
                                          const Buffer buffer = rank.filled({1});
                                          if (rank.group.rank() == 1) {
                                              while (!is_over) std::this_thread::yield();
                                              return;  // a survivor that shuts down normally
                                          }
                                          EXPECT_THROW(rank.group.all_reduce(buffer).synchronize(), Error);
                                          is_over = true;
                                      },
                                      {.faults = "0:2:fail:3", .timeout = std::chrono::milliseconds(500)});
    expect_all_well(failures);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(),
              "ddp: rank 1: leaving NCCL communicator 0: ncclCommFinalize did not return; aborted it\n");
}

TEST(NcclLeaving, PrintsAnError) {
    ::testing::internal::CaptureStderr();
    expect_all_well(failures_of(1, reduce_once, {.faults = "0:finalize:fail:3"}));
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("internal error (ncclInternalError)"));
}

TEST(NcclLeaving, PrintsNothingOnSuccess) {
    ::testing::internal::CaptureStderr();
    expect_all_well(failures_of(2, reduce_once));
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Nccl, RefusesAForkedChildThatExitsWithOrWithoutDestroyingTheGroup) {
    expect_all_well(failures_of(2, [](NcclRank& rank) {
        for (const InChild what : {InChild::DestroysGroup, InChild::LeavesGroup}) {
            rank.group.barrier().synchronize();
            if (rank.group.rank() == 0) {
                EXPECT_EQ(misdeeds_of_child(rank.group, what), "");
            }
            rank.group.barrier().synchronize();
        }
    }));
}

}  // namespace
