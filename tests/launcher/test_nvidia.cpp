#include <gtest/gtest.h>
#include <stdlib.h>

#include "env/io/file.h"
#include "launcher/machine/gpu/gpu_usage.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/machine/gpu/nvml.h"
#include "launcher/node/gpus.h"
#include "launcher/talk/control.h"
#include "tests/support/fake_system.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

/// A machine whose driver is the fake NVML.
class Nvidia : public ::testing::Test {
  protected:
    Nvidia() {
        ::setenv("DDPRUN_NVML_LIBRARY", ::getenv("FAKE_NVML_LIBRARY"), 1);
        ::setenv("FAKE_NVML", directory_.file("machine.json").c_str(), 1);
        is("{}");
    }
    ~Nvidia() override { ::unsetenv("DDPRUN_NVML_LIBRARY"); }

    void is(const std::string& machine) {
        ASSERT_TRUE(write_file_atomically(directory_.file("machine.json"), machine, 0600));
    }

  private:
    test::TemporaryDirectory directory_;
};

TEST_F(Nvidia, GpusAreFoundByNvmlWithTheirUuids) {
    is(R"({"gpus": [{"uuid": "GPU-a", "bus_id": "00000000:3B:00.0"}, {"uuid": "GPU-b"}]})");
    const PhysicalGpus found = find_nvidia_gpus();
    EXPECT_EQ(found.from, "NVML");
    ASSERT_EQ(found.gpus.size(), 2u);
    EXPECT_EQ(found.gpus[0].uuid, "GPU-a");
    EXPECT_EQ(found.gpus[1].id, "1");
}

TEST_F(Nvidia, ALostGpuKeepsItsPlace) {
    is(R"({"gpus": [{"lost": 15}, {"uuid": "GPU-b"}]})");
    const PhysicalGpus found = find_nvidia_gpus();
    ASSERT_EQ(found.gpus.size(), 2u);
    EXPECT_EQ(found.gpus[0].uuid, "");
    EXPECT_EQ(found.gpus[1].uuid, "GPU-b");
}

TEST_F(Nvidia, UsageFollowsTheMachine) {
    is(R"({"gpus": [{"total": 1000, "used": 10, "busy": 5}]})");
    ASSERT_EQ(measure_gpus().size(), 1u);
    EXPECT_EQ(measure_gpus()[0].used_bytes, 10u);
    is(R"({"gpus": [{"total": 1000, "used": 700, "busy": 98}]})");
    EXPECT_EQ(measure_gpus()[0].used_bytes, 700u);
    EXPECT_EQ(measure_gpus()[0].busy_percent, 98u);
}

TEST_F(Nvidia, ADriverThatDoesNotFitItsLibraryIsReported) {
    is(R"({"init": 18})");
    const Result<nvml::Session> session = nvml::Session::open();
    ASSERT_FALSE(session);
    EXPECT_EQ(session.error().code, Errc::Mismatch);
    EXPECT_EQ(session.error().what,
              "the NVIDIA libraries and the loaded kernel module are of different versions");
}

TEST_F(Nvidia, ALibraryThatIsNoNvmlIsRefused) {
    ::setenv("DDPRUN_NVML_LIBRARY", "libm.so.6", 1);
    const Result<nvml::Session> session = nvml::Session::open();
    ASSERT_FALSE(session);
    EXPECT_EQ(session.error().what, "libm.so.6 lacks entry points that ddprun needs");
}

TEST_F(Nvidia, UsageNamesTheProcessesOfAGpuAndIsReadBackAsSent) {
    is(R"({"gpus": [{"uuid": "GPU-a", "total": 1000, "used": 10, "busy": 5, "processes": [{"pid": 7, "bytes": 4}, {"pid": 8}]}]})");
    const std::vector<GpuUsage> gpus = measure_gpus();
    ASSERT_EQ(gpus.size(), 1u);
    EXPECT_EQ(gpus[0].processes, (std::vector<GpuProcessUsage>{{7, 4}, {8, 0}}));
    const auto read = [](const std::string& line) {
        return answer_from<std::vector<GpuUsage>>(line, "gpus");
    };
    EXPECT_EQ(read(answer_of("gpus", gpus)).value_or(std::vector<GpuUsage>{}), gpus);
    for (const char* line : {"", "[]", "{}", R"({"gpus":7})"}) EXPECT_FALSE(read(line)) << line;
}

std::vector<GpuUsage> two_gpus() {
    GpuUsage first, second;
    first.uuid = "GPU-a";
    second.uuid = "GPU-b";
    second.index = 1;
    return {first, second};
}

WorkerProcesses worker(int local_rank, std::vector<pid_t> pids) {
    return {local_rank, std::move(pids), "", false};
}

TEST(GpusOfWorkers, AreThoseOnWhichTheDriverShowsTheirProcesses) {
    std::vector<GpuUsage> gpus = two_gpus();
    gpus[0].processes = {{70, 4}, {99, 1}};
    gpus[1].processes = {{70, 3}};
    EXPECT_EQ(assign_gpu_usage(gpus, {worker(0, {7, 70}), worker(1, {8})}),
              (std::vector<WorkerGpus>{{{0, 1}, false, 7}, {}}));
}

TEST(GpusOfWorkers, ArePresumedByLocalRankWhenTheDriverShowsNone) {
    std::vector<GpuUsage> gpus = two_gpus();
    gpus[0].processes = {{99, 1}};  // of another user
    EXPECT_EQ(assign_gpu_usage(gpus, {worker(0, {7}), worker(1, {8}), worker(2, {9})}),
              (std::vector<WorkerGpus>{{{0}, true, 0}, {{1}, true, 0}, {}}));
}

TEST(GpusOfWorkers, ArePresumedAmongTheVisibleOnes) {
    WorkerProcesses swapped{0, {7}, "GPU-b,0", true}, narrowed{1, {8}, "1", true}, none{0, {9}, "", true};
    EXPECT_EQ(assign_gpu_usage(two_gpus(), {swapped, narrowed, none}),
              (std::vector<WorkerGpus>{{{1}, true, 0}, {{1}, true, 0}, {}}));
}

TEST_F(Nvidia, ADestroyedWatchGetsNoAnswerOfItsTool) {
    const std::unique_ptr<os::EventLoop> loop = *os::EventLoop::create({});
    test::FakeSystem system;
    auto watch = std::make_unique<GpuWatch>(*loop, system);
    int answers = 0;
    watch->measure([&](const std::vector<GpuUsage>&) { ++answers; });
    watch.reset();
    system.exit(system.spawned().at(0).first, 0);
    ASSERT_TRUE(loop->run_once(MonotonicClock::now() + std::chrono::seconds(10)));
    EXPECT_EQ(answers, 0);
}

}  // namespace
}  // namespace ddprun
