#pragma once

#include <cuda_runtime_api.h>

/// Replaces launch.cuh in builds without nvcc: every launch is refused.
namespace ddp::device {

inline constexpr cudaError_t kNoCuda = cudaErrorStubLibrary;

template <class Kernel>
cudaError_t launch(const Kernel&, unsigned, unsigned, cudaStream_t) {
    return kNoCuda;
}
template <class Kernel>
cudaError_t launch_rows(const Kernel&, unsigned, cudaStream_t) {
    return kNoCuda;
}

}  // namespace ddp::device
