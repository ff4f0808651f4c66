#pragma once

#include <cstddef>

/// The part of CUDA's header of this name that libddp uses, for machines without CUDA: nothing is linked with
/// the real runtime there, so only names matter, and the numbers in messages.
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorStubLibrary = 34,
    cudaErrorNotReady = 600
};
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventDisableTiming 0x02
#define cudaHostAllocDefault 0x00
#define cudaHostRegisterDefault 0x00
#define cudaEnableDefault 0x0

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;

// Declares a call; no_cuda.cpp defines it too, as a refusal.
#ifndef DDP_CUDA_CALL
#define DDP_CUDA_CALL(call) cudaError_t call;
#endif

extern "C" {

const char* cudaGetErrorString(cudaError_t code);
DDP_CUDA_CALL(cudaGetLastError())
DDP_CUDA_CALL(cudaGetDeviceCount(int* count))
DDP_CUDA_CALL(cudaGetDevice(int* device))
DDP_CUDA_CALL(cudaSetDevice(int device))
DDP_CUDA_CALL(cudaDeviceSynchronize())
DDP_CUDA_CALL(cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device))
DDP_CUDA_CALL(cudaDeviceGetPCIBusId(char* text, int length, int device))
DDP_CUDA_CALL(cudaMemGetInfo(std::size_t* free, std::size_t* total))
DDP_CUDA_CALL(cudaRuntimeGetVersion(int* version))
DDP_CUDA_CALL(cudaDriverGetVersion(int* version))
DDP_CUDA_CALL(cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned version,
                                               unsigned long long flags,
                                               cudaDriverEntryPointQueryResult* found))
DDP_CUDA_CALL(cudaDeviceGetStreamPriorityRange(int* least, int* greatest))
DDP_CUDA_CALL(cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority))
DDP_CUDA_CALL(cudaStreamDestroy(cudaStream_t stream))
DDP_CUDA_CALL(cudaStreamSynchronize(cudaStream_t stream))
DDP_CUDA_CALL(cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags))
DDP_CUDA_CALL(cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags))
DDP_CUDA_CALL(cudaEventRecord(cudaEvent_t event, cudaStream_t stream))
DDP_CUDA_CALL(cudaEventQuery(cudaEvent_t event))
DDP_CUDA_CALL(cudaEventSynchronize(cudaEvent_t event))
DDP_CUDA_CALL(cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to))
DDP_CUDA_CALL(cudaEventDestroy(cudaEvent_t event))
DDP_CUDA_CALL(cudaMalloc(void** address, std::size_t bytes))
DDP_CUDA_CALL(cudaFree(void* address))
DDP_CUDA_CALL(cudaHostAlloc(void** address, std::size_t bytes, unsigned flags))
DDP_CUDA_CALL(cudaFreeHost(void* address))
DDP_CUDA_CALL(cudaHostRegister(void* address, std::size_t bytes, unsigned flags))
DDP_CUDA_CALL(cudaHostUnregister(void* address))
DDP_CUDA_CALL(cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                              cudaStream_t stream))
DDP_CUDA_CALL(cudaMemsetAsync(void* address, int value, std::size_t bytes, cudaStream_t stream))
DDP_CUDA_CALL(cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode))
DDP_CUDA_CALL(cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph))
DDP_CUDA_CALL(cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status))
DDP_CUDA_CALL(cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode))
DDP_CUDA_CALL(cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                            unsigned long long flags))
DDP_CUDA_CALL(cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream))
DDP_CUDA_CALL(cudaGraphDestroy(cudaGraph_t graph))
DDP_CUDA_CALL(cudaGraphExecDestroy(cudaGraphExec_t exec))

}  // extern "C"
