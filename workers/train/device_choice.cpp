#include "device_choice.h"

#include <fmt/core.h>

namespace train {
namespace {

std::string count_of(int devices) {
    return fmt::format("{} CUDA device{}", devices, devices == 1 ? "" : "s");
}

}  // namespace

bool may_use_cuda(const Options& options) {
    return options.device != DeviceKind::Cpu && options.backend != "cpu";
}

ddprun::Result<DeviceChoice> choose_device(const Options& options, const CudaFacts& facts) {
    if (options.device == DeviceKind::Cpu) return DeviceChoice{{}, "asked for"};
    if (options.backend == "cpu") return DeviceChoice{{}, "auto: --backend cpu takes host memory"};
    const bool asked = options.device == DeviceKind::Cuda;
    const std::string demand = asked ? "--device cuda" : options.demand_for_cuda();
    if (!facts.problem.empty()) {
        if (demand.empty()) return DeviceChoice{{}, "auto: " + facts.problem};
        return ddprun::Error{ddprun::Errc::NotFound, fmt::format("{}: {}", demand, facts.problem), 0};
    }
    const ddp::Device device{ddp::Device::Kind::Cuda, facts.local_rank % facts.devices};
    if (asked) return DeviceChoice{device, "asked for"};
    return DeviceChoice{device, demand.empty() ? "auto: " + count_of(facts.devices) : "for " + demand};
}

}  // namespace train
