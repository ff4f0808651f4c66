#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

/// Overwrites tensors with one rank's. Small tensors are coalesced, because a call costs more than their
/// bytes. On a device all work follows the group's stream.
class TensorBroadcast {
  public:
    /// All ranks have the same tensors. The group and the tensors' memory are borrowed.
    TensorBroadcast(ProcessGroup& group, const std::vector<Tensor>& tensors);
    /// Collective. On a device it does not wait.
    void run(int root);

  private:
    struct Bucket {
        std::vector<Buffer> tensors;
        std::size_t bytes = 0;
    };
    void add(const Buffer& tensor);
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;

    BorrowedGroup group_;
    std::vector<Buffer> large_;  ///< each in its own broadcast
    std::vector<Bucket> buckets_;
    std::shared_ptr<std::byte> scratch_;  ///< holds one bucket
};

}  // namespace ddp
