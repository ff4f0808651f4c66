#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/machine/gpu/gpu_facts.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// How bad a finding is: a Note is worth knowing, a Warning costs speed or fails later, with an Error a job
/// cannot work here.
enum class Severity : std::uint8_t { Ok, Note, Warning, Error };

/// One finding about the machine.
struct Finding {
    Severity severity = Severity::Ok;
    std::string section;  ///< "GPUs"
    std::string subject;  ///< "GPU 3"
    std::string what;     ///< "uncorrectable ECC errors since the driver was loaded: 2"
    std::string remedy;   ///< what to do or set; "" none
    bool operator==(const Finding&) const = default;
};

inline Severity worst(const std::vector<Finding>& findings) {
    Severity severity = Severity::Ok;
    for (const Finding& finding : findings) severity = std::max(severity, finding.severity);
    return severity;
}

/// Judges one GPU: no finding when it is fine. Each finding's subject is "GPU <index>".
///
/// Error: no program can use it, or its results cannot be trusted (lost, defective memory, prohibited, a
/// reset is due). Warning: in use by another process, hot, a link is down, an XID in the kernel's log. Note:
/// all other findings. Pure.
std::vector<Finding> gpu_health(const GpuFacts& gpu);

/// The meaning of an XID by NVIDIA's catalogue; "" for those that are the program's fault or harmless. Pure.
std::string explain_xid(int number);

/// "12.4" for 12040.
std::string cuda_version_text(int version);

/// The problems of the GPUs that a job's workers will take.
struct GpuVerdict {
    std::vector<std::string> refusals;  ///< each one line; the job must not start
    std::vector<std::string> warnings;  ///< each one line
    bool operator==(const GpuVerdict&) const = default;
};

/// True when this job's GPUs are checked before it starts: always with --gpu-check=warn or refuse; with auto
/// only when the job asks for GPUs (--nproc-per-node=gpu or auto, --narrow-gpus, --virtual-local-rank). With
/// a worker count it is not known whether the program uses GPUs, and NVML would delay its start. Pure.
bool checks_gpus(const JobSpec& spec, int gpus);

/// Judges the job's GPUs by their Errors and Warnings; local rank i takes the i-th visible GPU. Auto refuses
/// on an Error and warns on a Warning, warn never refuses, refuse never warns. Pure.
GpuVerdict judge_job_gpus(const JobSpec& spec, int workers, const NvidiaFacts& nvidia,
                          const std::optional<std::string>& visible_devices);

}  // namespace ddprun
