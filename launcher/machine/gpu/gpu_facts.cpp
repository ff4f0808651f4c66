#include "launcher/machine/gpu/gpu_facts.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <array>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/machine/gpu/nvml.h"

namespace ddprun {
namespace {

using nvml::Code;

constexpr std::size_t kMaxProcesses = 256;
constexpr std::size_t kMaxKernelLines = 100'000;
constexpr int kUncorrected = 1;                 // NVML_MEMORY_ERROR_TYPE_UNCORRECTED
constexpr int kSinceStart = 0, kOfItsLife = 1;  // NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC
constexpr int kPeerRead = 0, kPeerNvLink = 2;   // NVML_P2P_CAPS_INDEX_READ, _NVLINK

/// The answer to a question; nullopt when this GPU, driver or library does not know it.
template <class Answer, class Question, class... Arguments>
std::optional<Answer> ask(Question question, nvml::Device device, Arguments... arguments) {
    Answer answer{};
    if (question == nullptr || question(device, arguments..., &answer) != Code::Success) return std::nullopt;
    return answer;
}

std::optional<bool> truth(const std::optional<int>& number) {
    return number ? std::optional(*number != 0) : std::nullopt;
}

template <std::size_t N, class Question, class... Arguments>
std::string ask_text(Question question, Arguments... arguments) {
    std::array<char, N> text{};
    if (question == nullptr ||
        question(arguments..., text.data(), static_cast<unsigned>(N - 1)) != Code::Success)
        return "";
    return text.data();
}

std::vector<GpuProcess> processes_on(const nvml::Session& nvml, nvml::Device device) {
    std::vector<GpuProcess> found;
    std::array<nvml::ProcessInfo, kMaxProcesses> infos{};
    unsigned count = kMaxProcesses;
    if (nvml->processes == nullptr || nvml->processes(device, &count, infos.data()) != Code::Success)
        return found;
    for (unsigned i = 0; i < count && i < kMaxProcesses; ++i) {
        GpuProcess process;
        process.pid = infos[i].pid;
        if (infos[i].used_bytes != nvml::kUnknownBytes) process.used_bytes = infos[i].used_bytes;
        process.program =
            trim(read_file(fmt::format("{}/{}/comm", own_proc(), process.pid), 4096).value_or(""));
        found.push_back(std::move(process));
    }
    return found;
}

void read_memory_health(const nvml::Session& nvml, nvml::Device device, GpuFacts& gpu) {
    int now = 0, pending = 0;
    if (nvml->ecc_mode != nullptr && nvml->ecc_mode(device, &now, &pending) == Code::Success)
        gpu.ecc = now != 0;
    gpu.uncorrected_now = ask<unsigned long long>(nvml->ecc_errors, device, kUncorrected, kSinceStart);
    gpu.uncorrected_ever = ask<unsigned long long>(nvml->ecc_errors, device, kUncorrected, kOfItsLife);
    unsigned corrected = 0, uncorrected = 0, remap_pending = 0, remap_failed = 0;
    if (nvml->remapped_rows != nullptr &&
        nvml->remapped_rows(device, &corrected, &uncorrected, &remap_pending, &remap_failed) ==
            Code::Success) {
        gpu.remap_pending = remap_pending != 0;
        gpu.remap_failed = remap_failed != 0;
    }
    gpu.pages_pending = truth(ask<int>(nvml->retired_pages_pending, device));
}

void read_modes(const nvml::Session& nvml, nvml::Device device, GpuFacts& gpu) {
    unsigned now = 0, pending = 0;
    if (nvml->mig_mode != nullptr && nvml->mig_mode(device, &now, &pending) == Code::Success)
        gpu.mig = now != 0;
    gpu.persistence = truth(ask<int>(nvml->persistence_mode, device));
    const std::optional<int> mode = ask<int>(nvml->compute_mode, device);
    if (mode && *mode >= 0 && *mode <= 3) gpu.compute_mode = static_cast<ComputeMode>(*mode);
    gpu.throttle_reasons = ask<unsigned long long>(nvml->throttle_reasons, device);
    gpu.celsius = ask<unsigned>(nvml->temperature, device, 0);
    int major = 0, minor = 0;
    if (nvml->capability != nullptr && nvml->capability(device, &major, &minor) == Code::Success)
        gpu.capability = fmt::format("{}.{}", major, minor);
    nvml::FieldValue field{};
    field.field = nvml::kFieldRecoveryAction;
    if (nvml->field_values != nullptr && nvml->field_values(device, 1, &field) == Code::Success &&
        field.code == Code::Success)
        gpu.recovery_action = field.value.number;
}

void read_connections(const nvml::Session& nvml, nvml::Device device, GpuFacts& gpu) {
    gpu.pcie_generation = ask<unsigned>(nvml->pcie_generation, device);
    gpu.pcie_max_generation = ask<unsigned>(nvml->pcie_max_generation, device);
    gpu.pcie_width = ask<unsigned>(nvml->pcie_width, device);
    gpu.pcie_max_width = ask<unsigned>(nvml->pcie_max_width, device);
    for (unsigned link = 0; link < nvml::kMaxLinks; ++link) {
        const std::optional<int> active = ask<int>(nvml->link_state, device, link);
        if (!active) break;
        ++gpu.links;
        if (*active != 0) ++gpu.links_up;
    }
}

GpuFacts read_gpu(const nvml::Session& nvml, unsigned index) {
    GpuFacts gpu;
    gpu.index = index;
    nvml::Device device = nullptr;
    if (const Code code = nvml->handle(index, &device); code != Code::Success) {
        gpu.lost = nvml::explain(code);
        return gpu;
    }
    gpu.name = ask_text<96>(nvml->name, device);
    gpu.uuid = ask_text<96>(nvml->uuid, device);
    if (const auto pci = ask<nvml::PciInfo>(nvml->pci, device)) gpu.bus_id = sysfs_bus_id(pci->bus_id);
    gpu.numa_node = numa_node_of(gpu.bus_id);
    nvml::Memory memory{};
    if (nvml->memory != nullptr) {
        const Code code = nvml->memory(device, &memory);
        if (code == Code::GpuIsLost || code == Code::ResetRequired) {
            gpu.lost = nvml::explain(code);
            return gpu;
        }
        if (code == Code::Success) gpu.total_bytes = memory.total, gpu.used_bytes = memory.used;
    }
    read_memory_health(nvml, device, gpu);
    read_modes(nvml, device, gpu);
    read_connections(nvml, device, gpu);
    gpu.processes = processes_on(nvml, device);
    return gpu;
}

GpuDistance distance_of(const nvml::Session& nvml, nvml::Device a, nvml::Device b) {
    int status = -1;
    if (nvml->p2p_status != nullptr && nvml->p2p_status(a, b, kPeerNvLink, &status) == Code::Success &&
        status == 0)
        return GpuDistance::NvLink;
    int level = -1;
    if (nvml->common_ancestor == nullptr || nvml->common_ancestor(a, b, &level) != Code::Success)
        return GpuDistance::Unknown;
    switch (level) {  // nvmlGpuTopologyLevel_t
        case 0: return GpuDistance::SameBoard;
        case 10: return GpuDistance::SameSwitch;
        case 20: return GpuDistance::SeveralSwitches;
        case 30: return GpuDistance::HostBridge;
        case 40: return GpuDistance::NumaNode;
        case 50: return GpuDistance::System;
        default: return GpuDistance::Unknown;
    }
}

std::vector<GpuPair> read_pairs(const nvml::Session& nvml, unsigned count) {
    std::vector<GpuPair> pairs;
    for (unsigned a = 0; a < count; ++a) {
        for (unsigned b = a + 1; b < count; ++b) {
            nvml::Device first = nullptr, second = nullptr;
            if (nvml->handle(a, &first) != Code::Success || nvml->handle(b, &second) != Code::Success)
                continue;
            GpuPair pair{a, b, distance_of(nvml, first, second), std::nullopt};
            int status = -1;
            if (nvml->p2p_status != nullptr &&
                nvml->p2p_status(first, second, kPeerRead, &status) == Code::Success)
                pair.peer_access = status == 0;
            pairs.push_back(pair);
        }
    }
    return pairs;
}

/// The XIDs in the kernel's log; empty when we may not read it.
std::vector<Xid> read_xids() {
    std::vector<Xid> xids;
    const UniqueFd log(::open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    char record[8192];
    for (std::size_t i = 0; log && i < kMaxKernelLines; ++i) {
        const ssize_t n = ::read(log.get(), record, sizeof record);
        if (n < 0 && errno == EPIPE) continue;  // records were overwritten before we read them
        if (n <= 0) break;
        if (std::optional<Xid> xid = parse_xid({record, static_cast<std::size_t>(n)}))
            xids.push_back(*std::move(xid));
    }
    return xids;
}

/// True when the PCI bus has a display or 3D controller of NVIDIA.
bool has_nvidia_device() {
    const std::string devices = "/sys/bus/pci/devices/";
    for (const std::string& name : names_in(devices)) {
        const std::string path = devices + name;
        if (trim(read_file(path + "/vendor", 64).value_or("")) != "0x10de") continue;
        if (read_file(path + "/class", 64).value_or("").starts_with("0x03")) return true;
    }
    return false;
}

}  // namespace

std::optional<Xid> parse_xid(std::string_view line) {
    constexpr std::string_view kMark = "NVRM: Xid (PCI:";
    const std::size_t at = line.find(kMark);
    if (at == std::string_view::npos) return std::nullopt;
    line.remove_prefix(at + kMark.size());
    line = line.substr(0, line.find('\n'));
    const std::size_t close = line.find("): ");
    if (close == std::string_view::npos) return std::nullopt;
    Xid xid;
    xid.bus_id = lower(line.substr(0, close));
    if (xid.bus_id.find('.') == std::string::npos) xid.bus_id += ".0";
    line.remove_prefix(close + 3);
    const std::size_t comma = line.find(',');
    const Result<std::int64_t> number = parse_int_between(line.substr(0, comma), 0, 100'000);
    if (!number) return std::nullopt;
    xid.number = static_cast<int>(*number);
    if (comma != std::string_view::npos) xid.text = trim(line.substr(comma + 1));
    return xid;
}

std::vector<Gpu> physical_gpus(const NvidiaFacts& nvidia) {
    std::vector<Gpu> gpus;
    for (const GpuFacts& facts : nvidia.gpus)
        gpus.push_back({fmt::format("{}", facts.index), facts.uuid, facts.numa_node});
    return gpus;
}

NvidiaFacts read_nvidia_facts(NvidiaDetail detail) {
    NvidiaFacts facts;
    facts.has_device = has_nvidia_device();
    const Result<nvml::Session> nvml = nvml::Session::open();
    if (!nvml) {
        facts.problem = nvml.error().what;
        facts.mismatch = nvml.error().code == Errc::Mismatch;
        return facts;
    }
    facts.driver = ask_text<96>((*nvml)->driver_version);
    if ((*nvml)->cuda_version != nullptr) (*nvml)->cuda_version(&facts.cuda_version);
    unsigned count = 0;
    if ((*nvml)->count(&count) != Code::Success) count = 0;
    for (unsigned index = 0; index < count; ++index) facts.gpus.push_back(read_gpu(*nvml, index));
    if (detail == NvidiaDetail::AndTopology) facts.pairs = read_pairs(*nvml, count);
    for (const Xid& xid : read_xids()) {
        for (GpuFacts& gpu : facts.gpus) {
            if (gpu.bus_id == xid.bus_id) gpu.xids.push_back(xid);
        }
    }
    return facts;
}

}  // namespace ddprun
