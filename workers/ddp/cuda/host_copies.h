#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ddp/cuda/memory.h"
#include "ddp/types.h"

namespace ddp::cuda {

/// Host memory for repeated use, page-locked where it is for a device: locking pages takes longer than
/// copying to them, as does the first touch of a page.
class HostScratch {
  public:
    /// Returns at least `bytes` bytes; `gpu` is null for host memory alone. Invalidates the memory of earlier
    /// calls. For one HostCopies at a time.
    std::byte* reserve(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes);

  private:
    std::optional<PinnedMemory> pinned_;
    std::unique_ptr<std::byte[]> plain_;
    std::size_t plain_bytes_ = 0;
};

/// Tensors that the host can read and write: those in host memory unchanged (unless Of::All), those on CUDA
/// devices as a copy in page-locked memory. For checkpoints and comparisons, not for the inside of a step:
/// every call waits.
class HostCopies {
  public:
    enum class Begin { WithContents, WithoutContents };
    enum class Of { Device, All };  ///< the tensors that are copied
    /// Copies once all earlier work on the devices is done. The tensors are borrowed. The copies lie in
    /// `scratch`.
    HostCopies(std::span<const Tensor> tensors, Begin begin,
               std::shared_ptr<HostScratch> scratch = std::make_shared<HostScratch>(), Of of = Of::Device);
    [[nodiscard]] std::span<const Tensor> tensors() const { return copies_; }
    /// Copies the changed contents back to the devices.
    void upload() const;

  private:
    enum class Direction { ToHost, ToDevice };
    [[nodiscard]] bool is_copied(const Tensor& tensor) const;
    void copy_all(Direction direction) const;

    std::vector<Tensor> originals_;
    std::vector<Tensor> copies_;
    std::shared_ptr<HostScratch> scratch_;
    Of of_;
};

}  // namespace ddp::cuda
