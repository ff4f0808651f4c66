#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include "ddp/group/create.h"
#include "ddp/testing.h"
#include "env/worker_env.h"
#include "tests/support/environment_variable.h"
#include "tests/workers/forked_child.h"
#include "tests/workers/nccl_world.h"
#include "tests/workers/reference_reduction.h"
#include "tests/workers/staged_world.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using reference::Bytes;
using reference::joined;
using reference::slice;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

using reference::kTypes;

/// The fake's device memory, which is host memory.
Buffer device_copy(ProcessGroup& group, const Bytes& bytes, DType type) {
    const std::span<std::byte> memory = group.allocate_shared(bytes.size());
    std::copy(bytes.begin(), bytes.end(), memory.begin());
    return {memory.data(), bytes.size() / size_of(type), type, group.device()};
}
Bytes bytes_of(const Buffer& buffer) {
    const auto* const first = static_cast<const std::byte*>(buffer.data);
    return {first, first + buffer.bytes()};
}

std::vector<Bytes> inputs_of(int ranks, DType type, std::size_t count) {
    std::vector<Bytes> all;
    for (int r = 0; r < ranks; ++r)
        all.push_back(reference::random_values(type, count, 90 + static_cast<unsigned>(r)));
    return all;
}

TEST(Staged, GivesTheBitsOfTheCpuBackendWithAnyNumberOfRanksOnOneDevice) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        expect_all_well(staged_failures_of(ranks, [ranks](ProcessGroup& group) {
            for (const std::size_t count : {0UL, 1UL, 1025UL, 70'001UL}) {
                const auto inputs = inputs_of(ranks, DType::F32, count);
                const Buffer mine =
                    device_copy(group, inputs[static_cast<std::size_t>(group.rank())], DType::F32);
                group.all_reduce(mine).synchronize();
                EXPECT_EQ(bytes_of(mine), reference::reduce(inputs, DType::F32, ReduceOp::Sum)) << count;
            }
        }));
    }
}

/// Memory that the group has not allocated: it goes through the pool.
struct Foreign {
    void* address = nullptr;
    explicit Foreign(std::size_t bytes) { cudaMalloc(&address, bytes); }
    ~Foreign() { cudaFree(address); }
    Foreign(const Foreign&) = delete;
    Foreign& operator=(const Foreign&) = delete;
};

TEST(Staged, TakesDeviceMemoryOfTheProgram) {
    expect_all_well(staged_failures_of(3, [](ProcessGroup& group) {
        constexpr std::size_t kCount = 5001;
        const Foreign memory(kCount * sizeof(float));
        for (int round = 0; round < 5; ++round) {
            const auto inputs = inputs_of(3, DType::F32, kCount);
            std::memcpy(memory.address, inputs[static_cast<std::size_t>(group.rank())].data(),
                        kCount * sizeof(float));
            const Buffer mine{memory.address, kCount, DType::F32, group.device()};
            group.all_reduce(mine, ReduceOp::Avg).synchronize();
            EXPECT_EQ(bytes_of(mine), reference::reduce(inputs, DType::F32, ReduceOp::Avg));
        }
    }));
}

TEST(Staged, RunsEveryCollectiveWithEveryType) {
    expect_all_well(staged_failures_of(3, [](ProcessGroup& group) {
        const int me = group.rank();
        constexpr std::size_t kCount = 313;
        for (const DType type : kTypes) {
            const std::size_t each = kCount * size_of(type);
            const auto inputs = inputs_of(3, type, 3 * kCount);
            const Bytes& mine = inputs[static_cast<std::size_t>(me)];
            const ReduceOp op = is_reducible(type, ReduceOp::Sum) ? ReduceOp::Sum : ReduceOp::Max;
            const Bytes sum = reference::reduce(inputs, type, op);
            std::vector<Bytes> firsts, own_slices;
            for (const Bytes& input : inputs) {
                firsts.push_back(slice(input, 0, each));
                own_slices.push_back(slice(input, me, each));
            }
            const Buffer whole = device_copy(group, mine, type),
                         all = device_copy(group, Bytes(mine.size()), type);
            const Buffer part = device_copy(group, slice(mine, 0, each), type);

            group.all_gather(all, part).synchronize();
            EXPECT_EQ(bytes_of(all), joined(firsts)) << name_of(type);
            group.all_to_all(all, whole).synchronize();
            EXPECT_EQ(bytes_of(all), joined(own_slices)) << name_of(type);
            const Counts counts(3, kCount);
            group.all_gather_v(all, part, counts).synchronize();
            EXPECT_EQ(bytes_of(all), joined(firsts)) << name_of(type);
            group.all_to_all_v(all, counts, whole, counts).synchronize();
            EXPECT_EQ(bytes_of(all), joined(own_slices)) << name_of(type);
            const Buffer reduced = device_copy(group, Bytes(each), type);
            group.reduce_scatter_v(reduced, whole, counts, op).synchronize();
            EXPECT_EQ(bytes_of(reduced), slice(sum, me, each)) << name_of(type);
            group.gather(me == 1 ? whole : Buffer{}, part, 1).synchronize();
            EXPECT_EQ(bytes_of(whole), me == 1 ? joined(firsts) : mine) << name_of(type);
            std::copy(mine.begin(), mine.end(), static_cast<std::byte*>(whole.data));
            group.reduce_scatter(part, whole, op).synchronize();
            EXPECT_EQ(bytes_of(part), slice(sum, me, each)) << name_of(type);
            group.scatter(part, me == 2 ? whole : Buffer{}, 2).synchronize();
            EXPECT_EQ(bytes_of(part), slice(inputs[2], me, each)) << name_of(type);
            const Buffer apart = device_copy(group, Bytes(mine.size()), type);
            group.all_reduce(apart, whole, op).synchronize();
            EXPECT_EQ(bytes_of(apart), sum) << name_of(type);
            EXPECT_EQ(bytes_of(whole), mine) << name_of(type);
            group.reduce(whole, 0, op).synchronize();
            EXPECT_EQ(bytes_of(whole), me == 0 ? sum : mine) << name_of(type);
            group.broadcast(whole, 0).synchronize();
            EXPECT_EQ(bytes_of(whole), sum) << name_of(type);
            const Message in{Message::Direction::Recv, reduced, (me + 2) % 3},
                out{Message::Direction::Send, part, (me + 1) % 3};
            std::copy_n(mine.begin(), each, static_cast<std::byte*>(part.data));
            group.batch_send_recv({out, in}).synchronize();
            EXPECT_EQ(bytes_of(reduced), firsts[static_cast<std::size_t>((me + 2) % 3)]) << name_of(type);
            if (me == 0) group.send(all, 2).synchronize();
            if (me == 2) {
                group.recv(whole, 0).synchronize();
                std::vector<Bytes> zeros;
                for (const Bytes& input : inputs) zeros.push_back(slice(input, 0, each));
                EXPECT_EQ(bytes_of(whole), joined(zeros)) << name_of(type);
            }
        }
        EXPECT_THAT(group.all_gather_bytes(std::string(1, static_cast<char>('a' + me))),
                    ElementsAre("a", "b", "c"));
    }));
}

TEST(Staged, RunsCoalescedCallsAsOne) {
    expect_all_well(staged_failures_of(2, [](ProcessGroup& group) {
        const auto inputs = inputs_of(2, DType::I32, 100);
        const Buffer sum = device_copy(group, inputs[static_cast<std::size_t>(group.rank())], DType::I32),
                     root = device_copy(group, inputs[static_cast<std::size_t>(group.rank())], DType::I32);
        group
            .coalesced([&] {
                (void)group.all_reduce(sum);
                (void)group.broadcast(root, 1);
            })
            .synchronize();
        EXPECT_EQ(bytes_of(sum), reference::reduce(inputs, DType::I32, ReduceOp::Sum));
        EXPECT_EQ(bytes_of(root), inputs[1]);
    }));
}

TEST(Staged, MakesNoGroupWithoutTheOtherRanks) {
    expect_all_well(staged_failures_of(2, [](ProcessGroup& group) {
        EXPECT_THROW((void)group.create_part({0, 1}, "both"), InvalidInput);
    }));
}

TEST(Staged, RunsCollectivesOnOneBufferInOrderWithoutWaitsBetween) {
    expect_all_well(staged_failures_of(
        2,
        [](ProcessGroup& group) {
            const Buffer buffer =
                device_copy(group, reference::random_values(DType::I32, 20'000, 1), DType::I32);
            std::fill_n(static_cast<std::int32_t*>(buffer.data), buffer.count, 1);
            const Buffer half{buffer.data, buffer.count / 2, DType::I32, group.device()};
            Work last;
            for (int round = 0; round < 10; ++round) {
                (void)group.all_reduce(buffer);
                last = group.all_reduce(half);
            }
            last.synchronize();
            const auto* const values = static_cast<std::int32_t*>(buffer.data);
            EXPECT_EQ(values[0], 1 << 20);
            EXPECT_EQ(values[buffer.count - 1], 1 << 10);
        },
        {.own_streams = true}));
}

TEST(Staged, FollowsTheUsersStreamAndBlocksIt) {
    expect_all_well(staged_failures_of(2,
                                       [&](ProcessGroup& group) {
                                           const Buffer a = device_copy(group, Bytes(4000), DType::U8),
                                                        b = device_copy(group, Bytes(4000), DType::U8);
                                           const auto stream = static_cast<cuda::Stream>(group.stream());
                                           for (int round = 1; round < 20; ++round) {
                                               cudaMemsetAsync(a.data, round, 4000, stream);
                                               Work work = group.all_reduce(a);
                                               work.wait();
                                               cudaMemcpyAsync(b.data, a.data, 4000, cudaMemcpyDeviceToDevice,
                                                               stream);
                                           }
                                           cudaStreamSynchronize(stream);
                                           EXPECT_EQ(bytes_of(b), Bytes(4000, std::byte{38}));
                                       },
                                       {.own_streams = true}));
}

TEST(Staged, DoesNotBlockTheHostWhenItStartsACollective) {
    std::atomic<bool> may_start{false};
    expect_all_well(staged_failures_of(2,
                                       [&](ProcessGroup& group) {
                                           const Buffer buffer = device_copy(group, Bytes(4000), DType::U8);
                                           if (group.rank() == 1) may_start.wait(false);
                                           Work work = group.all_reduce(buffer);
                                           if (group.rank() == 0) {
                                               EXPECT_FALSE(work.done());
                                               may_start = true;
                                               may_start.notify_all();
                                           }
                                           work.synchronize();
                                           EXPECT_TRUE(work.done());
                                       },
                                       {.own_streams = true}));
}

TEST(Staged, SplitsIntoGroupsOfTheSameKind) {
    expect_all_well(staged_failures_of(4, [](ProcessGroup& world) {
        const auto pair = world.split(world.rank() % 2, -world.rank());
        EXPECT_EQ(pair->rank(), 1 - world.rank() / 2);
        EXPECT_EQ(pair->device(), world.device());
        EXPECT_THAT(pair->describe(), HasSubstr("staged"));
        const Buffer mine = device_copy(*pair, Bytes(100, static_cast<std::byte>(world.rank())), DType::U8);
        pair->all_reduce(mine).synchronize();
        EXPECT_EQ(bytes_of(mine), Bytes(100, static_cast<std::byte>(world.rank() % 2 == 0 ? 2 : 4)));
        EXPECT_EQ(world.split(-1, 0), nullptr);
    }));
}

TEST(Staged, RefusesHostMemory) {
    const auto failures = staged_failures_of(1, [](ProcessGroup& group) {
        float value = 0;
        (void)group.all_reduce({&value, 1, DType::F32, {}});
    });
    EXPECT_EQ(
        message_of(failures[0]),
        "all_reduce: rank 0's staged backend takes memory of CUDA device 0, the buffer is in host memory");
}

TEST(Staged, ThrowsMismatchOnEveryRankInWaitAndInSynchronize) {
    const auto failures = staged_failures_of(2, [](ProcessGroup& group) {
        const Buffer buffer = device_copy(group, Bytes(80), DType::U8);
        Work work = group.all_reduce({buffer.data, group.rank() == 0 ? 80U : 40U, DType::U8, group.device()});
        EXPECT_THROW(work.wait(), MismatchError);
        group.barrier().wait();  // the group is unusable
    });
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<MismatchError>(failure));
        EXPECT_THAT(message_of(failure),
                    AllOf(HasSubstr("(80 uint8, 80 B, sum)"), HasSubstr("(40 uint8, 40 B, sum)")));
    }
}

TEST(Staged, EndsAtTheTimeOutWithoutAPeer) {
    const auto failures = staged_failures_of(2,
                                             [](ProcessGroup& group) {
                                                 const Buffer buffer =
                                                     device_copy(group, Bytes(80), DType::U8);
                                                 if (group.rank() == 0) group.all_reduce(buffer).wait();
                                             },
                                             {.timeout = std::chrono::milliseconds(300)});
    EXPECT_TRUE(is<TimeoutError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]),
                AllOf(HasSubstr("rank 0: all_reduce #2"), HasSubstr("rank 1 finished #1")));
}

TEST(Staged, LeavesNoCopyInFlightWhenAPeerIsLost) {
    const auto slow_copies =
        reinterpret_cast<long (*)(long)>(fake_library().resolve("fake_cuda_slow_copies"));
    ASSERT_NE(slow_copies, nullptr);
    const auto segment = std::make_shared<SegmentMap>(make_segment({.local_world_size = 1, .world_size = 1}));
    const auto group = make_staged_group({.segment = segment, .device = 0}, environment_of(0, 1), {});
    const Buffer buffer = device_copy(*group, Bytes(80), DType::U8);
    slow_copies(200);
    Work work = group->all_reduce(buffer);
    while (slow_copies(200) == 0) std::this_thread::yield();
    segment->header().aborted = 2;  // rank 1, plus one
    EXPECT_THROW(work.synchronize(), PeerLostError);
    EXPECT_EQ(slow_copies(0), 0);
}

TEST(Staged, NamesADeviceFaultAndEndsTheGroup) {
    const auto failures = staged_failures_of(
        1,
        [](ProcessGroup& group) {
            const Buffer buffer = device_copy(group, Bytes(80), DType::U8);
            using Fail = int(void*, int);
            const auto fail = reinterpret_cast<Fail*>(fake_library().resolve("fake_cuda_fail"));
            ASSERT_NE(fail, nullptr);
            fail(group.stream(), 700);
            EXPECT_THROW(group.all_reduce(buffer).wait(), Error);
            fail(group.stream(), 0);
            group.barrier().wait();
        },
        {.own_streams = true});
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("rank 0: all_reduce: an illegal memory access was encountered (CUDA error 700)"));
}

TEST(Staged, KeepsACaptureOfTheProgramInCudasDefaultModeValid) {
    expect_all_well(staged_failures_of(
        1,
        [&](ProcessGroup& group) {
            const Buffer buffer = device_copy(group, Bytes(80), DType::U8);
            cuda::Stream captured = nullptr;
            cudaStreamCreateWithPriority(&captured, cudaStreamNonBlocking, 0);
            cuda::check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), "capturing");
            const Work work = group.all_reduce(buffer);
            while (!work.done()) std::this_thread::yield();
            cudaGraph_t graph = nullptr;
            cuda::check(cudaStreamEndCapture(captured, &graph), "ending the capture");
            cudaGraphDestroy(graph);
            cudaStreamDestroy(captured);
        },
        {.own_streams = true}));
}

TEST(Staged, NamesALostDeviceAndTheGroupIsDestroyed) {
    std::optional<LostDevice> lost;
    const auto failures = staged_failures_of(1,
                                             [&](ProcessGroup& group) {
                                                 const Buffer buffer =
                                                     device_copy(group, Bytes(80), DType::U8);
                                                 group.all_reduce(buffer).synchronize();
                                                 lost.emplace();
                                                 group.all_reduce(buffer).wait();
                                             },
                                             {.own_streams = true});
    lost.reset();
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("an illegal memory access was encountered (CUDA error 700)"));
}

TEST(Staged, UsesThePoolWhenSharedMemoryCannotBePageLockedAndLeavesNoError) {
    const Variable refuse("FAKE_CUDA_HOST_REGISTER", "refuse");
    expect_all_well(staged_failures_of(2, [&](ProcessGroup& group) {
        const Buffer buffer = device_copy(group, Bytes(12, std::byte{1}), DType::U8);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
        group.all_reduce(buffer).synchronize();
        EXPECT_EQ(bytes_of(buffer), Bytes(12, std::byte{2}));
    }));
}

TEST(Staged, TakesCallsFromAThreadOnAnotherDeviceAndKeepsItsDevice) {
    const auto reduce = [&](ProcessGroup& group) {
        cudaSetDevice(1);
        const Buffer buffer = device_copy(group, Bytes(12, std::byte{1}), DType::U8);
        group.all_reduce(buffer).wait();
        group.barrier().wait();
        EXPECT_EQ(bytes_of(buffer), Bytes(12, std::byte{2}));
        int device = 0;
        cudaGetDevice(&device);
        EXPECT_EQ(device, 1);
    };
    expect_all_well(staged_failures_of(
        2, [&](ProcessGroup& group) { std::async(std::launch::async, [&] { reduce(group); }).get(); },
        {.own_streams = true}));
}

TEST(Staged, SurvivorsLearnOfAKilledRankLongBeforeTheTimeOut) {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer lets no child of a process with threads start threads";
#endif
    const ddprun::UniqueFd fd = make_segment({.local_world_size = 3, .world_size = 3});
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    std::vector<pid_t> pids;
    for (int rank = 0; rank < 3; ++rank) {
        const pid_t pid = ::fork();
        pids.push_back(pid);
        if (pid != 0) continue;
        try {
            const auto segment =
                std::make_shared<SegmentMap>(ddprun::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
            // The default stream's thread, if any, stayed in the parent.
            cuda::Stream stream = nullptr;
            cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
            const auto group = make_staged_group({.segment = segment, .device = 0}, environment_of(rank, 3),
                                                 {.timeout = std::chrono::seconds(60), .stream = stream});
            const Buffer buffer = device_copy(*group, Bytes(400'000), DType::F32);
            for (int round = 0;; ++round) {
                group->all_reduce(buffer).wait();
                if (round == 20) (void)!::write(ends[1], "x", 1);
            }
        } catch (const PeerLostError& error) {
            const std::string what = error.what();
            ::_exit(what.find("all_reduce #") != std::string::npos && what.find("rank 1") != std::string::npos
                        ? 42
                        : 4);
        } catch (...) {
            ::_exit(3);
        }
    }
    ::close(ends[1]);  // a rank that ends early is an end of file, so the read does not wait for it
    char byte;
    for (int rank = 0; rank < 3; ++rank) ASSERT_EQ(::read(ends[0], &byte, 1), 1);
    ::kill(pids[1], SIGKILL);
    ::waitpid(pids[1], nullptr, 0);  // reaped: from now on the pid does not exist
    const auto killed = Clock::now();
    for (const int rank : {0, 2}) {
        int status = 0;
        ::waitpid(pids[static_cast<std::size_t>(rank)], &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 42) << status;
    }
    EXPECT_LT(Clock::now() - killed, std::chrono::seconds(10));
    ::close(ends[0]);
}

TEST(Staged, RefusesAForkedChildThatExitsWithOrWithoutDestroyingTheGroup) {
    expect_all_well(staged_failures_of(2, [](ProcessGroup& group) {
        for (const InChild what : {InChild::DestroysGroup, InChild::LeavesGroup}) {
            group.barrier().synchronize();
            if (group.rank() == 0) {
                EXPECT_EQ(misdeeds_of_child(group, what), "");
            }
            group.barrier().synchronize();
        }
    }));
}

}  // namespace
