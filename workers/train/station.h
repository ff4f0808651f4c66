#pragma once

#include <memory>

#include "compute.h"
#include "ddp/cuda/memory.h"
#include "device_choice.h"

namespace train {

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
