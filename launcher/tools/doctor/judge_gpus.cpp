#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"
#include "launcher/machine/gpu/gpu_health.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/tools/doctor/judge.h"

namespace ddprun::doctor {
namespace {

using Rows = std::vector<Finding>;

void add_gpus(Rows& rows, Severity severity, std::string subject, std::string what, std::string remedy = "") {
    rows.push_back({severity, "GPUs", std::move(subject), std::move(what), std::move(remedy)});
}

void judge_missing_driver(const NvidiaFacts& nvidia, Rows& rows) {
    if (nvidia.mismatch)
        return add_gpus(rows, Severity::Error, "driver", nvidia.problem,
                        "reboot, or unload and load the nvidia modules: the driver was updated while in use");
    if (nvidia.has_device)
        return add_gpus(
            rows, Severity::Error, "driver", fmt::format("there is an NVIDIA GPU, but {}", nvidia.problem),
            "load the driver (modprobe nvidia), or give the container its GPUs (docker run --gpus all)");
    add_gpus(rows, Severity::Note, "driver", fmt::format("{}; workers run on CPUs", nvidia.problem));
}

std::string describe(const GpuFacts& gpu) {
    std::vector<std::string> parts = {gpu.name.empty() ? "a GPU without a name" : gpu.name};
    if (gpu.total_bytes) parts.push_back(format_bytes(*gpu.total_bytes));
    if (!gpu.capability.empty()) parts.push_back("sm " + gpu.capability);
    if (gpu.ecc) parts.push_back(*gpu.ecc ? "ECC on" : "ECC off");
    if (gpu.mig.value_or(false)) parts.emplace_back("MIG on");
    if (gpu.numa_node >= 0) parts.push_back(fmt::format("NUMA node {}", gpu.numa_node));
    if (gpu.links > 0)
        parts.push_back(fmt::format("{} NVLink{}", gpu.links_up, gpu.links_up == 1 ? "" : "s"));
    if (gpu.pcie_max_generation && gpu.pcie_width)
        parts.push_back(fmt::format("PCIe {} x{}", *gpu.pcie_max_generation, *gpu.pcie_width));
    return join(parts, ", ");
}

const char* distance_name(GpuDistance distance) {
    switch (distance) {
        case GpuDistance::Unknown: return "an unknown way";
        case GpuDistance::NvLink: return "NVLink";
        case GpuDistance::SameBoard: return "the same board";
        case GpuDistance::SameSwitch: return "one PCIe switch";
        case GpuDistance::SeveralSwitches: return "several PCIe switches";
        case GpuDistance::HostBridge: return "a PCIe host bridge";
        case GpuDistance::NumaNode: return "a NUMA node";
        case GpuDistance::System: return "the link between sockets";
    }
    return "";
}

/// Adds "pairs of GPUs: 4 by NVLink, 24 by the link between sockets", and warnings.
void judge_topology(const NvidiaFacts& nvidia, Rows& rows) {
    if (nvidia.pairs.empty()) return;
    std::map<GpuDistance, int> counts;
    int without_peer = 0;
    for (const GpuPair& pair : nvidia.pairs) {
        ++counts[pair.distance];
        if (pair.peer_access && !*pair.peer_access) ++without_peer;
    }
    std::vector<std::string> parts;
    for (const auto& [distance, count] : counts)
        parts.push_back(fmt::format("{} by {}", count, distance_name(distance)));
    add_gpus(rows, Severity::Ok, "topology", fmt::format("pairs of GPUs: {}", join(parts, ", ")));
    if (without_peer > 0) {
        add_gpus(
            rows, Severity::Warning, "peer access",
            fmt::format("{} of {} pairs cannot read each other's memory: NCCL goes through the host",
                        without_peer, nvidia.pairs.size()),
            "in a container or virtual machine: pass the GPUs through together; on the host: turn off ACS "
            "and the IOMMU");
    }
    const bool some_links = std::any_of(nvidia.gpus.begin(), nvidia.gpus.end(),
                                        [](const GpuFacts& gpu) { return gpu.links_up > 0; });
    const bool dark = std::any_of(nvidia.gpus.begin(), nvidia.gpus.end(),
                                  [](const GpuFacts& gpu) { return gpu.links > 0 && gpu.links_up == 0; });
    if (some_links && dark)
        add_gpus(rows, Severity::Warning, "nvlink", "some GPUs have no active NVLink while others do",
                 "on an NVSwitch machine: systemctl status nvidia-fabricmanager");
}

void judge_visible(const NvidiaFacts& nvidia, const std::optional<std::string>& visible_devices, Rows& rows) {
    if (!visible_devices) return;
    const std::vector<Gpu> physical = physical_gpus(nvidia);
    const std::vector<Gpu> visible = visible_gpus(physical, visible_devices);
    const auto entries =
        visible_devices->empty() ? 0 : std::count(visible_devices->begin(), visible_devices->end(), ',') + 1;
    const std::string value = fmt::format("CUDA_VISIBLE_DEVICES={}: {} of {} GPUs visible", *visible_devices,
                                          visible.size(), physical.size());
    if (visible.empty() && !physical.empty())
        return add_gpus(rows, Severity::Error, "visible GPUs", value, "unset it, or name GPUs that exist");
    if (static_cast<std::ptrdiff_t>(visible.size()) < entries)
        return add_gpus(rows, Severity::Warning, "visible GPUs",
                        value + "; CUDA stops reading at the first entry that names no GPU",
                        "name only GPUs that exist");
    add_gpus(rows, Severity::Ok, "visible GPUs", value);
}

}  // namespace

std::vector<Finding> judge_gpus(const NvidiaFacts& nvidia,
                                const std::optional<std::string>& visible_devices) {
    Rows rows;
    if (!nvidia.problem.empty()) {
        judge_missing_driver(nvidia, rows);
        return rows;
    }
    add_gpus(
        rows, nvidia.gpus.empty() ? Severity::Error : Severity::Ok, "driver",
        fmt::format("{}, runs CUDA up to {}{}", nvidia.driver.empty() ? "version not known" : nvidia.driver,
                    cuda_version_text(nvidia.cuda_version), nvidia.gpus.empty() ? ", and shows no GPU" : ""),
        nvidia.gpus.empty() ? "give the container its GPUs (docker run --gpus all), or look into dmesg" : "");
    for (const GpuFacts& gpu : nvidia.gpus) {
        if (gpu.lost.empty()) add_gpus(rows, Severity::Ok, fmt::format("GPU {}", gpu.index), describe(gpu));
        for (Finding& finding : gpu_health(gpu)) rows.push_back(std::move(finding));
    }
    judge_topology(nvidia, rows);
    judge_visible(nvidia, visible_devices, rows);
    return rows;
}

}  // namespace ddprun::doctor
