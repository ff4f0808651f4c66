#include <algorithm>

#include "env/os/system.h"
#include "launcher/tools/doctor/collect.h"

namespace ddprun::doctor {
namespace {

bool matters(std::string_view name) {
    for (const std::string_view prefix : {"NCCL_", "TORCH_NCCL_", "UCX_", "FI_", "DDP_", "CUDA_DEVICE_",
                                          "CUDA_LAUNCH_", "CUDA_MODULE_", "CUBLAS_"}) {
        if (name.starts_with(prefix)) return true;
    }
    return name == "LD_PRELOAD";
}

}  // namespace

Variables collect_variables() {
    Variables variables;
    for (const std::string& one : os::own_environment()) {
        const std::string_view text(one);
        const std::size_t equals = text.find('=');
        if (equals != std::string_view::npos && matters(text.substr(0, equals)))
            variables.emplace_back(text.substr(0, equals), text.substr(equals + 1));
    }
    std::sort(variables.begin(), variables.end());
    return variables;
}

}  // namespace ddprun::doctor
