#pragma once

#include <string_view>
#include <vector>

#include "launcher/machine/gpu/gpu_health.h"
#include "launcher/tools/doctor/facts.h"

/// Judge the facts. All are pure.
namespace ddprun::doctor {

std::vector<Finding> judge_host(const HostFacts& host, bool has_rdma);
std::vector<Finding> judge_gpus(const NvidiaFacts& nvidia, const std::optional<std::string>& visible_devices);
std::vector<Finding> judge_variables(const Variables& variables);
std::vector<Finding> judge_network(const NetworkFacts& network, const Variables& variables);
std::vector<Finding> judge_trial(const TrialFacts& trial);

/// All findings, section by section, in the order of the report.
std::vector<Finding> judge(const Facts& facts);

}  // namespace ddprun::doctor
