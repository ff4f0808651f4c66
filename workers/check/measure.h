#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/cuda/cuda_api.h"
#include "ddp/process_group.h"

namespace check {

/// A buffer of floats that the group reduces, in host or device memory, filled and read from the host.
class Values {
  public:
    /// Collective: every rank calls it. Throws ddp::Error.
    Values(ddp::ProcessGroup& group, std::size_t bytes);
    void fill(const std::vector<float>& values);
    [[nodiscard]] std::vector<float> read() const;
    [[nodiscard]] ddp::Buffer buffer() const { return buffer_; }

  private:
    void copy(void* to, const void* from, cudaMemcpyKind kind) const;
    ddp::Buffer buffer_;
};

struct Measurement {
    std::uint64_t rounds = 0;
    double seconds = 0;  ///< for all rounds
    [[nodiscard]] double gigabytes_per_second(std::size_t bytes) const;
    /// Bandwidth of each rank's link as nccl-tests computes it, comparable for any number of ranks.
    [[nodiscard]] double bus_gigabytes_per_second(std::size_t bytes, int ranks) const;
};

/// All-reduces numbers whose sum is known and compares every one. Throws ddp::Error naming rank, position and
/// both values.
void verify_sums(ddp::ProcessGroup& group, Values& values);

/// All-reduces for about `span`; all ranks make the same number of rounds.
Measurement measure(ddp::ProcessGroup& group, Values& values, std::chrono::nanoseconds span);

}  // namespace check
