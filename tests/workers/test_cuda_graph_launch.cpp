#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ddp/cuda/graph.h"
#include "tests/workers/cuda_fixture.h"
#include "tests/workers/nccl_world.h"

/// Launches of graphs with captured collectives. Collective #1 is the barrier of `filled`, #2 the captured
/// all-reduce, #3 the first launch.
/// captured all-reduce, #3 the first launch.
namespace {

using namespace ddp;
using namespace ddp::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

/// An all-reduce of one buffer, captured.
class Captured {
  public:
    explicit Captured(NcclRank& rank)
        : stream_(static_cast<cuda::Stream>(rank.group.stream())),
          gpu_(cuda::Gpu::of(rank.group.device().index)),
          buffer(rank.filled({1, 2, 3})) {
        cuda::Capture capture(stream_);
        rank.group.all_reduce(buffer).wait();
        graph_ = capture.end();
    }
    Work launch(ProcessGroup& group) {
        return group.launch_graph([this] {
            ++launches;
            graph_->launch(stream_);
        });
    }
    int launches = 0;

  private:
    cuda::Stream stream_;
    std::shared_ptr<const cuda::Gpu> gpu_;
    std::unique_ptr<cuda::Graph> graph_;

  public:
    Buffer buffer;
};

TEST(GraphLaunch, IsACollectiveForTheLauncher) {
    const auto failures = failures_of(
        2,
        [](NcclRank& rank) {
            Captured captured(rank);
            const ddprun::RankLine& line = rank.segment.line(static_cast<std::uint32_t>(rank.group.rank()));
            for (int t = 0; t < 3; ++t) captured.launch(rank.group).wait();
            captured.launch(rank.group).synchronize();
            EXPECT_EQ(rank.values_of(captured.buffer), (std::vector<float>{16, 32, 48}));
            EXPECT_EQ(line.operation, static_cast<std::uint32_t>(ddprun::SegmentOp::GraphLaunch));
            EXPECT_EQ(line.started_seq, 6U);
            EXPECT_EQ(line.finished_seq, 6U);
            rank.group.barrier().wait();
        },
        {.own_stream = true});
    for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
}

TEST(GraphLaunch, EndsAtItsTimeOutAndShowsThePeersActivity) {
    const auto failures =
        failures_of(2,
                    [](NcclRank& rank) {
                        Captured captured(rank);
                        captured.launch(rank.group).synchronize();
                    },
                    {.faults = "1:2:hang", .timeout = std::chrono::milliseconds(300), .own_stream = true});
    EXPECT_TRUE(is<TimeoutError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]), AllOf(StartsWith("rank 0: graph_launch #3: did not finish within"),
                                               HasSubstr("rank 1 is in graph_launch #3")));
}

TEST(GraphLaunch, EndsWithTheGenerationBeforeItsTimeOutAndIsNotRepeated) {
    const auto failures =
        failures_of(2,
                    [](NcclRank& rank) {
                        Captured captured(rank);
                        if (rank.group.rank() == 1) {
                            wait_until_reached(rank.segment.line(0).started_seq, 3);
                            rank.segment.header().aborted = 2;  // rank 1, plus one
                            return;
                        }
                        const auto begin = Clock::now();
                        EXPECT_THROW(captured.launch(rank.group).synchronize(), PeerLostError);
                        EXPECT_LT(Clock::now() - begin, std::chrono::seconds(2));
                        const int before = captured.launches;
                        EXPECT_THROW(captured.launch(rank.group).wait(), PeerLostError);
                        EXPECT_EQ(captured.launches, before);
                    },
                    {.faults = "0:2:hang", .own_stream = true, .generation = 4});
    EXPECT_EQ(message_of(failures[0]), "");
}

TEST(GraphLaunch, IsReportedWhenTheGroupEndsBeforeItsGraphAndUsesNoFreedMemory) {
    std::vector<std::unique_ptr<Captured>> graphs(2);
    ::testing::internal::CaptureStderr();
    const auto failures =
        failures_of(2,
                    [&](NcclRank& rank) {
                        auto& graph = graphs[static_cast<std::size_t>(rank.group.rank())];
                        graph = std::make_unique<Captured>(rank);
                        graph->launch(rank.group).synchronize();
                    },
                    {.timeout = std::chrono::seconds(2), .own_stream = true});  // shutting down takes as long
    const std::string said = ::testing::internal::GetCapturedStderr();
    for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
    EXPECT_THAT(said, HasSubstr("a CUDA graph with its collectives must be destroyed before the group"));
    graphs.clear();
}

TEST(GraphLaunch, BreaksTheGroupWhenItFails) {
    const auto failures = failures_of(
        1,
        [](NcclRank& rank) {
            const Buffer buffer = rank.filled({1});
            EXPECT_THROW(rank.group.launch_graph([] { throw ddp::Error("no such graph"); }).wait(),
                         ddp::Error);
            rank.group.all_reduce(buffer).wait();
        },
        {.own_stream = true});
    EXPECT_EQ(message_of(failures[0]), "no such graph");
}

}  // namespace
