#pragma once

#include <cstdint>
#include <string_view>

namespace fake {

/// With FAKE_CUDA_TRACE=FILE, writes one line for a CUDA call from construction to the end of the scope, in
/// the format of cuda-trace.so (tests/gpu). Must be the first object of the entry point.
class TracedCall {
  public:
    /// Both texts must outlive the object. `kernel` is set for launches.
    explicit TracedCall(std::string_view function, std::string_view kernel = {});
    ~TracedCall();
    TracedCall(const TracedCall&) = delete;
    TracedCall& operator=(const TracedCall&) = delete;

  private:
    std::string_view function_, kernel_;
    std::uint64_t start_ = 0;
};

}  // namespace fake
