#pragma once

#include <cstddef>

#include "ddp/cuda_api.h"
#include "ddp/nccl_api.h"

namespace ddp::nccl {

/// How memory can be made known to a communicator, from least to best. Symmetric: a window at the same place
/// on all ranks, so that NCCL takes its fastest kernels for it; those only sum.
enum class Registration : char { None = '-', Plain = 'p', Symmetric = 's' };

/// Device memory, from NCCL where it has some of its own (registered transfers), else from CUDA. The tables
/// are borrowed.
class DeviceMemory {
  public:
    /// Throws Error with CUDA's reason.
    DeviceMemory(const Api& nccl, const cuda::Api& cuda, std::size_t bytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    [[nodiscard]] std::byte* get() const { return static_cast<std::byte*>(address_); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    /// The best that this memory and this NCCL allow.
    [[nodiscard]] Registration best_registration() const;

  private:
    const Api& nccl_;
    const cuda::Api& cuda_;
    void* address_ = nullptr;
    std::size_t bytes_;
    bool from_nccl_;
};

}  // namespace ddp::nccl
