// Compiled where cuda_runtime_api.h is there; produces nothing but errors.
#include <cuda_runtime_api.h>

#include "ddp/abi_check.h"
#include "ddp/cuda_api.h"

namespace ddp::cuda {

static_assert(static_cast<int>(Code::Success) == cudaSuccess);
static_assert(static_cast<int>(Code::NotReady) == cudaErrorNotReady);
static_assert(static_cast<int>(CopyKind::HostToDevice) == cudaMemcpyHostToDevice);
static_assert(static_cast<int>(CopyKind::DeviceToHost) == cudaMemcpyDeviceToHost);
static_assert(kStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kEventDisableTiming == cudaEventDisableTiming);

#define SAME_CALL(ours, theirs) static_assert(same_call<decltype(Api::ours), decltype(&theirs)>)
SAME_CALL(get_device_count, cudaGetDeviceCount);
SAME_CALL(set_device, cudaSetDevice);
SAME_CALL(runtime_get_version, cudaRuntimeGetVersion);
SAME_CALL(driver_get_version, cudaDriverGetVersion);
SAME_CALL(device_get_stream_priority_range, cudaDeviceGetStreamPriorityRange);
SAME_CALL(stream_create_with_priority, cudaStreamCreateWithPriority);
SAME_CALL(stream_destroy, cudaStreamDestroy);
SAME_CALL(stream_wait_event, cudaStreamWaitEvent);
SAME_CALL(event_create_with_flags, cudaEventCreateWithFlags);
SAME_CALL(event_record, cudaEventRecord);
SAME_CALL(event_query, cudaEventQuery);
SAME_CALL(event_destroy, cudaEventDestroy);
static_assert(same_call<decltype(Api::malloc), cudaError_t (*)(void**, size_t)>);  // overloaded in C++
SAME_CALL(free, cudaFree);
SAME_CALL(memcpy_async, cudaMemcpyAsync);
SAME_CALL(memset_async, cudaMemsetAsync);
SAME_CALL(get_error_string, cudaGetErrorString);

}  // namespace ddp::cuda
