#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ddp/cuda/driver_api.h"
#include "ddp/cuda_api.h"

namespace ddp::cuda {

/// One CUDA device of this process: the libraries' entry points and what a launch has to know of the device.
/// Thread-safe.
class Gpu {
  public:
    /// The device with that number, opened at the first call and kept for the life of the process (as CUDA
    /// itself keeps it). Throws Error with the loader's or CUDA's reason.
    static std::shared_ptr<const Gpu> of(int index);

    Gpu(std::shared_ptr<const Api> api, std::shared_ptr<const DriverApi> driver, int index);

    [[nodiscard]] const Api& api() const { return *api_; }
    [[nodiscard]] const std::shared_ptr<const Api>& shared_api() const { return api_; }
    [[nodiscard]] const DriverApi& driver() const { return *driver_; }
    [[nodiscard]] int index() const { return index_; }

    /// The calling thread's CUDA calls are for this device from now on. Every thread that launches or
    /// allocates calls it once.
    void make_current() const;
    /// Blocks of ddp::device::kBlockThreads for an element-wise kernel: enough to fill the device, no more
    /// than there is work for. At least 1.
    [[nodiscard]] unsigned grid_for(std::uint64_t elements) const;
    /// The same for a kernel that gives each row to one warp.
    [[nodiscard]] unsigned grid_for_rows(std::uint64_t rows) const;

  private:
    [[nodiscard]] unsigned fill(std::uint64_t blocks) const;
    std::shared_ptr<const Api> api_;
    std::shared_ptr<const DriverApi> driver_;
    int index_;
    int multiprocessors_ = 1;
    ContextHandle context_ = nullptr;
};

}  // namespace ddp::cuda
