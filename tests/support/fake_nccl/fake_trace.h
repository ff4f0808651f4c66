#pragma once

#include <cstdint>
#include <string_view>

namespace fake {

/// With FAKE_CUDA_TRACE=FILE: one line in that file for an entry point of CUDA, from here to the end of the
/// scope, as cuda-trace.so (tests/gpu) writes it of the real one. First in the entry point; nothing
/// otherwise.
class TracedCall {
  public:
    /// Both must outlive it. `kernel`: of launches.
    explicit TracedCall(std::string_view function, std::string_view kernel = {});
    ~TracedCall();
    TracedCall(const TracedCall&) = delete;
    TracedCall& operator=(const TracedCall&) = delete;

  private:
    std::string_view function_, kernel_;
    std::uint64_t start_ = 0;
};

}  // namespace fake
