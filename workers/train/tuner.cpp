#include "tuner.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/types.h"
#include "env/clock.h"
#include "tuning.h"

namespace train {
namespace {

/// How long each way is looked at, in milliseconds. The second look is for those that are close to each
/// other.
constexpr double kFirstLook = 1, kSecondLook = 5;
/// The clocks of an idle device are low and take so long to rise.
constexpr double kWarmMilliseconds = 50;

}  // namespace

Tuner::Tuner(std::shared_ptr<const ddp::cuda::Gpu> gpu, ddp::cuda::Stream stream)
    : gpu_(std::move(gpu)),
      stream_(stream),
      begin_(gpu_->shared_api(), ddp::cuda::kEventDefault),
      end_(gpu_->shared_api(), ddp::cuda::kEventDefault) {}

bool Tuner::may_time() const { return is_open_ && !ddp::cuda::is_capturing(gpu_->api(), stream_); }

double Tuner::measure(std::size_t way, int repetitions, const Run& run) const {
    // The first is not counted: it keeps the device busy until the rest is queued, so that no time of the
    // host is measured.
    static_cast<void>(run(way));
    begin_.record(stream_);
    for (int i = 0; i < repetitions; ++i) static_cast<void>(run(way));
    end_.record(stream_);
    end_.synchronize();
    return end_.milliseconds_since(begin_) / repetitions;
}

double Tuner::warm_up(std::size_t way, const Run& run) {
    double each = measure(way, 1, run);
    while (warm_milliseconds_ < kWarmMilliseconds) {
        const int runs = runs_for(kSecondLook, each);
        each = measure(way, runs, run);
        warm_milliseconds_ += std::max(each * runs, 0.01);
    }
    return each;
}

std::vector<double> Tuner::look_twice(std::size_t ways, const Run& run) {
    std::vector<double> milliseconds(ways, kNever);
    std::vector<std::size_t> existing;
    // Each once before any is timed: loading a kernel for the first time takes longer than it runs.
    for (std::size_t way = 0; way < ways; ++way) {
        if (run(way)) existing.push_back(way);
    }
    if (existing.size() == 1) milliseconds[existing.front()] = 0;
    if (existing.size() < 2) return milliseconds;
    const double each = warm_up(existing.front(), run);
    for (const std::size_t way : existing) milliseconds[way] = measure(way, runs_for(kFirstLook, each), run);
    for (const std::size_t way : finalists(milliseconds))
        milliseconds[way] = std::min(milliseconds[way], measure(way, runs_for(kSecondLook, each), run));
    return milliseconds;
}

std::vector<double> Tuner::time(std::size_t ways, const Run& run) {
    const ddprun::TimePoint start = ddprun::MonotonicClock::now();
    ++depth_;
    try {
        std::vector<double> milliseconds = look_twice(ways, run);
        --depth_;
        // What is timed within is part of it.
        if (depth_ == 0)
            seconds_ += std::chrono::duration<double>(ddprun::MonotonicClock::now() - start).count();
        return milliseconds;
    } catch (const ddp::Error& error) {
        if (--depth_ > 0) throw;
        throw ddp::Error(
            fmt::format("{} (while algorithms were timed; --tune-products off does without)", error.what()));
    }
}

}  // namespace train
