#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/memory.h"
#include "ddp/cuda/module.h"
#include "ddp/device_loader.h"
#include "ddp/types.h"
#include "tests/workers/nccl_world.h"

namespace {

using ddp::cuda::DriverApi;
using ddp::cuda::DriverCode;
using ddp::cuda::Gpu;
using ddp::cuda::Module;
using ddp::testing::fake_library;
using ddp::testing::fake_without;
using ddp::testing::LostDevice;

/// Device 0 behind a driver that differs in one point.
template <class Change>
std::shared_ptr<const Gpu> gpu_with(const Change& change) {
    DriverApi driver = *ddp::cuda::driver_api_from(fake_library());
    change(driver);
    return std::make_shared<const Gpu>(
        std::make_shared<const ddp::cuda::Api>(*ddp::cuda::api_from(fake_library())),
        std::make_shared<const DriverApi>(driver), 0);
}
DriverCode refuse_image(ddp::cuda::ModuleHandle*, const void*) { return DriverCode{200}; }

template <class Attempt>
std::string failure_of(const Attempt& attempt) {
    try {
        attempt();
    } catch (const ddp::Error& error) {
        return error.what();
    }
    return "";
}

TEST(DriverApi, NamesEveryEntryPointThatIsMissing) {
    for (const char* name :
         {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData",
          "cuModuleUnload", "cuModuleGetFunction", "cuLaunchKernel", "cuGetErrorString"}) {
        const auto api = ddp::cuda::driver_api_from(fake_without({name}));
        ASSERT_FALSE(api) << name;
        EXPECT_NE(api.error().what.find(std::string(" lacks ") + name + ":"), std::string::npos)
            << api.error().what;
    }
}

TEST(CudaApi, HasGraphsOnlyWhenItHasAllOfThem) {
    EXPECT_TRUE(ddp::cuda::api_from(fake_library())->has_graphs());
    for (const char* name : {"cudaStreamBeginCapture", "cudaGraphLaunch", "cudaGraphExecDestroy"})
        EXPECT_FALSE(ddp::cuda::api_from(fake_without({name}))->has_graphs()) << name;
}

TEST(Cuda, WhatBelongsToALostDeviceGoesWithoutAWord) {
    const auto gpu = Gpu::of(0);
    std::optional<LostDevice> lost;
    {
        const ddp::cuda::OwnedStream stream(gpu);
        const ddp::cuda::DeviceMemory memory(gpu, 100);
        const ddp::cuda::PinnedMemory pinned(gpu, 100);
        const ddp::cuda::Event event(gpu->shared_api());
        ddp::cuda::Capture capture(gpu, stream.get());
        memory.clear(stream.get());
        const auto graph = capture.end();
        lost.emplace();
        EXPECT_EQ(event.query(), ddp::cuda::Code{700});
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

TEST(Cuda, ALoaderOfALostDeviceSaysSoAndGoes) {
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
    const ddp::cuda::Event here(gpu->shared_api());
    EXPECT_EQ(
        failure_of([&] { here.record(there.get()); }),
        "recording a CUDA event: invalid resource handle (CUDA error 400): a stream or an event of another "
        "device, or one that was destroyed: the calling thread works on the device of its group "
        "(cudaSetDevice)");
    EXPECT_EQ(gpu->api().get_last_error(), ddp::cuda::Code::Success);
}

TEST(Cuda, AnErrorOfTheProgramsOwnIsStillThereAfterOurCalls) {
    const auto gpu = Gpu::of(0);
    gpu->make_current();
    const auto api = gpu->shared_api();
    api->stream_destroy(nullptr);
    {
        const ddp::cuda::OwnedStream stream(gpu);
        const ddp::cuda::Event event(api);
        event.record(stream.get());
        event.synchronize();
        EXPECT_EQ(event.query(), ddp::cuda::Code::Success);
        const ddp::cuda::Capture thrown_away(gpu, stream.get());
        const ddp::cuda::DeviceScope there(*api, 1);
    }
    EXPECT_EQ(api->get_last_error(), ddp::cuda::Code{400});
}

TEST(DeviceScope, ChangesTheDeviceForItsLife) {
    const auto gpu = Gpu::of(0);
    gpu->make_current();
    int device = -1;
    {
        const ddp::cuda::DeviceScope there(gpu->api(), 1);
        gpu->api().get_device(&device);
        EXPECT_EQ(device, 1);
    }
    gpu->api().get_device(&device);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(failure_of([&] { ddp::cuda::DeviceScope(gpu->api(), 99); }),
              "choosing a CUDA device: invalid device ordinal (CUDA error 101)");
}

TEST(DeviceScope, LeavesAThreadThatNeverWorkedOnADeviceWhereItIs) {
    const auto api = *ddp::cuda::api_from(fake_library());
    int device = -1;
    std::thread([&] {
        { const ddp::cuda::DeviceScope there(api, 1); }
        api.get_device(&device);
    }).join();
    EXPECT_EQ(device, 1) << "going back would make a context on device 0";
}

TEST(Gpu, NamesADeviceThatIsNotThere) {
    const std::string what = failure_of([] { (void)Gpu::of(99); });
    EXPECT_EQ(what, "opening CUDA device 99: invalid device ordinal (CUDA driver error 101)");
    EXPECT_EQ(failure_of([] { (void)Gpu::of(99); }), what) << "the second time too";
}

TEST(KernelModule, SaysThatTheBuildHadNoCompilerForKernels) {
    const auto gpu = gpu_with([](DriverApi& driver) { driver.module_load_data = refuse_image; });
    const auto* const image = reinterpret_cast<const unsigned char*>("no device code");
    EXPECT_EQ(
        failure_of([&] {
            const Module module(gpu, {"some_kernels", image});
        }),
        "loading some_kernels onto CUDA device 0: it was built without GPU code: build it where nvcc is");
}

TEST(KernelModule, GivesTheDriversReasonWhenTheImageDoesNotFit) {
    const auto gpu = gpu_with([](DriverApi& driver) { driver.module_load_data = refuse_image; });
    const auto* const image = reinterpret_cast<const unsigned char*>("an image for another device");
    EXPECT_EQ(failure_of([&] {
                  const Module module(gpu, {"some_kernels", image});
              }),
              "loading some_kernels onto CUDA device 0: unknown error (CUDA driver error 200)");
}

}  // namespace
