#include "launcher/node/gpus.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "env/os/run_tool.h"
#include "env/text.h"
#include "launcher/machine/gpu/nvml.h"
#include "launcher/talk/control.h"

namespace ddprun {

namespace {

constexpr std::size_t kMostBytes = 1024 * 1024;

os::SpawnSpec gpus_command() {
    os::SpawnSpec spec;
    spec.program = "/proc/self/exe";
    spec.arguments = {"ddprun", "gpus", "--json"};
    spec.environment = os::own_environment();
    return spec;
}

/// Memory that an idle GPU may hold: contexts of daemons, the display.
constexpr std::uint64_t kIdleBytes = std::uint64_t{1} << 30;
/// The least change between two measurements that shows that memory is being freed.
constexpr std::uint64_t kStep = std::uint64_t{64} << 20;

/// Memory of the GPU that no listed process holds.
std::uint64_t unexplained(const GpuUsage& gpu) {
    std::uint64_t listed = 0;
    for (const GpuProcessUsage& process : gpu.processes) listed += process.used_bytes;
    return gpu.used_bytes - std::min(listed, gpu.used_bytes);
}

const GpuUsage* same_gpu(const std::vector<GpuUsage>& gpus, unsigned index) {
    const auto found =
        std::find_if(gpus.begin(), gpus.end(), [index](const GpuUsage& gpu) { return gpu.index == index; });
    return found == gpus.end() ? nullptr : &*found;
}

std::string held_by_the_gone(const GpuUsage& gpu, const std::vector<pid_t>& gone) {
    for (const GpuProcessUsage& process : gpu.processes) {
        if (std::find(gone.begin(), gone.end(), process.pid) == gone.end()) continue;
        const std::string amount = process.used_bytes > 0 ? format_bytes(process.used_bytes) : "memory";
        return fmt::format("GPU {} still holds {} of process {}", gpu.index, amount, process.pid);
    }
    return "";
}

std::string still_given_back(const std::optional<std::vector<GpuUsage>>& before, const GpuUsage& gpu) {
    if (unexplained(gpu) <= kIdleBytes) return "";
    const std::string held =
        fmt::format("GPU {} holds {} that no listed process uses", gpu.index, format_bytes(unexplained(gpu)));
    if (!before) return held;
    const GpuUsage* then = same_gpu(*before, gpu.index);
    return then != nullptr && unexplained(*then) >= unexplained(gpu) + kStep
               ? held + ", and the amount shrinks"
               : "";
}

}  // namespace

void GpuWatch::measure(Answer answer) {
    if (!nvml::may_be_there() || (measured_at_ != TimePoint::min() && loop_.now() - measured_at_ < fresh_))
        return answer(gpus_);
    waiting_.push_back(std::move(answer));
    if (waiting_.size() > 1) return;
    run_tool(loop_, system_, gpus_command(), kTimeout, kMostBytes,
             [this, alive = std::weak_ptr<bool>(alive_)](Result<std::string> line) {
                 if (!alive.expired()) measured(std::move(line));
             });
}

void GpuWatch::measured(Result<std::string> line) {
    Result<std::vector<GpuUsage>> gpus =
        line ? answer_from<std::vector<GpuUsage>>(*line, "gpus") : line.error();
    // When the driver does not answer, the next call tries again.
    if (gpus) {
        gpus_ = *std::move(gpus);
        measured_at_ = loop_.now();
    }
    for (const Answer& answer : std::exchange(waiting_, {})) answer(gpus_);
}

GpuRelease judge_gpu_release(const std::optional<std::vector<GpuUsage>>& before,
                             const std::vector<GpuUsage>& now, const std::vector<pid_t>& gone) {
    for (const GpuUsage& gpu : now) {
        if (std::string why = held_by_the_gone(gpu, gone); !why.empty()) return {false, std::move(why)};
    }
    for (const GpuUsage& gpu : now) {
        if (std::string why = still_given_back(before, gpu); !why.empty()) return {false, std::move(why)};
    }
    return {};
}

void GpuReleaseWait::begin(std::vector<pid_t> gone, Duration bound, std::function<void()> done) {
    cancel();
    const TimePoint now = loop_.now();
    wait_ = std::make_shared<Wait>(
        Wait{std::move(gone), now, deadline_after(now, bound), std::move(done), std::nullopt, false});
    measure();
}

void GpuReleaseWait::cancel() {
    loop_.cancel(std::exchange(timer_, 0));
    wait_.reset();
}

void GpuReleaseWait::measure() {
    gpus_.measure([this, asked = std::weak_ptr<Wait>(wait_)](const std::vector<GpuUsage>& now) {
        const std::shared_ptr<Wait> mine = asked.lock();
        if (mine != nullptr && mine == wait_) judge(now);  // else the wait was cancelled
    });
}

void GpuReleaseWait::judge(const std::vector<GpuUsage>& now) {
    const GpuRelease release = judge_gpu_release(wait_->before, now, wait_->gone);
    if (release.is_free) return finish();
    const std::string waited =
        format_duration(std::chrono::round<std::chrono::milliseconds>(loop_.now() - wait_->begun));
    if (loop_.now() >= wait_->until) {
        log_.warning("{} after {}; starting anyway", release.why, waited);
        return finish();
    }
    // The first measurement has no other to compare with, so it alone is no reason to log.
    if (wait_->before && !std::exchange(wait_->is_logged, true))
        log_.info("waiting for the GPUs' memory: {}", release.why);
    wait_->before = now;
    timer_ = loop_.call_after(kPause, [this] { measure(); });
}

void GpuReleaseWait::finish() {
    const std::function<void()> done = std::move(wait_->done);
    wait_.reset();
    done();
}

}  // namespace ddprun
