// The cost of a collective's bookkeeping (sequence number, the lines that the launcher reads, the clock,
// comparing the call with the other ranks') as a share of a training step of the perceptron
// 784-1024-1024-1024-10 on the CPU (batch 128, one rank: more ranks make a step longer). Bar: 1 %.
// The cost of a trace likewise, of the step's collectives and six spans. Bar: 1 %.
#include <fcntl.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "collective_loop.h"
#include "ddp/shm/lockstep.h"
#include "ddp/span.h"
#include "ddp/testing.h"
#include "ddp/trace/trace.h"
#include "env/worker_env.h"
#include "tests/support/temporary_directory.h"
#include "train/learner.h"
#include "train/matrix.h"
#include "train/samples/data.h"

namespace {

constexpr std::size_t kBatch = 128, kSteps = 41, kRounds = 101, kCalls = 1000;

/// A segment of one rank.
class OneRank {
  public:
    [[nodiscard]] std::shared_ptr<ddp::SegmentMap> map() const {
        return std::make_shared<ddp::SegmentMap>(
            ddprun::UniqueFd(::fcntl(segment_.get(), F_DUPFD_CLOEXEC, 0)));
    }
    [[nodiscard]] ddp::Context context() const {
        ddprun::WorkerEnv env = ddp::testing::environment_of(0, 1);
        env.segment_fd = segment_.get();
        return ddp::Context(env);
    }

  private:
    ddprun::UniqueFd segment_ = ddp::make_segment({});
};

double median_us(std::size_t rounds, const std::function<void()>& round) {
    std::vector<double> times;
    for (std::size_t i = 0; i < rounds; ++i) {
        const double before = bench::now_us();
        round();
        times.push_back(bench::now_us() - before);
    }
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(rounds / 2), times.end());
    return times[rounds / 2];
}

struct Step {
    double us;
    double calls;  ///< collectives per step
};
Step measure_step() {
    const OneRank rank;
    const auto group = ddp::ProcessGroup::create(rank.context());
    train::Options options;
    options.device = train::DeviceKind::Cpu;
    const train::ComputeDevice device = *train::open_compute_device(options, 0);
    train::set_matrix_threads(1);
    const train::Samples samples = train::make_samples({kBatch, 784, 10}, 1);
    train::Learner learner(*group, device, options, {784, 1024, 1024, 1024, 10}, kSteps);
    const auto step = [&] {
        learner.forward({samples.values.data(), samples.labels.data(), nullptr, kBatch});
        learner.backward();
        learner.step();
    };
    step();  // the first step allocates scratch memory
    const auto segment = rank.map();
    const std::uint64_t before = segment->line(0).finished_seq;
    const double us = median_us(kSteps, step);
    return {us, static_cast<double>(segment->line(0).finished_seq - before) / kSteps};
}

/// Measures a collective with two barriers, like the all-reduce of a bucket.
double measure_call() {
    const OneRank rank;
    ddp::cpu::Arena arena(rank.map(), 0, ddp::cpu::Arena::Lines::OfTheNode);
    ddp::cpu::join(arena, ddp::testing::environment_of(0, 1),
                   ddprun::MonotonicClock::now() + std::chrono::seconds(10));
    ddp::cpu::Lockstep steps(arena, {.ranks = 1}, std::chrono::seconds(10));
    return median_us(kRounds,
                     [&] {
                         for (std::size_t i = 0; i < kCalls; ++i) {
                             steps.begin({.bytes = 25 << 20,
                                          .operation = ddprun::SegmentOp::AllReduce,
                                          .dtype = ddp::DType::F32});
                             steps.meet();
                             steps.meet();
                             steps.end();
                         }
                     }) /
           kCalls;
}

double measure_span() {
    return median_us(kRounds,
                     [] {
                         for (std::size_t i = 0; i < kCalls; ++i) const ddp::Span span("forward");
                     }) /
           kCalls;
}

/// Measures the same with a trace, which lasts to the end of the program.
void measure_trace(const Step& step, double call_us) {
    const double off_us = measure_span();
    const ddprun::test::TemporaryDirectory directory;
    ::setenv("DDP_TRACE", directory.path().c_str(), 1);
    ddp::trace::enter(ddp::testing::environment_of(0, 1));
    const double span_us = measure_span(), traced_us = measure_call();
    const double share = (step.calls * (traced_us - call_us) + 6 * span_us) / step.us;
    fmt::print("a span takes {:.4f} us without a trace, {:.4f} us with one, a collective {:.3f} us more\n",
               off_us, span_us, traced_us - call_us);
    fmt::print("{:.5f} % of a step (bar 1 %: {})\n", 100 * share, share < 0.01 ? "met" : "NOT MET");
}

}  // namespace

int main() {
    const Step step = measure_step();
    const double call_us = measure_call(), share = step.calls * call_us / step.us;
    fmt::print(
        "a step takes {:.0f} us and makes {:.1f} calls; numbers, lines and comparison take {:.3f} us of each\n",
        step.us, step.calls, call_us);
    fmt::print("{:.5f} % of a step (bar 1 %: {})\n", 100 * share, share < 0.01 ? "met" : "NOT MET");
    measure_trace(step, call_us);
    return 0;
}
