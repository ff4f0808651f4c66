#include "ddp/worker/stop_line.h"

#include <fcntl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "ddp/types.h"
#include "env/clock.h"

namespace ddp {
namespace {

using ddprun::UniqueFd;

/// The launcher decides within 3 s; a worker whose launcher hangs goes on after this time.
constexpr std::chrono::seconds kLongestWait(30);

UniqueFd open_segment(const ddprun::WorkerEnv& env) {
    UniqueFd fd(::open(env.segment.c_str(), O_RDWR | O_CLOEXEC));
    // A container with a /proc of its own has the descriptor only.
    return fd || env.segment_fd < 0 ? std::move(fd) : UniqueFd(::fcntl(env.segment_fd, F_DUPFD_CLOEXEC, 3));
}

}  // namespace

std::unique_ptr<StopLine> StopLine::open(const ddprun::WorkerEnv& env) {
    if (env.segment.empty()) return nullptr;
    UniqueFd fd = open_segment(env);
    if (!fd) return nullptr;
    try {
        auto segment = std::make_unique<SegmentMap>(std::move(fd));
        const ddprun::SegmentHeader& header = segment->header();
        const std::uint32_t index = static_cast<std::uint32_t>(env.rank) - header.first_rank;
        const bool is_ours = index < header.local_world_size &&
                             static_cast<std::uint32_t>(env.world_size) == header.world_size;
        if (!is_ours) return nullptr;
        return std::unique_ptr<StopLine>(new StopLine(std::move(segment), index));
    } catch (const Error&) {
        return nullptr;  // another release's segment, which the process group reports
    }
}

bool StopLine::should_stop(std::uint64_t step) {
    line_.asked.store(step + 1, std::memory_order_relaxed);
    // The launcher's membarrier makes a fence between the two unnecessary; the compiler must keep the order.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::uint64_t stop = line_.stop.load(std::memory_order_acquire);
    const auto is_only_proposed = [&] {
        return stop != 0 && !ddprun::stop_is_agreed(stop) && ddprun::step_of_stop(stop) <= step;
    };
    const ddprun::TimePoint end = ddprun::MonotonicClock::now() + kLongestWait;
    while (is_only_proposed() && ddprun::MonotonicClock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        stop = line_.stop.load(std::memory_order_acquire);
    }
    return ddprun::stop_is_agreed(stop) && ddprun::step_of_stop(stop) <= step;
}

std::string StopLine::reason() const {
    const char* const text = segment_->header().stop_reason;
    return {text, ::strnlen(text, sizeof(segment_->header().stop_reason))};
}

}  // namespace ddp
