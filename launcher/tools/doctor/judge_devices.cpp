#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/machine/gpu/gpu_health.h"
#include "launcher/machine/gpu/nvidia.h"

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

using Rows = std::vector<Finding>;

void add_network(Rows& rows, Severity severity, std::string subject, std::string what,
                 std::string remedy = "") {
    rows.push_back({severity, "Network", std::move(subject), std::move(what), std::move(remedy)});
}

std::string value_of(const Variables& variables, std::string_view name) {
    for (const auto& [key, value] : variables) {
        if (key == name) return value;
    }
    return "";
}

std::string describe(const NetworkInterface& one) {
    std::string text = one.up ? "up" : "down";
    if (one.megabits && *one.megabits > 0)
        text += *one.megabits >= 1000 ? fmt::format(", {} Gb/s", *one.megabits / 1000)
                                      : fmt::format(", {} Mb/s", *one.megabits);
    if (one.mtu > 0) text += fmt::format(", mtu {}", one.mtu);
    if (one.is_virtual) text += ", virtual";
    return text + (one.addresses.empty() ? ", no address" : ", " + join(one.addresses, " "));
}

/// The interfaces that NCCL_SOCKET_IFNAME chooses: prefixes, "=name" exactly, "^" all but these.
std::vector<std::string> chosen_by(std::string_view setting,
                                   const std::vector<NetworkInterface>& interfaces) {
    const bool others = setting.starts_with('^');
    if (others) setting.remove_prefix(1);
    const bool exact = setting.starts_with('=');
    if (exact) setting.remove_prefix(1);
    std::vector<std::string> chosen;
    for (const NetworkInterface& one : interfaces) {
        const std::vector<std::string_view> names = split(setting, ',');
        const bool named = std::any_of(names.begin(), names.end(), [&](std::string_view name) {
            return exact ? one.name == name : !name.empty() && one.name.starts_with(name);
        });
        if (named != others && one.up && !one.addresses.empty()) chosen.push_back(one.name);
    }
    return chosen;
}

void judge_choice(const NetworkFacts& network, const Variables& variables, Rows& rows) {
    const std::string setting = value_of(variables, "NCCL_SOCKET_IFNAME");
    if (!setting.empty()) {
        const std::vector<std::string> chosen = chosen_by(setting, network.interfaces);
        if (chosen.empty())
            return add_network(
                rows, Severity::Error, "NCCL sockets",
                fmt::format("NCCL_SOCKET_IFNAME={} names no interface that is up and has an address",
                            setting),
                "unset it, or name one of the interfaces above");
        return add_network(rows, Severity::Ok, "NCCL sockets",
                           fmt::format("{} (NCCL_SOCKET_IFNAME={})", join(chosen, ","), setting));
    }
    const std::string own = join(nccls_own_interfaces(network.interfaces), ",");
    if (has_slingshot(network))
        return add_network(
            rows, Severity::Warning, "NCCL sockets",
            fmt::format("NCCL would take {}; on Slingshot it must be told", own),
            "NCCL_SOCKET_IFNAME=hsn, which ddprun sets in jobs of several nodes (--fabric), and the "
            "libfabric plug-in (aws-ofi-nccl) in LD_LIBRARY_PATH");
    const auto real =
        std::count_if(network.interfaces.begin(), network.interfaces.end(),
                      [](const NetworkInterface& one) { return is_usable(one) && !one.is_virtual; });
    if (own.empty())
        return add_network(rows, Severity::Warning, "NCCL sockets", "no interface is up and has an address",
                           "ip link; ip address");
    add_network(
        rows, real > 1 ? Severity::Note : Severity::Ok, "NCCL sockets",
        fmt::format("NCCL takes {} (its own choice, as far as is documented)", own),
        real > 1 ? "for several nodes: NCCL_SOCKET_IFNAME=NAME where that is not the fast network" : "");
}

void judge_ports(const NetworkFacts& network, const Variables& variables, Rows& rows) {
    bool any_active = false;
    for (const FabricPort& port : network.ports) {
        const bool active = port.state == "ACTIVE";
        any_active = any_active || active;
        add_network(rows, active ? Severity::Ok : Severity::Note, port.device,
                    fmt::format("port {}: {}, {}, {}", port.port, port.state, port.rate, port.layer));
    }
    if (!network.ports.empty() && !any_active)
        add_network(rows, Severity::Warning, "RDMA", "no port is active: NCCL falls back to TCP",
                    "ibstat; see to cables and the subnet manager");
    if (any_active && value_of(variables, "NCCL_IB_DISABLE") == "1")
        add_network(rows, Severity::Warning, "RDMA", "NCCL_IB_DISABLE=1 although a port is active",
                    "unset NCCL_IB_DISABLE");
}

void judge_own_name(const NetworkFacts& network, const Variables& variables, Rows& rows) {
    if (network.own_name_at.empty() || !value_of(variables, "GLOO_SOCKET_IFNAME").empty()) return;
    add_network(
        rows, Severity::Note, "own name",
        fmt::format("{} by /etc/hosts: gloo tells other nodes that address, and they cannot reach it",
                    network.own_name_at),
        "give the name an address of the network there, or set GLOO_SOCKET_IFNAME; in jobs of several nodes "
        "ddprun sets it");
}

void judge_fabric(const NetworkFacts& network, Rows& rows) {
    const FabricProfile profile = choose_fabric(std::nullopt, network);
    std::string text(name_of(profile.fabric));
    if (!profile.why.empty()) text += fmt::format(" ({})", profile.why);
    if (const std::size_t n = profile.settings.size(); n > 0)
        text += fmt::format("; in jobs of several nodes ddprun sets {} variable{} for it (ddprun env)", n,
                            n == 1 ? "" : "s");
    add_network(rows, Severity::Ok, "fabric", std::move(text));
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

std::vector<Finding> judge_network(const NetworkFacts& network, const Variables& variables) {
    Rows rows;
    for (const NetworkInterface& one : network.interfaces) {
        // Leave out bridges and tunnels that are down.
        if (!one.loopback && (one.up || !one.is_virtual))
            add_network(rows, Severity::Ok, one.name, describe(one));
    }
    judge_ports(network, variables, rows);
    judge_fabric(network, rows);
    judge_choice(network, variables, rows);
    judge_own_name(network, variables, rows);
    return rows;
}

std::vector<Finding> judge_trial(const TrialFacts& trial) {
    const auto row = [](Severity severity, std::string what, std::string remedy = "") {
        return std::vector<Finding>{
            {severity, "All-reduce", "all-reduce", std::move(what), std::move(remedy)}};
    };
    switch (trial.state) {
        case TrialFacts::State::NotAsked: return row(Severity::Note, "not run (--no-run)");
        case TrialFacts::State::Failed:
            return row(Severity::Error,
                       fmt::format("failed with exit code {}: {}", trial.exit_code, trial.problem),
                       "to see more: " + trial.command);
        case TrialFacts::State::Done: break;
    }
    // A trial on CPUs shows nothing about the GPUs that a job would use.
    const std::string why = trial.why_cpus.empty() ? "" : fmt::format("; on the CPUs: {}", trial.why_cpus);
    return row(why.empty() ? Severity::Ok : Severity::Warning,
               fmt::format("{} worker{}, {}: {:.2f} GB/s bus bandwidth ({} x {} in {:.2f} s), sums right; "
                           "first one {} after start{}",
                           trial.workers, trial.workers == 1 ? "" : "s", trial.backend,
                           trial.bus_gigabytes_per_second, trial.rounds, format_bytes(trial.bytes),
                           trial.seconds, format_duration(trial.start), why),
               why.empty() ? "" : "see the errors and warnings above");
}

}  // namespace ddprun::doctor
