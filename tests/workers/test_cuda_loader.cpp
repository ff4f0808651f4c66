#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

#include "ddp/loader.h"
#include "tests/workers/cuda_fixture.h"
#include "tests/workers/numbers.h"

namespace {

using ddp::Device;
using ddp::DeviceBatch;
using ddp::DeviceLoader;
using ddp::cuda::Gpu;
using ddp::cuda::OwnedStream;
using ddp::testing::gpu;
using ddp::testing::Numbers;

constexpr Device kDevice{Device::Kind::Cuda, 0};
std::vector<std::size_t> backwards(std::size_t n) {
    std::vector<std::size_t> order(n);
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    return order;
}

/// Collects copies on the user's stream, which are read only after all batches were delivered.
template <class T>
class Collected {
  public:
    explicit Collected(std::size_t count) : pinned_(gpu(), count * sizeof(T)) {}
    void add(const DeviceBatch::Field& field, ddp::cuda::Stream stream) {
        ddp::cuda::copy(pinned_.get() + bytes_, field.data, field.bytes, stream);
        bytes_ += field.bytes;
    }
    [[nodiscard]] std::span<const T> values() const { return {pinned_.as<T>(), bytes_ / sizeof(T)}; }

  private:
    ddp::cuda::PinnedMemory pinned_;
    std::size_t bytes_ = 0;
};

struct Reading {
    std::size_t prefetch, num_workers;
};
class DeviceLoaderWithPrefetch : public testing::TestWithParam<Reading> {};
INSTANTIATE_TEST_SUITE_P(Depths, DeviceLoaderWithPrefetch,
                         testing::Values(Reading{1, 1}, Reading{2, 1}, Reading{7, 1}, Reading{50, 1},
                                         Reading{1, 2}, Reading{7, 4}),
                         [](const auto& test) {
                             return "Prefetch" + std::to_string(test.param.prefetch) + "Workers" +
                                    std::to_string(test.param.num_workers);
                         });

TEST_P(DeviceLoaderWithPrefetch, DeliversEveryBatchInOrderToAStreamThatLags) {
    const Numbers numbers(103);
    const std::vector<std::size_t> order = backwards(103);
    const OwnedStream stream(gpu());
    DeviceLoader loader(numbers, order,
                        {.batch_size = 10,
                         .prefetch = GetParam().prefetch,
                         .num_workers = GetParam().num_workers,
                         .device = kDevice,
                         .stream = stream.get()});
    EXPECT_EQ(loader.batches(), 11U);
    Collected<float> pairs(206);
    Collected<std::int32_t> labels(103);
    std::size_t samples = 0;
    while (const DeviceBatch* batch = loader.next()) {
        EXPECT_EQ(batch->size, std::min<std::size_t>(10, 103 - samples));
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(batch->fields.at(1).data) % 256, 0U);
        pairs.add(batch->fields.at(0), stream.get());
        labels.add(batch->fields.at(1), stream.get());
        samples += batch->size;
    }
    stream.synchronize();
    ASSERT_EQ(samples, 103U);
    ASSERT_EQ(labels.values().size(), 103U);
    for (std::size_t i = 0; i < 103; ++i) {
        EXPECT_EQ(pairs.values()[2 * i], static_cast<float>(order[i]));
        EXPECT_EQ(pairs.values()[2 * i + 1], static_cast<float>(order[i]) + 0.5F);
        EXPECT_EQ(labels.values()[i], static_cast<std::int32_t>(10 * order[i]));
    }
    EXPECT_EQ(loader.next(), nullptr);
}

TEST_P(DeviceLoaderWithPrefetch, NeverWaitsForTheDeviceInNext) {
    const ddp::testing::Count blocking_calls = ddp::testing::blocking_calls();
    if (blocking_calls == nullptr) GTEST_SKIP() << "only the fake CUDA counts the calls that wait";
    const Numbers numbers(100);
    const OwnedStream stream(gpu());
    DeviceLoader loader(numbers, backwards(100),
                        {.batch_size = 10,
                         .prefetch = GetParam().prefetch,
                         .num_workers = GetParam().num_workers,
                         .device = kDevice,
                         .stream = stream.get()});
    const long before = blocking_calls();
    while (loader.next() != nullptr) {
    }
    EXPECT_EQ(blocking_calls(), before);
}

TEST_P(DeviceLoaderWithPrefetch, DeliversTheGoodBatchesAndThenTheDataSetsException) {
    const Numbers numbers(30, 14);
    DeviceLoader loader(numbers, {0, 1, 2, 3, 4, 14, 6, 7},
                        {.batch_size = 2,
                         .prefetch = GetParam().prefetch,
                         .num_workers = GetParam().num_workers,
                         .device = kDevice});
    ASSERT_NE(loader.next(), nullptr);
    ASSERT_NE(loader.next(), nullptr);
    for (int again = 0; again < 2; ++again) EXPECT_THROW(loader.next(), std::runtime_error);
}

TEST_P(DeviceLoaderWithPrefetch, CanBeDestroyedBeforeItsEnd) {
    const Numbers numbers(1000);
    DeviceLoader loader(numbers, backwards(1000),
                        {.batch_size = 2,
                         .prefetch = GetParam().prefetch,
                         .num_workers = GetParam().num_workers,
                         .device = kDevice});
    ASSERT_NE(loader.next(), nullptr);
}

TEST(DeviceLoader, IsAtItsEndWithoutSamples) {
    const Numbers numbers(5);
    DeviceLoader loader(numbers, {}, {.batch_size = 2, .device = kDevice});
    EXPECT_EQ(loader.next(), nullptr);
}

TEST(DeviceLoader, RefusesInvalidOptions) {
    const Numbers numbers(5);
    EXPECT_THROW(DeviceLoader(numbers, {0}, {.batch_size = 0, .device = kDevice}), ddp::InvalidInput);
    EXPECT_THROW(DeviceLoader(numbers, {0}, {.batch_size = 1, .prefetch = 0, .device = kDevice}),
                 ddp::InvalidInput);
    EXPECT_THROW(DeviceLoader(numbers, {0}, {.batch_size = 1, .num_workers = 0, .device = kDevice}),
                 ddp::InvalidInput);
    EXPECT_THROW(DeviceLoader(numbers, {0}, {.batch_size = 1}), ddp::InvalidInput);
}

}  // namespace
