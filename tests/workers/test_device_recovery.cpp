// Recovery in place with device memory. CUDA and NCCL are fakes over host memory: no GPU is used.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <mutex>

#include "ddp/cuda/memory.h"
#include "ddp/recovery.h"
#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"
#include "tests/support/environment_variable.h"
#include "tests/workers/failures.h"
#include "tests/workers/nccl_world.h"

namespace ddp {
namespace {

using ::testing::HasSubstr;
using testing::Variable;

constexpr std::size_t kValues = 5;
constexpr std::uint64_t kUnits = 6;

enum class Point : std::uint8_t { BeforeCollective, BeforeCommit, AfterCommit };
struct Moment {
    Point point;
    int rank;
    std::uint64_t generation, commits;
    int segment_fd;
    /// Ends the rank. As its process goes on, it says so where ddprun would.
    [[noreturn]] void lose() const {
        const SegmentMap segment{ddprun::UniqueFd(::dup(segment_fd))};
        segment.header().aborted.store(static_cast<std::uint32_t>(rank) + 1);
        throw std::runtime_error("lost");
    }
};
using Interrupt = std::function<void(const Moment&)>;

/// Weights and a value of this rank's own on the device, a count in host memory.
class DeviceRun {
  public:
    DeviceRun(const Context& context, const std::string& backend, Interrupt interrupt)
        : interrupt_(std::move(interrupt)),
          device_(context.local_rank() % device_count()),
          recovery_(context, {.timeout = std::chrono::seconds(20), .backend = backend, .device = where()}) {
        weights_.clear(nullptr);
        gradients_.clear(nullptr);
        own_.write(static_cast<double>(context.rank()), nullptr);
        recovery_.keep("weights", {tensor("w", weights_)});
        recovery_.keep("own", {tensor("own", own_)}, Recovery::Kind::Own);
        recovery_.keep_value("sum", sum_);
    }

    std::string run() {
        recovery_.run([this](ProcessGroup& group, const Start&) { train(group); });
        std::string digest = fmt::format("sum {}, own {}, weights", sum_, own_.read<double>(nullptr));
        for (const double weight : read(weights_)) digest += fmt::format(" {:a}", weight);
        return digest;
    }

  private:
    static int device_count() {
        int count = 0;
        cudaGetDeviceCount(&count);
        return count;
    }
    [[nodiscard]] Device where() const { return {Device::Kind::Cuda, device_}; }
    [[nodiscard]] Tensor tensor(const char* name, const cuda::DeviceMemory& memory) const {
        const std::size_t count = memory.bytes() / sizeof(double);
        return {name, {static_cast<std::int64_t>(count)}, {memory.get(), count, DType::F64, where()}};
    }
    static std::vector<double> read(const cuda::DeviceMemory& memory) {
        std::vector<double> values(memory.bytes() / sizeof(double));
        cuda::copy(values.data(), memory.get(), memory.bytes(), nullptr);
        cuda::synchronize(nullptr);
        return values;
    }
    static void write(const cuda::DeviceMemory& memory, const std::vector<double>& values) {
        cuda::copy(memory.get(), values.data(), memory.bytes(), nullptr);
        cuda::synchronize(nullptr);
    }
    void reach(Point point) {
        const Context& now = recovery_.context();
        interrupt_({point, now.rank(), now.generation(), recovery_.commits(), now.env().segment_fd});
    }

    void train(ProcessGroup& group) {
        const auto part = group.split(group.rank() % 2, 0);
        while (recovery_.commits() < kUnits) {
            std::vector<double> values = read(weights_);
            const double own = own_.read<double>(nullptr) + 1;
            for (double& value : values) value = 0.5 * value + own;
            write(gradients_, values);
            own_.write(own, nullptr);
            recovery_.prepare();
            part->all_reduce(tensor("", gradients_).memory).wait();
            reach(Point::BeforeCollective);
            group.all_reduce(tensor("", gradients_).memory).wait();
            reach(Point::BeforeCommit);
            recovery_.commit([&] {
                // Queued behind the collective, as an optimizer's kernels are.
                cuda::copy(weights_.get(), gradients_.get(), weights_.bytes(), nullptr);
                sum_ += recovery_.commits();
            });
            reach(Point::AfterCommit);
        }
    }

    Interrupt interrupt_;
    const int device_;
    std::shared_ptr<const cuda::Gpu> gpu_ = cuda::Gpu::of(device_);
    cuda::DeviceMemory weights_{gpu_, kValues * sizeof(double)}, gradients_{gpu_, kValues * sizeof(double)},
        own_{gpu_, sizeof(double)};
    std::uint64_t sum_ = 0;
    Recovery recovery_;
};

/// By rank.
std::map<int, std::string> digests_of(const std::string& backend, const Interrupt& interrupt,
                                      int generations) {
    std::mutex mutex;
    std::map<int, std::string> digests;
    EXPECT_EQ(testing::run_recovering(4,
                                      [&](const Context& context) {
                                          DeviceRun run(context, backend, interrupt);
                                          const std::string digest = run.run();
                                          const std::lock_guard lock(mutex);
                                          digests[context.rank()] = digest;
                                      }),
              generations);
    return digests;
}

class DeviceRecovery : public ::testing::TestWithParam<const char*> {
  protected:
    const Variable nccl_{"DDP_NCCL_LIBRARY", std::getenv("FAKE_NCCL_LIBRARY")};
    const Variable devices_{"FAKE_CUDA_DEVICES", "4"};
};
INSTANTIATE_TEST_SUITE_P(Backends, DeviceRecovery, ::testing::Values("staged", "nccl"),
                         [](const auto& backend) { return std::string(backend.param); });

TEST_P(DeviceRecovery, EndsWithTheBitsOfAnUndisturbedRunWhereverARankIsLost) {
    const Variable checks("DDP_CHECK_RECOVERY", "1");
    const auto expected = digests_of(
        GetParam(), [](const Moment&) {}, 1);
    for (const Point point : {Point::BeforeCollective, Point::BeforeCommit, Point::AfterCommit}) {
        EXPECT_EQ(digests_of(
                      GetParam(),
                      [&](const Moment& now) {
                          if (now.point == point && now.rank == 2 && now.generation == 1 &&
                              now.commits >= kUnits / 2)
                              now.lose();
                      },
                      2),
                  expected)
            << "point " << static_cast<int>(point);
    }
}

}  // namespace
}  // namespace ddp
