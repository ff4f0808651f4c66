#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

/// Overwrites tensors with one rank's. Small ones travel together: a call costs more than their bytes. On a
/// device everything is in the order of the group's stream.
class TensorBroadcast {
  public:
    /// All ranks have the same tensors. The group and their memory are borrowed.
    TensorBroadcast(ProcessGroup& group, const std::vector<Tensor>& tensors);
    /// Collective. On a device it waits for nothing.
    void run(int root);

  private:
    struct Parcel {
        std::vector<Buffer> tensors;
        std::size_t bytes = 0;
    };
    void add(const Buffer& tensor);
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;

    BorrowedGroup group_;
    std::vector<Buffer> large_;  ///< each on its own
    std::vector<Parcel> parcels_;
    std::shared_ptr<std::byte> room_;  ///< for one parcel
};

}  // namespace ddp
