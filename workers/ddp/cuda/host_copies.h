#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ddp/cuda/memory.h"
#include "ddp/types.h"

namespace ddp::cuda {

/// Page-locked memory for repeated use: locking pages takes longer than copying to them.
class HostScratch {
  public:
    /// Returns at least `bytes` bytes; invalidates the memory of earlier calls. For one HostCopies at a time.
    std::byte* reserve(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes);

  private:
    std::optional<PinnedMemory> memory_;
};

/// Tensors that the host can read and write: those in host memory unchanged, those on CUDA devices as a copy
/// in page-locked memory. For checkpoints and comparisons, not for the inside of a step: every call waits.
class HostCopies {
  public:
    enum class Begin { WithContents, WithoutContents };
    /// Copies once all earlier work on the devices is done. The tensors are borrowed. The copies lie in
    /// `scratch`.
    HostCopies(std::span<const Tensor> tensors, Begin begin,
               std::shared_ptr<HostScratch> scratch = std::make_shared<HostScratch>());
    [[nodiscard]] std::span<const Tensor> tensors() const { return copies_; }
    /// Copies the changed contents back to the devices.
    void upload() const;

  private:
    enum class Direction { ToHost, ToDevice };
    void copy_all(Direction direction) const;

    std::vector<Tensor> originals_;
    std::vector<Tensor> copies_;
    std::shared_ptr<HostScratch> scratch_;
};

}  // namespace ddp::cuda
