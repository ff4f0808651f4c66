#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ddp/cuda/advice.h"

namespace ddp::cuda {
namespace {

using ::testing::HasSubstr;

TEST(CudaAdvice, NamesAnOldDriverWithBothVersionsAndAToolkitThatWorks) {
    EXPECT_EQ(
        advice_for(35, 13000, 12040),
        "the driver runs CUDA up to 12.4, the program was built with 13.0: update the driver, or build with the "
        "toolkit of CUDA 12");
}

TEST(CudaAdvice, SaysThatThereIsNoDriverForTheSameError) {
    EXPECT_THAT(advice_for(35, 13000, 0), HasSubstr("no NVIDIA driver is loaded"));
}

TEST(CudaAdvice, NamesTheRemedyOfOtherErrors) {
    EXPECT_THAT(advice_for(46, 13000, 13000), HasSubstr("nvidia-smi -c DEFAULT"));
    EXPECT_THAT(advice_for(214, 13000, 13000), HasSubstr("out of service"));
    EXPECT_THAT(advice_for(802, 13000, 13000), HasSubstr("nvidia-fabricmanager"));
    EXPECT_THAT(advice_for(803, 13000, 13000), HasSubstr("reboot"));
    EXPECT_THAT(advice_for(201, 13000, 13000), HasSubstr("cudaSetDevice first"));
    for (const int crash : {700, 716, 719})
        EXPECT_THAT(advice_for(crash, 13000, 13000), HasSubstr("one before it; compute-sanitizer"));
    EXPECT_THAT(advice_for(807, 13000, 13000), HasSubstr("nvidia-cuda-mps-control -d"));
    EXPECT_THAT(advice_for(809, 13000, 13000), HasSubstr("fewer workers per GPU"));
}

TEST(CudaAdvice, IsEmptyWhereCudasTextIsEnough) { EXPECT_EQ(advice_for(1, 13000, 13000), ""); }

}  // namespace
}  // namespace ddp::cuda
