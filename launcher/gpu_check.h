#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/discover.h"
#include "launcher/gpu_facts.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// What is wrong with the GPUs that a job's workers will take.
struct GpuVerdict {
    std::vector<std::string> refusals;  ///< each one line; the job must not start
    std::vector<std::string> warnings;  ///< each one line
    bool operator==(const GpuVerdict&) const = default;
};

/// Whether this job's GPUs are looked at before it starts: always with --gpu-check=warn or refuse; with auto
/// only when the job asks for GPUs (--nproc-per-node=gpu or auto, --narrow-gpus, --virtual-local-rank): of a
/// program that gets a count nobody knows whether it uses them, and NVML would delay its start. Pure.
bool looks_at_gpus(const JobSpec& spec, const Machine& machine);

/// Local rank i takes the i-th visible GPU. Auto refuses what no program can use (Severity::Error) and warns
/// of the rest; warn never refuses; refuse warns of nothing and refuses. Pure.
GpuVerdict judge_job_gpus(const JobSpec& spec, int workers, const NvidiaFacts& nvidia,
                          const std::optional<std::string>& visible_devices);

}  // namespace ddprun
