#pragma once

#include <memory>

#include "ddp/cuda/module.h"
#include "ddp/process_group.h"

namespace ddp::cuda {

/// The kernels of libddp on one device. Every call puts work on `stream` and returns; buffers are device
/// memory of any alignment (16 bytes is fast) and live until the stream has come past. Thread-safe.
class DeviceKernels {
  public:
    /// Loaded at the first call, kept for the life of the process. Throws Error (see Module).
    static const DeviceKernels& of(const std::shared_ptr<const Gpu>& gpu);

    explicit DeviceKernels(std::shared_ptr<const Gpu> gpu);

    [[nodiscard]] const Gpu& gpu() const { return *gpu_; }

    /// to[i] = from[i] * scale, rounded once to nearest even; float32, bfloat16, float16 in any combination.
    /// In place when both are the same buffer; any other overlap is an error. Throws InvalidInput for other
    /// types or different counts.
    void scale_cast(const Buffer& from, const Buffer& to, float scale, Stream stream) const;

  private:
    std::shared_ptr<const Gpu> gpu_;
    Module module_;
    Function scale_cast_[3][3];  ///< by FloatType of source and target
};

}  // namespace ddp::cuda
