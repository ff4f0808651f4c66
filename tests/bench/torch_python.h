#pragma once

#include <cstdlib>
#include <string>

namespace bench {

/// The Python in PYTHON_EXEC, or python3; "" if it has no PyTorch.
inline std::string torch_python() {
    const char* const chosen = std::getenv("PYTHON_EXEC");
    const std::string python = chosen != nullptr ? chosen : "python3";
    return std::system((python + " -c 'import torch.distributed' 2>/dev/null").c_str()) == 0 ? python : "";
}

}  // namespace bench
