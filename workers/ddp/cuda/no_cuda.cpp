// Replaces the CUDA runtime and the code that nvcc compiles, in a build without them: every call is refused
// with the reason.
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define DDP_CUDA_CALL(call) \
    cudaError_t call;       \
    cudaError_t call { return cudaErrorStubLibrary; }
#include "ddp/cuda/no_launch.h"
// The kernels use the launches of the header above.
#include "ddp/cuda/kernels.cu"

const char* cudaGetErrorString(cudaError_t) {
    return "this build has no GPU code: build it where the CUDA toolkit is";
}
