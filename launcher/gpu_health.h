#pragma once

#include <string>
#include <vector>

#include "launcher/finding.h"
#include "launcher/gpu_facts.h"

namespace ddprun {

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

}  // namespace ddprun
