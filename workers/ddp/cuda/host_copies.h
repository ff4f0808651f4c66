#pragma once

#include <memory>
#include <span>
#include <vector>

#include "ddp/cuda/memory.h"
#include "ddp/types.h"

namespace ddp::cuda {

/// Tensors that the host can read and write: those in host memory as they are, of those on CUDA devices a
/// copy in page-locked memory. For what is no part of a step (checkpoints, comparisons): everything here
/// waits.
class HostCopies {
  public:
    enum class Begin { WithContents, WithoutContents };
    /// Copies once everything the devices were given is done. The tensors are borrowed.
    HostCopies(std::span<const Tensor> tensors, Begin begin);
    [[nodiscard]] std::span<const Tensor> tensors() const { return copies_; }
    /// Puts what was written into the copies onto the devices.
    void upload() const;

  private:
    std::vector<Tensor> originals_;
    std::vector<Tensor> copies_;
    std::vector<PinnedMemory> memory_;
};

}  // namespace ddp::cuda
