#pragma once

#include <string>
#include <string_view>

#include "ddp/types.h"

namespace ddp {

enum class Backend : std::uint8_t { Cpu, Nccl };

struct BackendChoice {
    Backend backend;
    std::string why;  ///< "auto: buffers are in host memory"
};

/// Which backend a group gets. `requested` is auto, cpu or nccl; `nccl_problem` says why NCCL cannot be used
/// here, "" when it can. Throws InvalidInput for an unknown name, and where nothing fits.
BackendChoice choose_backend(std::string_view requested, const Device& device,
                             const std::string& nccl_problem);

}  // namespace ddp
