// The device tests of tests/workers on whatever device there is: on a GPU machine on its GPU, also under
// compute-sanitizer. Exit code 77, with one line, where there is none.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "ddp/cuda/device_kernels.h"
#include "ddp/types.h"
#include "env/print.h"

namespace {

constexpr int kSkipped = 77;

std::string why_not_here() {
    try {
        ddp::cuda::DeviceKernels::of(ddp::cuda::Gpu::of(0));
        return "";
    } catch (const ddp::Error& error) {
        return error.what();
    }
}

}  // namespace

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    if (const std::string why = why_not_here(); !why.empty()) {
        ddprun::print(stdout, "skipped: {}\n", why);
        return kSkipped;
    }
    return RUN_ALL_TESTS();
}
