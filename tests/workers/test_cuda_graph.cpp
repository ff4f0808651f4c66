#include <gtest/gtest.h>

#include <future>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/graph.h"
#include "tests/workers/cuda_fixture.h"

namespace {

using ddp::DType;
using ddp::cuda::Capture;
using ddp::cuda::Event;
using ddp::cuda::Gpu;
using ddp::cuda::OwnedStream;
using ddp::testing::gpu;
using ddp::testing::OnDevice;

TEST(Graph, RunsOncePerLaunchAndNotDuringTheCapture) {
    const OwnedStream stream(gpu());
    const OnDevice<float> values(gpu(), {1, 2, 3}, DType::F32);
    Capture capture(stream.get());
    EXPECT_TRUE(ddp::cuda::is_capturing(stream.get()));
    ddp::cuda::scale_cast(*gpu(), values.buffer(), values.buffer(), 2, stream.get());
    const auto graph = capture.end();
    EXPECT_FALSE(ddp::cuda::is_capturing(stream.get()));
    EXPECT_EQ(values.values(stream.get()), (std::vector<float>{1, 2, 3}));
    graph->launch(stream.get());
    graph->launch(stream.get());
    EXPECT_EQ(values.values(stream.get()), (std::vector<float>{4, 8, 12}));
}

TEST(Graph, IncludesAStreamThatWaitsForACapturedEvent) {
    const OwnedStream stream(gpu()), side(gpu());
    const OnDevice<float> values(gpu(), {3}, DType::F32);
    const Event fork, join;
    Capture capture(stream.get());
    fork.record(stream.get());
    fork.block(side.get());
    ddp::cuda::scale_cast(*gpu(), values.buffer(), values.buffer(), 5, side.get());
    join.record(side.get());
    join.block(stream.get());
    const auto graph = capture.end();
    graph->launch(stream.get());
    EXPECT_EQ(values.values(stream.get()), std::vector<float>{15});
}

TEST(Capture, RefusesAStreamThatWasNotJoinedAgain) {
    const OwnedStream stream(gpu()), side(gpu());
    const OnDevice<float> values(gpu(), {3}, DType::F32);
    const Event fork;
    Capture capture(stream.get());
    fork.record(stream.get());
    fork.block(side.get());
    ddp::cuda::scale_cast(*gpu(), values.buffer(), values.buffer(), 5, side.get());
    EXPECT_THROW((void)capture.end(), ddp::Error);
}

TEST(Capture, RefusesToWaitForTheDeviceOrToAllocate) {
    const OwnedStream stream(gpu());
    Capture capture(stream.get());
    EXPECT_THROW(ddp::cuda::DeviceMemory(gpu(), 16), ddp::Error);
    EXPECT_THROW(stream.synchronize(), ddp::Error);
    EXPECT_THROW((void)capture.end(), ddp::Error);
}

TEST(Capture, LeavesOtherThreadsFreeToAllocateAndToQueryEvents) {
    const OwnedStream stream(gpu());
    const OnDevice<float> values(gpu(), {3}, DType::F32);
    Capture capture(stream.get());
    std::async(std::launch::async, [] {
        const OwnedStream own(gpu());
        const ddp::cuda::DeviceMemory memory(gpu(), 1000);
        const Event cleared;
        memory.clear(own.get());
        cleared.record(own.get());
        cleared.synchronize();
        EXPECT_EQ(cleared.query(), cudaSuccess);
    }).get();
    ddp::cuda::scale_cast(*gpu(), values.buffer(), values.buffer(), 5, stream.get());
    capture.end()->launch(stream.get());
    EXPECT_EQ(values.values(stream.get()), std::vector<float>{15});
}

TEST(Capture, CannotBeEndedByAnotherThread) {
    const OwnedStream stream(gpu());
    Capture capture(stream.get());
    cudaGraph_t graph = nullptr;
    std::async(std::launch::async, [&] {
        gpu()->make_current();
        EXPECT_NE(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
    }).get();
    EXPECT_EQ(graph, nullptr);
}

TEST(Capture, RefusesTheDefaultStream) {
    const OwnedStream stream(gpu());
    const Capture capture(stream.get());
    const auto legacy = reinterpret_cast<ddp::cuda::Stream>(std::uintptr_t{1});  // cudaStreamLegacy
    EXPECT_FALSE(ddp::cuda::is_capturing(nullptr));
    EXPECT_FALSE(ddp::cuda::is_capturing(legacy));
}

TEST(Capture, IsDiscardedWithoutEnd) {
    const OwnedStream stream(gpu());
    const OnDevice<float> values(gpu(), {3}, DType::F32);
    {
        const Capture capture(stream.get());
        ddp::cuda::scale_cast(*gpu(), values.buffer(), values.buffer(), 5, stream.get());
    }
    EXPECT_FALSE(ddp::cuda::is_capturing(stream.get()));
    EXPECT_EQ(values.values(stream.get()), std::vector<float>{3});
}

}  // namespace
