#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ddp/cuda/memory.h"
#include "ddp/types.h"

namespace ddp::cuda {

/// Page-locked memory that is used again and again: locking the pages takes longer than copying to them.
class HostRoom {
  public:
    /// At least so many bytes; what an earlier call gave is gone. For one HostCopies at a time.
    std::byte* at_least(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes);

  private:
    std::optional<PinnedMemory> memory_;
};

/// Tensors that the host can read and write: those in host memory as they are, of those on CUDA devices a
/// copy in page-locked memory. For what is no part of a step (checkpoints, comparisons): everything here
/// waits.
class HostCopies {
  public:
    enum class Begin { WithContents, WithoutContents };
    /// Copies once everything the devices were given is done. The tensors are borrowed. The copies lie in
    /// `room`.
    HostCopies(std::span<const Tensor> tensors, Begin begin,
               std::shared_ptr<HostRoom> room = std::make_shared<HostRoom>());
    [[nodiscard]] std::span<const Tensor> tensors() const { return copies_; }
    /// Puts what was written into the copies onto the devices.
    void upload() const;

  private:
    enum class Way { Down, Up };
    void copy_all(Way way) const;

    std::vector<Tensor> originals_;
    std::vector<Tensor> copies_;
    std::shared_ptr<HostRoom> room_;
};

}  // namespace ddp::cuda
