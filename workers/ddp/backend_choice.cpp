#include "ddp/backend_choice.h"

#include <fmt/core.h>

namespace ddp {

BackendChoice choose_backend(std::string_view requested, const Device& device,
                             const std::string& nccl_problem) {
    const bool on_gpu = device.kind == Device::Kind::Cuda;
    if (requested != "auto" && requested != "cpu" && requested != "nccl") {
        throw InvalidInput(fmt::format("no backend '{}'; this build has: auto, cpu, nccl", requested));
    }
    if (requested == "cpu" && on_gpu) {
        throw InvalidInput(fmt::format("backend cpu: it takes host memory, the buffers lie on CUDA device {}",
                                       device.index));
    }
    if (requested == "cpu") return {Backend::Cpu, "asked for"};
    if (requested == "auto" && !on_gpu) return {Backend::Cpu, "auto: buffers are in host memory"};
    if (!nccl_problem.empty()) throw InvalidInput(fmt::format("backend {}: {}", requested, nccl_problem));
    return {Backend::Nccl, requested == "nccl" ? "asked for" : "auto: buffers are on a CUDA device"};
}

}  // namespace ddp
