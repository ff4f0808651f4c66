#include "launcher/machine/gpu/gpu_health.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"
#include "launcher/machine/gpu/nvidia.h"

namespace ddprun {
namespace {

/// The driver itself may use this much (persistence daemon, display, MIG bookkeeping).
constexpr std::uint64_t kDriversOwnBytes = 1200ULL << 20;

constexpr const char* kReset =
    "reset it (nvidia-smi --gpu-reset -i INDEX, no process on it), or reboot the node";
constexpr const char* kReplace = "take the node out of service and have the GPU replaced";

// nvmlClocksThrottleReason*
constexpr std::uint64_t kHardwareSlowdown = 0x8, kSoftwareThermal = 0x20, kHardwareThermal = 0x40,
                        kPowerBrake = 0x80;

class Findings {
  public:
    explicit Findings(const GpuFacts& gpu) : index_(fmt::format("{}", gpu.index)) {}
    /// INDEX in the remedy is replaced by this GPU's.
    void add(Severity severity, std::string what, std::string remedy = "") {
        if (const std::size_t at = remedy.find("INDEX"); at != std::string::npos)
            remedy.replace(at, 5, index_);
        all_.push_back({severity, "GPUs", "GPU " + index_, std::move(what), std::move(remedy)});
    }
    std::vector<Finding> take() { return std::move(all_); }

  private:
    std::string index_;
    std::vector<Finding> all_;
};

void judge_memory(const GpuFacts& gpu, Findings& found) {
    if (gpu.remap_failed.value_or(false))
        found.add(Severity::Error, "defective memory rows could not be replaced", kReplace);
    if (gpu.uncorrected_now.value_or(0) > 0) {
        found.add(
            Severity::Error,
            fmt::format("uncorrectable ECC errors since the driver was loaded: {}", *gpu.uncorrected_now),
            kReset);
    }
    if (gpu.remap_pending.value_or(false))
        found.add(Severity::Error, "defective memory rows wait to be replaced", kReset);
    if (gpu.pages_pending.value_or(false))
        found.add(Severity::Error, "defective memory pages wait to be retired", kReset);
    if (gpu.uncorrected_ever.value_or(0) > gpu.uncorrected_now.value_or(0)) {
        found.add(Severity::Note,
                  fmt::format("uncorrectable ECC errors in its life: {}", *gpu.uncorrected_ever));
    }
    if (gpu.ecc && !*gpu.ecc)
        found.add(Severity::Note, "ECC is off: a flipped bit stays unseen", "nvidia-smi -e 1, then reboot");
}

void judge_recovery(const GpuFacts& gpu, Findings& found) {
    switch (gpu.recovery_action.value_or(0)) {
        case 0: return;
        case 1: return found.add(Severity::Error, "the driver asks for a reset of this GPU", kReset);
        case 2:
            return found.add(Severity::Error, "the driver asks for a reboot of the node", "reboot the node");
        case 3:
            return found.add(Severity::Error,
                             "the driver asks to stop all programs on this GPU and its peers",
                             "stop them, then start again");
        default:
            return found.add(Severity::Error,
                             "the driver asks to stop all programs on this GPU, then to reset it", kReset);
    }
}

std::string describe(const GpuProcess& process) {
    std::string text = process.program.empty() ? "process" : process.program;
    if (process.pid != 0) text += fmt::format(" {}", process.pid);
    if (process.used_bytes) text += fmt::format(" ({})", format_bytes(*process.used_bytes));
    return text;
}

/// True for the server of CUDA's Multi-Process Service, which shares a GPU on purpose. (The kernel cuts names
/// to 15 bytes.)
bool is_mps(const GpuProcess& process) { return process.program.starts_with("nvidia-cuda-mps"); }

void judge_users(const GpuFacts& gpu, Findings& found) {
    std::vector<std::string> users;
    for (const GpuProcess& process : gpu.processes) users.push_back(describe(process));
    if (std::any_of(gpu.processes.begin(), gpu.processes.end(), is_mps))
        return found.add(Severity::Note, fmt::format("shared through MPS: {}", join(users, ", ")));
    const bool exclusive =
        gpu.compute_mode == ComputeMode::ExclusiveProcess || gpu.compute_mode == ComputeMode::ExclusiveThread;
    if (!users.empty() && exclusive) {
        found.add(
            Severity::Error,
            fmt::format("in use by {}, and its compute mode admits only one process", join(users, ", ")),
            "end that process, choose another GPU with CUDA_VISIBLE_DEVICES, or nvidia-smi -c DEFAULT");
    } else if (!users.empty()) {
        found.add(Severity::Warning, fmt::format("in use by {}", join(users, ", ")),
                  "end that process, or choose another GPU with CUDA_VISIBLE_DEVICES");
    } else if (gpu.used_bytes.value_or(0) > kDriversOwnBytes) {
        // In a container NVML hides the processes of others.
        found.add(
            Severity::Warning,
            fmt::format("{} of its memory are in use by processes that cannot be seen from here",
                        format_bytes(*gpu.used_bytes)),
            "look with nvidia-smi outside the container, or choose another GPU with CUDA_VISIBLE_DEVICES");
    }
    if (gpu.compute_mode == ComputeMode::Prohibited)
        found.add(Severity::Error, "its compute mode forbids CUDA", "nvidia-smi -c DEFAULT -i INDEX");
}

void judge_speed(const GpuFacts& gpu, Findings& found) {
    const std::uint64_t reasons = gpu.throttle_reasons.value_or(0);
    const std::string heat = gpu.celsius ? fmt::format(" at {} C", *gpu.celsius) : "";
    if ((reasons & (kSoftwareThermal | kHardwareThermal)) != 0)
        found.add(Severity::Warning, "slowed down by heat" + heat, "see to its cooling");
    else if ((reasons & (kHardwareSlowdown | kPowerBrake)) != 0)
        found.add(Severity::Warning, "slowed down by its power supply", "see to the node's power supply");
    if (gpu.links > 0 && gpu.links_up < gpu.links && gpu.links_up > 0) {
        found.add(Severity::Warning,
                  fmt::format("{} of {} NVLinks are down", gpu.links - gpu.links_up, gpu.links),
                  "nvidia-smi nvlink --status; reset the GPU, or have its connection looked at");
    }
    // An idle GPU lowers its PCIe generation, but not its width.
    if (gpu.pcie_width && gpu.pcie_max_width && *gpu.pcie_width < *gpu.pcie_max_width) {
        found.add(Severity::Note,
                  fmt::format("PCIe x{} where the GPU can x{}", *gpu.pcie_width, *gpu.pcie_max_width),
                  "reseat the card, or see to the slot's wiring");
    }
    if (gpu.persistence && !*gpu.persistence)
        found.add(Severity::Note, "persistence mode is off: the first program waits for the driver",
                  "nvidia-smi -pm 1, or nvidia-persistenced");
}

void judge_xids(const GpuFacts& gpu, Findings& found) {
    std::map<int, int> counts;
    for (const Xid& xid : gpu.xids) ++counts[xid.number];
    for (const auto& [number, count] : counts) {
        const std::string meaning = explain_xid(number);
        if (meaning.empty()) continue;
        found.add(Severity::Warning,
                  fmt::format("XID {} in the kernel's log{}: {}", number,
                              count > 1 ? fmt::format(" ({} times)", count) : "", meaning),
                  kReset);
    }
}

constexpr std::string_view kOverride = "--gpu-check=warn starts all the same";

const GpuFacts* facts_of(const NvidiaFacts& nvidia, const Gpu& gpu) {
    const auto same = [&](const GpuFacts& facts) {
        return gpu.uuid.empty() ? gpu.id == fmt::format("{}", facts.index) : gpu.uuid == facts.uuid;
    };
    const auto found = std::find_if(nvidia.gpus.begin(), nvidia.gpus.end(), same);
    return found == nvidia.gpus.end() ? nullptr : &*found;  // a MIG device's name does not tell its GPU
}

void sort_in(GpuVerdict& verdict, GpuCheck check, Severity severity, const std::string& line) {
    if (severity < Severity::Warning) return;
    const bool refuses =
        check == GpuCheck::Refuse || (check == GpuCheck::Auto && severity == Severity::Error);
    if (refuses) verdict.refusals.push_back(fmt::format("{}; {}", line, kOverride));
    else verdict.warnings.push_back(line);
}

}  // namespace

std::string explain_xid(int number) {
    switch (number) {
        case 48: return "an uncorrectable memory error";
        case 62:
        case 119:
        case 120: return "the GPU's own processor stopped answering";
        case 63: return "a defective memory row or page was marked for replacement";
        case 64: return "a defective memory row or page could not be replaced";
        case 74: return "an NVLink error";
        case 79: return "the GPU fell off the bus";
        case 92: return "too many correctable memory errors";
        case 94: return "an uncorrectable memory error that hit one program";
        case 95: return "an uncorrectable memory error that may have hit every program";
        case 140: return "an uncorrectable memory error that was not recovered from";
        case 143: return "the GPU could not be initialised";
        case 149:
        case 150: return "an NVLink or NVSwitch error";
        case 154: return "the driver asks for a recovery of the GPU";
        default: return "";
    }
}

std::vector<Finding> gpu_health(const GpuFacts& gpu) {
    Findings found(gpu);
    if (!gpu.lost.empty()) {
        found.add(Severity::Error, gpu.lost, kReset);
        return found.take();
    }
    judge_memory(gpu, found);
    judge_recovery(gpu, found);
    judge_users(gpu, found);
    if (gpu.mig.value_or(false))
        found.add(Severity::Note, "MIG is on: programs see its instances, and each program only one",
                  "name them in CUDA_VISIBLE_DEVICES (nvidia-smi -L)");
    judge_speed(gpu, found);
    judge_xids(gpu, found);
    return found.take();
}

std::string cuda_version_text(int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

bool checks_gpus(const JobSpec& spec, int gpus) {
    switch (spec.gpu_check) {
        case GpuCheck::Off: return false;
        case GpuCheck::Warn:
        case GpuCheck::Refuse: return true;
        case GpuCheck::Auto: break;
    }
    const bool asks = spec.workers.kind == WorkerCount::Kind::Gpu ||
                      spec.workers.kind == WorkerCount::Kind::Auto || spec.narrow_gpus ||
                      spec.virtual_local_rank;
    return asks && gpus > 0;
}

GpuVerdict judge_job_gpus(const JobSpec& spec, int workers, const NvidiaFacts& nvidia,
                          const std::optional<std::string>& visible_devices) {
    GpuVerdict verdict;
    if (nvidia.mismatch) sort_in(verdict, spec.gpu_check, Severity::Error, nvidia.problem);
    if (!nvidia.problem.empty()) return verdict;
    const std::vector<Gpu> visible = visible_gpus(physical_gpus(nvidia), visible_devices);
    for (std::size_t rank = 0; rank < visible.size() && rank < static_cast<std::size_t>(workers); ++rank) {
        const GpuFacts* facts = facts_of(nvidia, visible[rank]);
        if (facts == nullptr) continue;
        for (const Finding& finding : gpu_health(*facts)) {
            std::string line = fmt::format("{} (local rank {}): {}", finding.subject, rank, finding.what);
            if (!finding.remedy.empty()) line += ": " + finding.remedy;
            sort_in(verdict, spec.gpu_check, finding.severity, line);
        }
    }
    if (static_cast<int>(visible.size()) < workers) {
        sort_in(verdict, spec.gpu_check, Severity::Warning,
                fmt::format("{} workers and {} visible GPUs: --nproc-per-node, CUDA_VISIBLE_DEVICES", workers,
                            visible.size()));
    }
    return verdict;
}

}  // namespace ddprun
