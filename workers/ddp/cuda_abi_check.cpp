// Compiled where cuda_runtime_api.h is there; produces nothing but errors.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "ddp/abi_check.h"
#include "ddp/cuda/driver_api.h"
#include "ddp/cuda_api.h"

namespace ddp::cuda {

static_assert(static_cast<int>(Code::Success) == cudaSuccess);
static_assert(static_cast<int>(Code::NotReady) == cudaErrorNotReady);
static_assert(static_cast<int>(CopyKind::HostToDevice) == cudaMemcpyHostToDevice);
static_assert(static_cast<int>(CopyKind::DeviceToHost) == cudaMemcpyDeviceToHost);
static_assert(static_cast<int>(CopyKind::DeviceToDevice) == cudaMemcpyDeviceToDevice);
static_assert(static_cast<int>(CopyKind::Default) == cudaMemcpyDefault);
static_assert(static_cast<int>(Attribute::Multiprocessors) == cudaDevAttrMultiProcessorCount);
static_assert(static_cast<int>(Attribute::CapabilityMajor) == cudaDevAttrComputeCapabilityMajor);
static_assert(static_cast<int>(Attribute::CapabilityMinor) == cudaDevAttrComputeCapabilityMinor);
static_assert(static_cast<int>(CaptureMode::ThreadLocal) == cudaStreamCaptureModeThreadLocal);
static_assert(static_cast<int>(CaptureMode::Relaxed) == cudaStreamCaptureModeRelaxed);
static_assert(static_cast<int>(CaptureStatus::None) == cudaStreamCaptureStatusNone);
static_assert(static_cast<int>(CaptureStatus::Active) == cudaStreamCaptureStatusActive);
static_assert(kEventDefault == cudaEventDefault);
static_assert(kStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kEventDisableTiming == cudaEventDisableTiming);

#define SAME_CALL(ours, theirs) static_assert(same_call<decltype(Api::ours), decltype(&theirs)>)
SAME_CALL(get_device_count, cudaGetDeviceCount);
SAME_CALL(get_device, cudaGetDevice);
SAME_CALL(set_device, cudaSetDevice);
SAME_CALL(device_synchronize, cudaDeviceSynchronize);
SAME_CALL(device_get_attribute, cudaDeviceGetAttribute);
SAME_CALL(mem_get_info, cudaMemGetInfo);
SAME_CALL(runtime_get_version, cudaRuntimeGetVersion);
SAME_CALL(driver_get_version, cudaDriverGetVersion);
SAME_CALL(device_get_stream_priority_range, cudaDeviceGetStreamPriorityRange);
SAME_CALL(stream_create_with_priority, cudaStreamCreateWithPriority);
SAME_CALL(stream_destroy, cudaStreamDestroy);
SAME_CALL(stream_synchronize, cudaStreamSynchronize);
SAME_CALL(stream_wait_event, cudaStreamWaitEvent);
SAME_CALL(event_create_with_flags, cudaEventCreateWithFlags);
SAME_CALL(event_record, cudaEventRecord);
SAME_CALL(event_query, cudaEventQuery);
SAME_CALL(event_synchronize, cudaEventSynchronize);
SAME_CALL(event_elapsed_time, cudaEventElapsedTime);
SAME_CALL(event_destroy, cudaEventDestroy);
static_assert(same_call<decltype(Api::malloc), cudaError_t (*)(void**, size_t)>);  // overloaded in C++
SAME_CALL(free, cudaFree);
static_assert(same_call<decltype(Api::host_alloc), cudaError_t (*)(void**, size_t, unsigned)>);
SAME_CALL(free_host, cudaFreeHost);
SAME_CALL(host_register, cudaHostRegister);
SAME_CALL(host_unregister, cudaHostUnregister);
SAME_CALL(device_get_pci_bus_id, cudaDeviceGetPCIBusId);
SAME_CALL(memcpy_async, cudaMemcpyAsync);
SAME_CALL(memset_async, cudaMemsetAsync);
SAME_CALL(get_last_error, cudaGetLastError);
SAME_CALL(get_error_string, cudaGetErrorString);
SAME_CALL(stream_begin_capture, cudaStreamBeginCapture);
SAME_CALL(stream_end_capture, cudaStreamEndCapture);
SAME_CALL(stream_is_capturing, cudaStreamIsCapturing);
SAME_CALL(thread_exchange_stream_capture_mode, cudaThreadExchangeStreamCaptureMode);
SAME_CALL(graph_instantiate_with_flags, cudaGraphInstantiateWithFlags);
SAME_CALL(graph_launch, cudaGraphLaunch);
SAME_CALL(graph_destroy, cudaGraphDestroy);
SAME_CALL(graph_exec_destroy, cudaGraphExecDestroy);

static_assert(static_cast<int>(DriverCode::Success) == CUDA_SUCCESS);
#define SAME_DRIVER_CALL(ours, theirs) static_assert(same_call<decltype(DriverApi::ours), decltype(&theirs)>)
static_assert(same_call<decltype(Api::current_context), decltype(&cuCtxGetCurrent)>);
SAME_DRIVER_CALL(init, cuInit);
SAME_DRIVER_CALL(device_get, cuDeviceGet);
SAME_DRIVER_CALL(primary_context_retain, cuDevicePrimaryCtxRetain);
SAME_DRIVER_CALL(context_set_current, cuCtxSetCurrent);
SAME_DRIVER_CALL(module_load_data, cuModuleLoadData);
SAME_DRIVER_CALL(module_unload, cuModuleUnload);
SAME_DRIVER_CALL(module_get_function, cuModuleGetFunction);
SAME_DRIVER_CALL(launch_kernel, cuLaunchKernel);
SAME_DRIVER_CALL(get_error_string, cuGetErrorString);

}  // namespace ddp::cuda
