#include <gtest/gtest.h>

#include "ddp/cuda/module.h"
#include "ddp/types.h"
#include "tests/workers/nccl_world.h"

namespace {

using ddp::cuda::DriverApi;
using ddp::cuda::DriverCode;
using ddp::cuda::Gpu;
using ddp::cuda::Module;
using ddp::testing::fake_library;
using ddp::testing::fake_without;

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
