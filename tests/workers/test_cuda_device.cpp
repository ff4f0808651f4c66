#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/memory.h"
#include "ddp/loader.h"
#include "ddp/types.h"
#include "tests/workers/nccl_world.h"

namespace {

using ddp::cuda::Gpu;
using ddp::testing::LostDevice;

template <class Attempt>
std::string failure_of(const Attempt& attempt) {
    try {
        attempt();
    } catch (const ddp::Error& error) {
        return error.what();
    }
    return "";
}

TEST(Cuda, ObjectsOfALostDeviceAreDestroyedWithoutAnError) {
    const auto gpu = Gpu::of(0);
    std::optional<LostDevice> lost;
    {
        const ddp::cuda::OwnedStream stream(gpu);
        const ddp::cuda::DeviceMemory memory(gpu, 100);
        const ddp::cuda::PinnedMemory pinned(gpu, 100);
        const ddp::cuda::Event event;
        ddp::cuda::Capture capture(stream.get());
        memory.clear(stream.get());
        const auto graph = capture.end();
        lost.emplace();
        EXPECT_EQ(event.query(), static_cast<cudaError_t>(700));
        EXPECT_EQ(
            failure_of([&] { stream.synchronize(); }),
            "waiting for a CUDA stream: an illegal memory access was encountered (CUDA error 700): a kernel "
            "crashed, this one or one before it; compute-sanitizer finds where");
    }
    lost.reset();
}

/// Samples of four bytes.
class Words final : public ddp::Dataset {
  public:
    std::size_t size() const override { return 100; }
    std::vector<std::size_t> field_bytes() const override { return {4}; }
    void read(std::size_t, std::span<const std::span<std::byte>> fields) const override {
        std::fill(fields[0].begin(), fields[0].end(), std::byte{1});
    }
};

TEST(Cuda, ALoaderOfALostDeviceThrowsAndIsDestroyed) {
    const Words words;
    std::vector<std::size_t> order(words.size());
    ddp::DeviceLoader loader(words, order, {.batch_size = 1, .device = {ddp::Device::Kind::Cuda, 0}});
    ASSERT_NE(loader.next(), nullptr);
    const LostDevice lost;
    EXPECT_NE(failure_of([&] { (void)loader.next(); }).find("illegal memory access"), std::string::npos);
}

TEST(Cuda, AnEventOfOneDeviceIsNotRecordedOnAnother) {
    const ddp::cuda::OwnedStream there(Gpu::of(1));
    const auto gpu = Gpu::of(0);
    gpu->make_current();
    const ddp::cuda::Event here;
    EXPECT_EQ(
        failure_of([&] { here.record(there.get()); }),
        "recording a CUDA event: invalid resource handle (CUDA error 400): a stream or an event of another "
        "device, or one that was destroyed: the calling thread works on the device of its group "
        "(cudaSetDevice)");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Cuda, AnErrorOfTheProgramIsKeptByOurCalls) {
    const auto gpu = Gpu::of(0);
    gpu->make_current();
    cudaStreamDestroy(nullptr);
    {
        const ddp::cuda::OwnedStream stream(gpu);
        const ddp::cuda::Event event;
        event.record(stream.get());
        event.synchronize();
        EXPECT_EQ(event.query(), cudaSuccess);
        const ddp::cuda::Capture thrown_away(stream.get());
        const ddp::cuda::DeviceScope there(1);
    }
    EXPECT_EQ(cudaGetLastError(), static_cast<cudaError_t>(400));
}

TEST(DeviceScope, ChangesTheDeviceWhileItLives) {
    const auto gpu = Gpu::of(0);
    gpu->make_current();
    int device = -1;
    {
        const ddp::cuda::DeviceScope there(1);
        cudaGetDevice(&device);
        EXPECT_EQ(device, 1);
    }
    cudaGetDevice(&device);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(failure_of([&] { ddp::cuda::DeviceScope(99); }),
              "choosing a CUDA device: invalid device ordinal (CUDA error 101)");
}

TEST(DeviceScope, KeepsTheNewDeviceOnAThreadWithoutAContext) {
    int device = -1;
    std::thread([&] {
        { const ddp::cuda::DeviceScope there(1); }
        cudaGetDevice(&device);
    }).join();
    EXPECT_EQ(device, 1) << "going back would make a context on device 0";
}

TEST(Gpu, NamesADeviceThatDoesNotExist) {
    const std::string what = failure_of([] { (void)Gpu::of(99); });
    EXPECT_EQ(what, "opening CUDA device 99: invalid device ordinal (CUDA error 101)");
    EXPECT_EQ(failure_of([] { (void)Gpu::of(99); }), what) << "the error repeats";
}

}  // namespace
