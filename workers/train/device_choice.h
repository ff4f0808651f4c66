#pragma once

#include <string>

#include "ddp/types.h"
#include "env/result.h"
#include "options.h"

namespace train {

/// What a process has found out about CUDA.
struct CudaFacts {
    int devices = 0;      ///< that it sees
    std::string problem;  ///< why none of them can be used; "" when they can
    int local_rank = 0;
};

struct DeviceChoice {
    ddp::Device device;
    std::string why;  ///< "auto: 2 CUDA devices"
};

/// Where to train. Local ranks take the devices in turn; more ranks than devices share them.
/// Error: NotFound when what is asked for needs a device that is not there.
ddprun::Result<DeviceChoice> choose_device(const Options& options, const CudaFacts& facts);

/// Whether the answer depends on what there is: only then is CUDA looked for.
bool may_use_cuda(const Options& options);

}  // namespace train
