// Replaces the CUDA runtime and the code that nvcc compiles, in a build without them: every call is refused
// with the reason.
#include "ddp/cuda/no_launch.h"
// The kernels use the launches of the header above.
#include "ddp/cuda/kernels.cu"

#define REFUSED(call) \
    cudaError_t call { return ddp::device::kNoCuda; }

extern "C" {

const char* cudaGetErrorString(cudaError_t) {
    return "this build has no GPU code: build it where the CUDA toolkit is";
}
REFUSED(cudaGetLastError())
REFUSED(cudaGetDeviceCount(int*))
REFUSED(cudaGetDevice(int*))
REFUSED(cudaSetDevice(int))
REFUSED(cudaDeviceSynchronize())
REFUSED(cudaDeviceGetAttribute(int*, cudaDeviceAttr, int))
REFUSED(cudaDeviceGetPCIBusId(char*, int, int))
REFUSED(cudaMemGetInfo(std::size_t*, std::size_t*))
REFUSED(cudaRuntimeGetVersion(int*))
REFUSED(cudaDriverGetVersion(int*))
REFUSED(cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                         cudaDriverEntryPointQueryResult*))
REFUSED(cudaDeviceGetStreamPriorityRange(int*, int*))
REFUSED(cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int))
REFUSED(cudaStreamDestroy(cudaStream_t))
REFUSED(cudaStreamSynchronize(cudaStream_t))
REFUSED(cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned))
REFUSED(cudaEventCreateWithFlags(cudaEvent_t*, unsigned))
REFUSED(cudaEventRecord(cudaEvent_t, cudaStream_t))
REFUSED(cudaEventQuery(cudaEvent_t))
REFUSED(cudaEventSynchronize(cudaEvent_t))
REFUSED(cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t))
REFUSED(cudaEventDestroy(cudaEvent_t))
REFUSED(cudaMalloc(void**, std::size_t))
REFUSED(cudaFree(void*))
REFUSED(cudaHostAlloc(void**, std::size_t, unsigned))
REFUSED(cudaFreeHost(void*))
REFUSED(cudaHostRegister(void*, std::size_t, unsigned))
REFUSED(cudaHostUnregister(void*))
REFUSED(cudaMemcpyAsync(void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t))
REFUSED(cudaMemsetAsync(void*, int, std::size_t, cudaStream_t))
REFUSED(cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode))
REFUSED(cudaStreamEndCapture(cudaStream_t, cudaGraph_t*))
REFUSED(cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*))
REFUSED(cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*))
REFUSED(cudaGraphInstantiateWithFlags(cudaGraphExec_t*, cudaGraph_t, unsigned long long))
REFUSED(cudaGraphLaunch(cudaGraphExec_t, cudaStream_t))
REFUSED(cudaGraphDestroy(cudaGraph_t))
REFUSED(cudaGraphExecDestroy(cudaGraphExec_t))

}  // extern "C"
