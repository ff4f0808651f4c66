#include "launcher/node/gpu_watch.h"

#include <unistd.h>

#include <utility>

#include "env/os/run_tool.h"
#include "launcher/machine/gpu/nvml.h"

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
    Result<std::vector<GpuUsage>> gpus = line ? gpu_usage_from_json(*line) : line.error();
    // When the driver does not answer, the next call tries again.
    if (gpus) {
        gpus_ = *std::move(gpus);
        measured_at_ = loop_.now();
    }
    for (const Answer& answer : std::exchange(waiting_, {})) answer(gpus_);
}

}  // namespace ddprun
