#include <fmt/core.h>

#include <algorithm>

#include "launcher/tools/doctor/judge.h"

namespace ddprun::doctor {

/// Variables that people set to find an error, forget, and pay for.
std::vector<Finding> judge_variables(const Variables& variables) {
    struct Trap {
        const char* name;
        const char* value;  ///< "" any
        const char* why;
    };
    constexpr Trap kTraps[] = {
        {"CUDA_LAUNCH_BLOCKING", "1", "every kernel waits for the one before it: for debugging only"},
        {"NCCL_P2P_DISABLE", "1", "GPUs exchange data through the host: many times slower"},
        {"NCCL_SHM_DISABLE", "1", "ranks of one node talk over the network"},
        {"NCCL_IB_DISABLE", "1", "InfiniBand is not used"},
        {"NCCL_NET_GDR_LEVEL", "0", "GPUDirect RDMA is not used"},
        {"NCCL_DEBUG", "TRACE", "every NCCL call is logged: slow"},
        {"NCCL_ALGO", "", "NCCL may not choose its algorithm"},
        {"NCCL_PROTO", "", "NCCL may not choose its protocol"},
    };
    std::vector<Finding> rows;
    const auto add = [&rows](Severity severity, std::string what, std::string remedy) {
        rows.push_back({severity, "Variables", "variable", std::move(what), std::move(remedy)});
    };
    for (const auto& [name, value] : variables) {
        const auto trap =
            std::find_if(std::begin(kTraps), std::end(kTraps), [&n = name, &v = value](const Trap& one) {
                return n == one.name && (one.value[0] == '\0' || v == one.value);
            });
        if (trap == std::end(kTraps)) add(Severity::Ok, fmt::format("{}={}", name, value), "");
        else
            add(Severity::Warning, fmt::format("{}={}: {}", name, value, trap->why),
                fmt::format("unset {}", name));
    }
    return rows;
}

}  // namespace ddprun::doctor
