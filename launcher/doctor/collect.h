#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/doctor/facts.h"

/// Looks at this machine. Nothing here fails: what cannot be read stays at its default. Together some ten
/// milliseconds, and more where a driver has to be woken.
namespace ddprun::doctor {

HostFacts collect_host();
NetworkFacts collect_network();
/// Opens the CUDA runtime and NCCL and asks their versions, in a process of its own: a broken library may end
/// it.
SoftwareFacts collect_software();

/// From the text of /proc/self/cgroup: the directories, from the process's own cgroup up to the mount point,
/// that can hold a limit of `controller` ("memory", "pids", "cpu"). `version` is set to 1 or 2. Pure.
std::vector<std::string> cgroup_directories(std::string_view text, std::string_view controller, int& version);

}  // namespace ddprun::doctor
