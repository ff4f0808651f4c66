#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// The launches of kernels, which are structs. A launch for elements calls (thread, threads, array) in each
/// thread, one for rows (warp, warps, lanes) in each thread of a warp; see kernels.cu. No result may depend
/// on their number. Builds without a device include another file instead (no_cuda.cpp, the tests' fakes).
namespace ddp::device {

inline constexpr unsigned kThreads = 256;

/// The threads of a warp: all of them call, and all get the result, with the same bits.
struct Lanes {
    static constexpr std::uint64_t count = 32;
    __device__ static std::uint64_t mine() { return threadIdx.x % count; }
    template <class T>
    __device__ static T sum(T value) {
        for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0U, value, distance);
        return value;
    }
    __device__ static float max(float value) {
        for (int distance = 16; distance > 0; distance /= 2)
            value = fmaxf(value, __shfl_xor_sync(~0U, value, distance));
        return value;
    }
    __device__ static std::uint32_t min(std::uint32_t value) { return __reduce_min_sync(~0U, value); }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads) elements(const __grid_constant__ Kernel kernel) {
    kernel(std::uint64_t{blockIdx.x} * kThreads + threadIdx.x, std::uint64_t{gridDim.x} * kThreads,
           blockIdx.y);
}
template <class Kernel>
__global__ void __launch_bounds__(kThreads) rows(const __grid_constant__ Kernel kernel) {
    kernel((std::uint64_t{blockIdx.x} * kThreads + threadIdx.x) / Lanes::count,
           std::uint64_t{gridDim.x} * kThreads / Lanes::count, Lanes{});
}

template <class Kernel>
cudaError_t launch(const Kernel& kernel, unsigned blocks, unsigned arrays, cudaStream_t stream) {
    static_assert(sizeof(Kernel) <= 4096, "more arguments than every driver takes");
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks, arrays);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, elements<Kernel>, kernel);
}
template <class Kernel>
cudaError_t launch_rows(const Kernel& kernel, unsigned blocks, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, rows<Kernel>, kernel);
}

}  // namespace ddp::device
