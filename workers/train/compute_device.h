#pragma once

#include <memory>
#include <string>

#include "compute.h"
#include "ddp/cuda/memory.h"
#include "ddp/types.h"
#include "env/result.h"
#include "options.h"

namespace train {

/// The state of CUDA in this process.
struct CudaFacts {
    int devices = 0;      ///< visible devices
    std::string problem;  ///< reason why none of them can be used; "" when they can
    int local_rank = 0;
};

struct DeviceChoice {
    ddp::Device device;
    std::string why;  ///< "auto: 2 CUDA devices"
};

/// Chooses the device to train on. Local ranks take the devices round robin; more ranks than devices share
/// them. Error: NotFound when a requested device does not exist.
ddprun::Result<DeviceChoice> choose_device(const Options& options, const CudaFacts& facts);

/// True when the choice depends on the devices: only then does train look for CUDA.
bool may_use_cuda(const Options& options);

/// The device that a rank computes on. All work is queued on the stream, also the group's collectives; null
/// on the CPU.
struct ComputeDevice {
    DeviceChoice choice;
    std::shared_ptr<const ddp::cuda::Gpu> gpu;
    std::unique_ptr<ddp::cuda::OwnedStream> stream;
    std::unique_ptr<Compute> compute;

    [[nodiscard]] ddp::cuda::Stream stream_handle() const { return stream ? stream->get() : nullptr; }
};

/// Looks for CUDA where the options allow it, makes the device current and loads its libraries. Error:
/// NotFound when the options need a device and none can be used; otherwise it takes the CPU then, with the
/// reason in `choice`.
ddprun::Result<ComputeDevice> open_compute_device(const Options& options, int local_rank);

}  // namespace train
