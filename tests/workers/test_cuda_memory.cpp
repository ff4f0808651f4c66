#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "ddp/cuda/host_copies.h"
#include "tests/workers/cuda_fixture.h"

namespace {

using ddp::DType;
using ddp::cuda::DeviceMemory;
using ddp::cuda::Event;
using ddp::cuda::Gpu;
using ddp::cuda::HostCopies;
using ddp::cuda::OwnedStream;
using ddp::cuda::PinnedMemory;
using ddp::testing::gpu;
using ddp::testing::OnDevice;

TEST(DeviceMemory, NamesSizeDeviceAndFreeMemoryWhenItCannotBeAllocated) {
    try {
        const DeviceMemory memory(gpu(), std::size_t{1} << 50);
        ADD_FAILURE() << "there is no device with a petabyte";
    } catch (const ddp::Error& error) {
        EXPECT_THAT(error.what(),
                    testing::MatchesRegex("allocating 1125899906842624 bytes on CUDA device 0 "
                                          "\\([0-9]+ of [0-9]+ MiB are free\\): out of memory .*"));
    }
    // The failure must not be reported by later calls.
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_NO_THROW(DeviceMemory(gpu(), 16).clear(nullptr));
    EXPECT_NO_THROW(ddp::cuda::synchronize(nullptr));
}

TEST(DeviceMemory, HasAnAddressWithoutBytes) { EXPECT_NE(DeviceMemory(gpu(), 0).get(), nullptr); }

TEST(DeviceMemory, IsAlignedForEveryAccessAndCleared) {
    const OwnedStream stream(gpu());
    const DeviceMemory memory(gpu(), 1000);
    const PinnedMemory copied(gpu(), 1000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 256, 0U);
    std::iota(copied.as<unsigned char>(), copied.as<unsigned char>() + 1000, static_cast<unsigned char>(1));
    memory.clear(stream.get());
    ddp::cuda::copy(copied.get(), memory.get(), 1000, stream.get());
    stream.synchronize();
    for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(copied.get()[i], std::byte{0}) << i;
}

TEST(Gpu, GivesAKernelAtLeastOneBlockAndNotMoreThanItNeeds) {
    EXPECT_EQ(gpu()->grid_for(0), 1U);
    EXPECT_EQ(gpu()->grid_for(1), 1U);
    EXPECT_EQ(gpu()->grid_for(256 * 8 + 1), 2U);
    EXPECT_EQ(gpu()->grid_for_rows(9), 2U);
    const unsigned most = gpu()->grid_for(std::uint64_t{1} << 40);
    EXPECT_EQ(gpu()->grid_for(std::uint64_t{1} << 41), most);
    EXPECT_EQ(gpu()->grid_for_rows(std::uint64_t{1} << 40), most);
}

TEST(Event, GivesTheTimeBetweenTwoPointsOfAStream) {
    const OwnedStream stream(gpu(), ddp::cuda::Priority::High);
    const OnDevice<float> from(gpu(), std::vector<float>(1 << 18), DType::F32),
        to(gpu(), from.values(), DType::F32);
    const Event begin(cudaEventDefault), end(cudaEventDefault);
    begin.record(stream.get());
    ddp::cuda::copy(to.data(), from.data(), from.buffer().bytes(), stream.get());
    end.record(stream.get());
    end.synchronize();
    EXPECT_EQ(end.query(), cudaSuccess);
    EXPECT_GT(end.milliseconds_since(begin), 0);
}

TEST(Event, IsNoErrorOfTheThreadWhileItIsNotReached) {
    const OwnedStream stream(gpu());
    const DeviceMemory memory(gpu(), 64 << 20);
    const Event end;
    bool was_early = false;
    // The device may finish before the query; under compute-sanitizer it always does.
    for (int attempt = 0; attempt < 100 && !was_early; ++attempt) {
        for (int t = 0; t < 5; ++t) memory.clear(stream.get());
        end.record(stream.get());
        for (cudaError_t code = cudaErrorNotReady; code == cudaErrorNotReady;) {
            code = end.query();
            was_early = was_early || code == cudaErrorNotReady;
            ASSERT_EQ(cudaGetLastError(), cudaSuccess);
        }
    }
    const bool is_fake = ddp::testing::blocking_calls() != nullptr;
    EXPECT_TRUE(was_early || !is_fake) << "the fake takes its time";
}

TEST(HostCopies, WaitForTheDeviceAndLockPagesOnceForManyTensors) {
    const ddp::testing::Count blocking_calls = ddp::testing::blocking_calls();
    if (blocking_calls == nullptr) GTEST_SKIP() << "only the fake CUDA counts the calls that wait";
    std::vector<std::unique_ptr<OnDevice<float>>> memory;
    std::vector<ddp::Tensor> tensors;
    for (int i = 0; i < 10; ++i) {
        memory.push_back(std::make_unique<OnDevice<float>>(
            gpu(), std::vector<float>(3, static_cast<float>(i)), DType::F32));
        tensors.push_back({"t" + std::to_string(i), {3}, memory.back()->buffer()});
    }
    const auto scratch = std::make_shared<ddp::cuda::HostScratch>();
    const auto waits_for = [&](std::span<const ddp::Tensor> some) {
        const long before = blocking_calls();
        const HostCopies copies(some, HostCopies::Begin::WithContents, scratch);
        EXPECT_EQ(static_cast<const float*>(copies.tensors().back().memory.data)[2],
                  static_cast<float>(some.size() - 1));
        return blocking_calls() - before;
    };
    const long with_pages_to_lock = waits_for(tensors);
    EXPECT_LT(waits_for(tensors), with_pages_to_lock) << "the pages stay locked";
    EXPECT_EQ(waits_for(tensors), waits_for(std::span(tensors).first(1)));
}

TEST(HostCopies, CopyDeviceTensorsBothWaysAndKeepHostTensorsInPlace) {
    std::vector<float> on_host = {7, 8};
    const OnDevice<float> on_device(gpu(), {1, 2, 3}, DType::F32);
    const std::vector<ddp::Tensor> tensors = {ddp::tensor_of("host", std::span(on_host), {2}),
                                              {"device", {3}, on_device.buffer()}};
    const HostCopies copies(tensors, HostCopies::Begin::WithContents);
    EXPECT_EQ(copies.tensors()[0].memory.data, on_host.data());
    const ddp::Buffer& copied = copies.tensors()[1].memory;
    EXPECT_EQ(copied.device, ddp::Device{});
    auto* const values = static_cast<float*>(copied.data);
    EXPECT_EQ(std::vector<float>(values, values + 3), (std::vector<float>{1, 2, 3}));
    values[1] = 20;
    copies.upload();
    EXPECT_EQ(on_device.values(), (std::vector<float>{1, 20, 3}));
}

}  // namespace
