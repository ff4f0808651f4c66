#pragma once

#include <cstdint>
#include <memory>

#include "ddp/cuda/cuda_api.h"

namespace ddp::cuda {

/// One CUDA device of this process, with the facts for launches. Thread-safe.
class Gpu {
  public:
    /// The device with that number, opened at the first call and kept until the process ends, as CUDA itself
    /// keeps it. Throws Error with CUDA's reason.
    static std::shared_ptr<const Gpu> of(int index);

    explicit Gpu(int index);

    [[nodiscard]] int index() const { return index_; }

    /// Makes this device current for the calling thread. Every thread that launches or allocates calls it
    /// once.
    void make_current() const;
    /// The number of blocks of kBlockThreads for an element-wise kernel: enough to fill the device, not more
    /// than the elements need. At least 1.
    [[nodiscard]] unsigned grid_for(std::uint64_t elements) const;
    /// The number of blocks for a kernel with one warp per row.
    [[nodiscard]] unsigned grid_for_rows(std::uint64_t rows) const;

  private:
    [[nodiscard]] unsigned fill(std::uint64_t blocks) const;
    int index_;
    int multiprocessors_ = 1;
};

inline constexpr unsigned kBlockThreads = 256;

}  // namespace ddp::cuda
