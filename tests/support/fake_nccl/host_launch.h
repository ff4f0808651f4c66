#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <typeinfo>

#include "tests/support/fake_nccl/fake_cuda.h"

/// Replaces ddp/cuda/launch.cuh: kernels run as loops on the stream's thread, and device memory is host
/// memory.
namespace ddp::device {

/// A warp of one thread.
struct Lanes {
    static constexpr std::uint64_t count = 1;
    static std::uint64_t mine() { return 0; }
    template <class T>
    static T sum(T value) {
        return value;
    }
    static float max(float value) { return value; }
    static std::uint32_t min(std::uint32_t value) { return value; }
};

/// Results must not depend on the number of threads. Six are enough to show a kernel that does not divide the
/// work, or does some of it twice.
inline constexpr std::uint64_t kHostThreads = 6;

template <class Kernel>
cudaError_t launch(const Kernel& kernel, unsigned blocks, unsigned arrays, cudaStream_t stream) {
    return static_cast<cudaError_t>(
        fake::launch(stream, blocks * arrays, typeid(Kernel).name(), [kernel, arrays] {
            for (unsigned array = 0; array < arrays; ++array)
                for (std::uint64_t thread = 0; thread < kHostThreads; ++thread)
                    kernel(thread, kHostThreads, array);
        }));
}
template <class Kernel>
cudaError_t launch_rows(const Kernel& kernel, unsigned blocks, cudaStream_t stream) {
    return static_cast<cudaError_t>(fake::launch(stream, blocks, typeid(Kernel).name(), [kernel] {
        for (std::uint64_t warp = 0; warp < kHostThreads; ++warp) kernel(warp, kHostThreads, Lanes{});
    }));
}

}  // namespace ddp::device
