#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/nccl/join.h"
#include "ddp/worker/work.h"
#include "tests/workers/failures.h"

/// Ranks as threads over the fake NCCL.
namespace ddp::testing {

SharedLibrary fake_library();
SharedLibrary fake_without(std::vector<std::string> names);

/// Makes every CUDA call fail while this object lives, as after an illegal access.
class LostDevice {
  public:
    LostDevice() { lose(700); }
    ~LostDevice() { lose(0); }
    LostDevice(const LostDevice&) = delete;
    LostDevice& operator=(const LostDevice&) = delete;

  private:
    static void lose(int code);
};

struct NcclWorldOptions {
    std::string faults = {};  ///< FAKE_NCCL
    std::chrono::nanoseconds timeout = std::chrono::seconds(20);
    std::vector<std::string> hidden = {};  ///< entry points that this NCCL lacks
    int device = -1;
    bool own_stream = false;  ///< collectives follow a stream of the rank's own, not the default one
    std::uint64_t generation = 0;
    int lost_rank = -1;  ///< rank whose loss made the launcher end the generation
};

struct NcclRank {
    ProcessGroup& group;
    SegmentMap& segment;
    /// Device memory with these values; the fake's is host memory. Calls a barrier as its first collective.
    Buffer filled(std::vector<float> values);
    std::vector<float> values_of(const Buffer& buffer) const;
    Buffer holding(const std::vector<std::byte>& bytes, DType type);
    std::vector<std::byte> bytes_of(const Buffer& buffer) const;
    std::vector<std::shared_ptr<std::byte>> memory = {};  ///< owns the memory of those buffers
};

/// Waits until the last collective that a rank has started, or finished, is of that number; 10 s at most.
void wait_until_reached(const std::atomic<std::uint64_t>& last, std::uint64_t seq);

std::vector<std::exception_ptr> failures_of(int ranks, const std::function<void(NcclRank&)>& fn,
                                            const NcclWorldOptions& options = {});
}  // namespace ddp::testing
