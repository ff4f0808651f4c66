#pragma once

#include <memory>
#include <string>

#include "compute.h"
#include "ddp/cuda/memory.h"
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

/// What a rank computes on. The stream is the one that everything is queued on, the group's collectives too;
/// null on the CPU.
struct Station {
    DeviceChoice choice;
    std::shared_ptr<const ddp::cuda::Gpu> gpu;
    std::unique_ptr<ddp::cuda::OwnedStream> stream;
    std::unique_ptr<Compute> compute;

    [[nodiscard]] ddp::cuda::Stream stream_handle() const { return stream ? stream->get() : nullptr; }
};

/// Looks for CUDA where the options allow it, makes the device current and loads what is needed onto it.
/// Error: NotFound when the options need a device and none can be used; of itself it takes the CPU then, and
/// says why in `choice`.
ddprun::Result<Station> open_station(const Options& options, int local_rank);

}  // namespace train
