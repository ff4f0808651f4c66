#include "launcher/machine/gpu/nvidia.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <set>

#include "env/io/file.h"
#include "env/text.h"
#include "launcher/machine/gpu/nvml.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxSmallFile = 64 * 1024;

Gpu gpu_from_nvml(const nvml::Session& nvml, unsigned index) {
    Gpu gpu;
    gpu.id = fmt::format("{}", index);
    nvml::Device device = nullptr;
    if (nvml->handle(index, &device) != nvml::Code::Success) return gpu;
    std::array<char, 96> uuid{};
    if (nvml->uuid(device, uuid.data(), static_cast<unsigned>(uuid.size() - 1)) == nvml::Code::Success)
        gpu.uuid = uuid.data();
    nvml::PciInfo pci{};
    if (nvml->pci(device, &pci) == nvml::Code::Success)
        gpu.numa_node = numa_node_of(sysfs_bus_id(pci.bus_id));
    return gpu;
}

std::vector<Gpu> gpus_from_nvml(const nvml::Session& nvml) {
    unsigned count = 0;
    if (nvml->count(&count) != nvml::Code::Success) return {};
    std::vector<Gpu> found;
    for (unsigned index = 0; index < count; ++index) found.push_back(gpu_from_nvml(nvml, index));
    return found;
}

/// /proc/driver/nvidia/gpus/<bus id>/information has a line "GPU UUID: \t GPU-...".
std::vector<Gpu> gpus_from_proc() {
    std::vector<Gpu> found;
    for (const std::string& bus_id : names_in("/proc/driver/nvidia/gpus")) {
        Gpu gpu;
        gpu.id = fmt::format("{}", found.size());
        gpu.numa_node = numa_node_of(bus_id);
        const Result<std::string> text =
            read_file(fmt::format("/proc/driver/nvidia/gpus/{}/information", bus_id), kMaxSmallFile);
        if (text) {
            for (const std::string_view line : split(*text, '\n')) {
                if (line.starts_with("GPU UUID:")) gpu.uuid = trim(line.substr(9));
            }
        }
        found.push_back(std::move(gpu));
    }
    return found;
}

std::vector<Gpu> gpus_from_dev() {
    std::vector<Gpu> found;
    for (const std::string& name : names_in("/dev")) {
        if (!name.starts_with("nvidia") || !parse_uint(std::string_view(name).substr(6))) continue;
        found.push_back({fmt::format("{}", found.size()), "", -1});
    }
    return found;
}

/// The physical GPU of an entry of CUDA_VISIBLE_DEVICES; nullptr: none.
const Gpu* gpu_of_entry(const std::vector<Gpu>& physical, std::string_view entry) {
    if (const Result<std::int64_t> index = parse_int_between(entry, 0, std::int64_t(physical.size()) - 1)) {
        return &physical[static_cast<std::size_t>(*index)];
    }
    if (!entry.starts_with("GPU-")) return nullptr;
    // CUDA accepts any unique beginning of a UUID.
    const Gpu* match = nullptr;
    for (const Gpu& gpu : physical) {
        if (!gpu.uuid.starts_with(entry)) continue;
        if (match != nullptr) return nullptr;
        match = &gpu;
    }
    return match;
}

}  // namespace

std::string sysfs_bus_id(std::string_view nvml_id) {
    std::string id = lower(nvml_id);
    if (id.size() == 16 && id.starts_with("0000")) id.erase(0, 4);
    return id;
}

int numa_node_of(const std::string& bus_id) {
    const Result<std::string> text =
        read_file(fmt::format("/sys/bus/pci/devices/{}/numa_node", bus_id), kMaxSmallFile);
    if (!text) return -1;
    const Result<std::int64_t> node = parse_int(trim(*text));
    return node && *node >= 0 ? static_cast<int>(*node) : -1;
}

std::vector<Gpu> visible_gpus(const std::vector<Gpu>& physical,
                              const std::optional<std::string>& visible_devices) {
    if (!visible_devices || physical.empty()) return physical;
    std::vector<Gpu> visible;
    std::set<std::string> seen;
    for (const std::string_view piece : split(*visible_devices, ',')) {
        const std::string entry(trim(piece));
        Gpu gpu;
        if (const Gpu* match = gpu_of_entry(physical, entry)) gpu = *match;
        // A MIG device's name does not tell its GPU. Without the GPUs' UUIDs, any UUID is accepted.
        else if (!entry.starts_with("MIG-") && !(entry.starts_with("GPU-") && physical.front().uuid.empty()))
            break;
        const std::string identity = gpu.uuid.empty() ? entry : gpu.uuid;
        if (!seen.insert(identity).second) break;
        gpu.id = entry;
        visible.push_back(std::move(gpu));
    }
    return visible;
}

PhysicalGpus find_nvidia_gpus() {
    if (const Result<nvml::Session> nvml = nvml::Session::open()) return {gpus_from_nvml(*nvml), "NVML"};
    if (std::vector<Gpu> found = gpus_from_proc(); !found.empty())
        return {std::move(found), "/proc/driver/nvidia"};
    return {gpus_from_dev(), "/dev"};
}

}  // namespace ddprun
