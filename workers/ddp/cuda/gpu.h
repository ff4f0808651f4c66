#pragma once

#include <cstdint>
#include <memory>

#include "ddp/cuda/cuda_api.h"

namespace ddp::cuda {

/// One CUDA device of this process: what a launch has to know of it. Thread-safe.
class Gpu {
  public:
    /// The device with that number, opened at the first call and kept for the life of the process (as CUDA
    /// itself keeps it). Throws Error with CUDA's reason.
    static std::shared_ptr<const Gpu> of(int index);

    explicit Gpu(int index);

    [[nodiscard]] int index() const { return index_; }

    /// The calling thread's CUDA calls are for this device from now on. Every thread that launches or
    /// allocates calls it once.
    void make_current() const;
    /// Blocks of kBlockThreads for an element-wise kernel: enough to fill the device, no more than there is
    /// work for. At least 1.
    [[nodiscard]] unsigned grid_for(std::uint64_t elements) const;
    /// The same for a kernel that gives each row to one warp.
    [[nodiscard]] unsigned grid_for_rows(std::uint64_t rows) const;

  private:
    [[nodiscard]] unsigned fill(std::uint64_t blocks) const;
    int index_;
    int multiprocessors_ = 1;
};

/// Threads of a block; every launch has as many.
inline constexpr unsigned kBlockThreads = 256;

}  // namespace ddp::cuda
