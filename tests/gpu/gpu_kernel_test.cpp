// The device tests of tests/workers on the device of the machine, also under compute-sanitizer. Exit code 77,
// with one line, without a device.
//
//   gpu_kernel_test --out-of-bounds   a kernel writes past the end of its memory, for compute-sanitizer to
//                                     find; only padding of the allocator is overwritten
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/memory.h"
#include "ddp/types.h"
#include "env/print.h"

namespace {

constexpr int kSkipped = 77;

std::string why_not_here() {
    try {
        // A device without code in the program refuses the first kernel.
        const auto gpu = ddp::cuda::Gpu::of(0);
        const ddp::cuda::DeviceMemory memory(gpu, sizeof(float));
        const ddp::Buffer one{memory.get(), 1, ddp::DType::F32, {ddp::Device::Kind::Cuda, 0}};
        ddp::cuda::scale_cast(*gpu, one, one, 1, nullptr);
        return "";
    } catch (const ddp::Error& error) {
        return error.what();
    }
}

int write_past_the_end() {
    constexpr std::size_t kAllocated = 1, kWritten = 64;
    const auto gpu = ddp::cuda::Gpu::of(0);
    const ddp::cuda::OwnedStream stream(gpu);
    const ddp::cuda::DeviceMemory source(gpu, kWritten * sizeof(float)),
        memory(gpu, kAllocated * sizeof(float));
    const auto of = [](void* data) {
        return ddp::Buffer{data, kWritten, ddp::DType::F32, {ddp::Device::Kind::Cuda, 0}};
    };
    ddp::cuda::scale_cast(*gpu, of(source.get()), of(memory.get()), 1, stream.get());
    stream.synchronize();
    ddprun::print(stdout, "wrote {} elements into memory of {}\n", kWritten, kAllocated);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    if (const std::string why = why_not_here(); !why.empty()) {
        ddprun::print(stdout, "skipped: {}\n", why);
        return kSkipped;
    }
    if (argc == 2 && std::string_view(argv[1]) == "--out-of-bounds") return write_past_the_end();
    return RUN_ALL_TESTS();
}
