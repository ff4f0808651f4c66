#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "ddp/loader.h"
#include "ddp/sampler.h"
#include "ddp/types.h"
#include "tests/support/refused_calls.h"
#include "tests/workers/numbers.h"

namespace {

using ddp::Batch;
using ddp::Loader;
using ddp::LoaderOptions;
using ddp::testing::Numbers;

std::vector<std::size_t> backwards(std::size_t n) {
    std::vector<std::size_t> order(n);
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    return order;
}

struct Reading {
    std::size_t prefetch, num_workers;
};
class LoaderWithPrefetch : public testing::TestWithParam<Reading> {};
INSTANTIATE_TEST_SUITE_P(Depths, LoaderWithPrefetch,
                         testing::Values(Reading{0, 1}, Reading{0, 0}, Reading{2, 0}, Reading{1, 1},
                                         Reading{2, 1}, Reading{7, 1}, Reading{1, 2}, Reading{2, 3},
                                         Reading{7, 4}, Reading{1, 64}),
                         [](const auto& test) {
                             return "Prefetch" + std::to_string(test.param.prefetch) + "Workers" +
                                    std::to_string(test.param.num_workers);
                         });

TEST_P(LoaderWithPrefetch, DeliversEveryBatchInOrder) {
    const Numbers numbers(103);
    const std::vector<std::size_t> order = backwards(103);
    Loader loader(numbers, order,
                  {.batch_size = 10,
                   .drop_last = false,
                   .prefetch = GetParam().prefetch,
                   .num_workers = GetParam().num_workers});
    EXPECT_EQ(loader.batches(), 11U);
    std::size_t position = 0;
    while (const Batch* batch = loader.next()) {
        ASSERT_EQ(batch->size(), std::min<std::size_t>(10, 103 - position));
        ASSERT_EQ(batch->field<float>(0).size(), 2 * batch->size());
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(batch->bytes(0).data()) % 64, 0U);
        for (std::size_t i = 0; i < batch->size(); ++i, ++position) {
            EXPECT_EQ(batch->field<float>(0)[2 * i], static_cast<float>(order[position]));
            EXPECT_EQ(batch->field<std::int32_t>(1)[i], static_cast<std::int32_t>(10 * order[position]));
        }
    }
    EXPECT_EQ(position, 103U);
    EXPECT_EQ(loader.next(), nullptr);
}

TEST_P(LoaderWithPrefetch, OmitsAnIncompleteBatchOnRequest) {
    const Numbers numbers(19);
    Loader loader(numbers, backwards(19),
                  {.batch_size = 10,
                   .drop_last = true,
                   .prefetch = GetParam().prefetch,
                   .num_workers = GetParam().num_workers});
    EXPECT_EQ(loader.batches(), 1U);
    ASSERT_NE(loader.next(), nullptr);
    EXPECT_EQ(loader.next(), nullptr);
    EXPECT_EQ(numbers.reads(), 10U);
}

TEST_P(LoaderWithPrefetch, DeliversTheGoodBatchesAndThenTheDataSetsException) {
    const Numbers numbers(30, 14);
    Loader loader(numbers, {0, 1, 2, 3, 4, 14, 6, 7},
                  {.batch_size = 2,
                   .drop_last = false,
                   .prefetch = GetParam().prefetch,
                   .num_workers = GetParam().num_workers});
    ASSERT_NE(loader.next(), nullptr);
    const Batch* second = loader.next();
    ASSERT_NE(second, nullptr);
    EXPECT_EQ(second->field<float>(0)[0], 2.0F);
    for (int again = 0; again < 2; ++again) {
        try {
            loader.next();
            FAIL() << "the broken sample was delivered";
        } catch (const std::runtime_error& error) {
            EXPECT_STREQ(error.what(), "sample 14 is broken");
        }
    }
}

TEST_P(LoaderWithPrefetch, IsAtItsEndWithoutSamples) {
    const Numbers numbers(5);
    Loader loader(numbers, {},
                  {.batch_size = 2,
                   .drop_last = false,
                   .prefetch = GetParam().prefetch,
                   .num_workers = GetParam().num_workers});
    EXPECT_EQ(loader.batches(), 0U);
    EXPECT_EQ(loader.next(), nullptr);
}

TEST_P(LoaderWithPrefetch, CanBeDestroyedBeforeItsEnd) {
    const Numbers numbers(1000);
    Loader loader(numbers, backwards(1000),
                  {.batch_size = 2,
                   .drop_last = false,
                   .prefetch = GetParam().prefetch,
                   .num_workers = GetParam().num_workers});
    ASSERT_NE(loader.next(), nullptr);
}

TEST_P(LoaderWithPrefetch, ResumesInMidEpochBehindTheLastDeliveredBatchInAWorldOfAnotherSize) {
    const Numbers numbers(103);
    const auto place_after = [&](int world, ddp::SamplerState place, std::size_t batches,
                                 std::multiset<std::int32_t>& seen) {
        ddp::SamplerState after;
        for (int rank = 0; rank < world; ++rank) {
            ddp::DistributedSampler sampler(numbers.size(), world, rank, {.seed = 3});
            sampler.restore(place);
            Loader loader(numbers, sampler,
                          {.batch_size = 7,
                           .drop_last = false,
                           .prefetch = GetParam().prefetch,
                           .num_workers = GetParam().num_workers});
            for (std::size_t b = 0; b < batches; ++b) {
                const Batch* batch = loader.next();
                if (batch == nullptr) break;
                const auto labels = batch->field<std::int32_t>(1);
                seen.insert(labels.begin(), labels.end());
            }
            after = sampler.state();
        }
        return after;
    };
    std::multiset<std::int32_t> seen;
    const ddp::SamplerState first = place_after(3, {4, 0}, 2, seen);
    EXPECT_EQ(first, (ddp::SamplerState{4, 42})) << "batches read ahead do not count";
    const ddp::SamplerState end = place_after(2, first, SIZE_MAX, seen);
    EXPECT_EQ(end, (ddp::SamplerState{4, 103}));
    EXPECT_EQ(std::set<std::int32_t>(seen.begin(), seen.end()).size(), 103U);
    EXPECT_EQ(seen.size(), 104U) << "61 samples were left for two ranks: one is repeated";
}

TEST(Loader, NeverReadsFurtherAheadThanRequested) {
    const Numbers numbers(1000);
    Loader loader(numbers, backwards(1000), {.batch_size = 10, .drop_last = false, .prefetch = 2});
    for (std::size_t taken = 1; loader.next() != nullptr; ++taken)
        EXPECT_LE(numbers.reads(), 10 * (taken + 2));
}

/// Calls `read` for each sample; a sample is its index.
ddp::FunctionDataset indices_after(std::size_t samples, const std::function<void(std::size_t)>& read) {
    return {samples, {sizeof(std::size_t)}, [read](std::size_t index, ddp::FunctionDataset::Fields fields) {
                read(index);
                std::memcpy(fields[0].data(), &index, sizeof index);
            }};
}

TEST(Loader, SpreadsTheSamplesOfOneBatchOverItsWorkers) {
    std::barrier both(2);  // a thread alone would wait for ever
    const ddp::FunctionDataset meeting = indices_after(2, [&](std::size_t) { both.arrive_and_wait(); });
    Loader loader(meeting, {0, 1}, {.batch_size = 2, .prefetch = 1, .num_workers = 2});
    const Batch* const batch = loader.next();
    ASSERT_NE(batch, nullptr);
    EXPECT_EQ(batch->field<std::size_t>(0)[0], 0U);
    EXPECT_EQ(batch->field<std::size_t>(0)[1], 1U);
}

TEST(Loader, ReadsOneSampleAtATimeWithOneWorker) {
    std::atomic<int> inside = 0, most = 0;
    const ddp::FunctionDataset counting = indices_after(500, [&](std::size_t) {
        most = std::max(most.load(), ++inside);
        std::this_thread::yield();
        --inside;
    });
    Loader loader(counting, backwards(500), {.batch_size = 7, .prefetch = 3});
    while (loader.next() != nullptr) {
    }
    EXPECT_EQ(most, 1);
}

TEST(Loader, DeliversTheEarlierBatchesAlthoughALaterOneHasFailedFirst) {
    std::promise<void> failed;
    const std::shared_future<void> has_failed = failed.get_future().share();
    const ddp::FunctionDataset broken = indices_after(4, [&](std::size_t index) {
        if (index == 0) has_failed.wait();
        if (index != 2) return;
        failed.set_value();
        throw std::runtime_error("sample 2 is broken");
    });
    Loader loader(broken, {0, 1, 2, 3}, {.batch_size = 1, .prefetch = 3, .num_workers = 2});
    ASSERT_NE(loader.next(), nullptr);
    ASSERT_NE(loader.next(), nullptr);
    EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_THROW(loader.next(), std::runtime_error);
}

TEST(Loader, ThrowsTheExceptionOfTheFirstBrokenSampleWhicheverThreadFailsFirst) {
    std::promise<void> failed;
    const std::shared_future<void> later_has_failed = failed.get_future().share();
    const ddp::FunctionDataset broken = indices_after(2, [&](std::size_t index) {
        if (index == 1) failed.set_value();
        else later_has_failed.wait();
        throw std::runtime_error("sample " + std::to_string(index));
    });
    Loader loader(broken, {0, 1}, {.batch_size = 2, .prefetch = 1, .num_workers = 2});
    try {
        loader.next();
        FAIL();
    } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "sample 0");
    }
}

std::size_t threads_of_this_process() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(Loader, LeavesNoThreadAfterAFailure) {
    const std::size_t before = threads_of_this_process();
    {
        const Numbers numbers(30, 14);
        Loader loader(numbers, backwards(30), {.batch_size = 4, .prefetch = 2, .num_workers = 3});
        EXPECT_THROW(while (loader.next() != nullptr){}, std::runtime_error);
    }
    EXPECT_EQ(threads_of_this_process(), before);
}

TEST(Loader, RefusesWorkersThatHaveNothingToReadAhead) {
    const Numbers numbers(5);
    EXPECT_THROW(Loader(numbers, {0}, {.prefetch = 0, .num_workers = 2}), ddp::InvalidInput);
    EXPECT_THROW(Loader(numbers, {0}, {.num_workers = 1025}), ddp::InvalidInput);
}

/// What is printed on standard error by that many passes over one sampler, which a loader advances.
std::string printed_by_passes(int passes, bool drop_last,
                              const std::function<void(ddp::DistributedSampler&)>& between) {
    const Numbers numbers(10);
    ddp::DistributedSampler sampler(10, 1, 0);
    ::testing::internal::CaptureStderr();
    for (int pass = 0; pass < passes; ++pass, between(sampler)) {
        Loader loader(numbers, sampler, {.batch_size = 4, .drop_last = drop_last});
        while (loader.next() != nullptr) {
        }
    }
    return ::testing::internal::GetCapturedStderr();
}

TEST(Loader, TellsOnceThatItsSamplersEpochIsOver) {
    for (const bool drop_last : {false, true}) {
        EXPECT_EQ(
            printed_by_passes(4, drop_last, [](ddp::DistributedSampler&) {}),
            "ddp: sampler: epoch 0 has no samples left for another pass: call set_epoch(epoch) or next_epoch() "
            "before each epoch\n");
    }
}

TEST(Loader, IsSilentWhenItsSamplersEpochIsSetOrRestored) {
    EXPECT_EQ(printed_by_passes(3, true, [](ddp::DistributedSampler& sampler) { sampler.next_epoch(); }), "");
    EXPECT_EQ(printed_by_passes(3, false,
                                [](ddp::DistributedSampler& sampler) { sampler.restore(sampler.state()); }),
              "");
}

TEST(Loader, IsSilentWhenItIsMadeAgainBeforeItsFirstBatch) {
    const Numbers numbers(10);
    ddp::DistributedSampler sampler(10, 1, 0);
    ::testing::internal::CaptureStderr();
    static_cast<void>(sampler.indices());
    for (int again = 0; again < 3; ++again) Loader(numbers, sampler, {.batch_size = 4});
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(FunctionDataset, RefusesAnEmptyFunction) {
    EXPECT_THROW(ddp::FunctionDataset(1, {4}, nullptr), ddp::InvalidInput);
}

TEST(Loader, RefusesEmptyBatches) {
    const Numbers numbers(5);
    EXPECT_THROW(Loader(numbers, {0}, {.batch_size = 0}), ddp::InvalidInput);
}

TEST(Loader, RefusesASampleThatDoesNotExist) {
    const Numbers numbers(10);
    try {
        Loader(numbers, {0, 9, 10}, {.batch_size = 2});
        FAIL();
    } catch (const ddp::InvalidInput& error) {
        EXPECT_STREQ(error.what(), "loader: there is no sample 10 in a data set of 10, counted from 0");
    }
    EXPECT_EQ(numbers.reads(), 0U);
}

TEST_P(LoaderWithPrefetch, TakesABatchSizeAboveTheNumberOfSamples) {
    const Numbers numbers(3);
    for (const std::size_t size : {std::size_t{4}, SIZE_MAX / 8 + 1, SIZE_MAX}) {
        Loader loader(numbers, backwards(3),
                      {.batch_size = size,
                       .drop_last = false,
                       .prefetch = GetParam().prefetch,
                       .num_workers = GetParam().num_workers});
        EXPECT_EQ(loader.batches(), 1U);
        const Batch* const batch = loader.next();
        ASSERT_NE(batch, nullptr);
        EXPECT_EQ(batch->size(), 3U);
        EXPECT_EQ(batch->field<std::int32_t>(1)[0], 20);
        EXPECT_EQ(loader.next(), nullptr);
        EXPECT_EQ(Loader(numbers, backwards(3), {.batch_size = size, .drop_last = true}).batches(), 0U);
    }
}

TEST(Loader, NamesTheThreadThatCannotStart) {
    const pid_t child = ::fork();
    if (child == 0) {
        if (!ddprun::test::refuse_calls({SYS_clone3, SYS_clone3, EAGAIN})) ::_exit(42);
        const Numbers numbers(9);
        try {
            const Loader loader(numbers, backwards(9), {.batch_size = 2});
        } catch (const ddp::Error& error) {
            ::_exit(std::string_view(error.what()).starts_with("start the thread ddp-loader") ? 42 : 2);
        }
        ::_exit(1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), 42);
}

TEST(Loader, IsDestroyedInAForkedChildWithoutWaitingForItsThread) {
    const Numbers numbers(100);
    auto loader =
        std::make_unique<Loader>(numbers, backwards(100), LoaderOptions{.batch_size = 10, .prefetch = 2});
    ASSERT_NE(loader->next(), nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(30);  // ends a child that waits for ever
        try {
            (void)loader->next();
            ::_exit(1);
        } catch (const ddp::Error&) {
            loader.reset();
            ::_exit(42);
        }
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 42);
    EXPECT_NE(loader->next(), nullptr);
}

TEST(Loader, RefusesAFieldThatDoesNotExist) {
    const Numbers numbers(3);
    Loader loader(numbers, backwards(3), {.batch_size = 3});
    const Batch* const batch = loader.next();
    EXPECT_THROW(static_cast<void>(batch->bytes(2)), ddp::InvalidInput);
    EXPECT_THROW(static_cast<void>(batch->field<float>(SIZE_MAX)), ddp::InvalidInput);
}

}  // namespace
