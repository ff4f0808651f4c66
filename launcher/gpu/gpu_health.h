#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/gpu/gpu_facts.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// From harmless to fatal: a Note is worth knowing, a Warning costs speed or fails later, with an Error a job
/// cannot work here.
enum class Severity : std::uint8_t { Ok, Note, Warning, Error };

/// One thing that was looked at, and what was found.
struct Finding {
    Severity severity = Severity::Ok;
    std::string section;  ///< "GPUs"
    std::string subject;  ///< "GPU 3"
    std::string what;     ///< "uncorrectable ECC errors since the driver was loaded: 2"
    std::string remedy;   ///< what to do or set; "" nothing
    bool operator==(const Finding&) const = default;
};

inline Severity worst(const std::vector<Finding>& findings) {
    Severity severity = Severity::Ok;
    for (const Finding& finding : findings) severity = std::max(severity, finding.severity);
    return severity;
}

/// What is wrong, or worth knowing, with one GPU: nothing when it is fine. Each finding's subject is "GPU
/// <index>".
///
/// Error: no program can use it, or its results cannot be trusted (lost, defective memory, prohibited, a
/// reset is due). Warning: in use by another process, hot, a link is down, an XID in the kernel's log. Note:
/// the rest. Pure.
std::vector<Finding> gpu_health(const GpuFacts& gpu);

/// What an XID means, from NVIDIA's catalogue; "" for those that are the program's own fault or harmless.
/// Pure.
std::string explain_xid(int number);

/// "12.4" of 12040.
std::string cuda_version_text(int version);

/// What is wrong with the GPUs that a job's workers will take.
struct GpuVerdict {
    std::vector<std::string> refusals;  ///< each one line; the job must not start
    std::vector<std::string> warnings;  ///< each one line
    bool operator==(const GpuVerdict&) const = default;
};

/// Whether this job's GPUs are looked at before it starts: always with --gpu-check=warn or refuse; with auto
/// only when the job asks for GPUs (--nproc-per-node=gpu or auto, --narrow-gpus, --virtual-local-rank): of a
/// program that gets a count nobody knows whether it uses them, and NVML would delay its start. Pure.
bool looks_at_gpus(const JobSpec& spec, int gpus);

/// Local rank i takes the i-th visible GPU. Auto refuses what no program can use (Severity::Error) and warns
/// of the rest; warn never refuses; refuse warns of nothing and refuses. Pure.
GpuVerdict judge_job_gpus(const JobSpec& spec, int workers, const NvidiaFacts& nvidia,
                          const std::optional<std::string>& visible_devices);

}  // namespace ddprun
