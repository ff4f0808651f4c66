// Compares our nvml.h with NVIDIA's header if that is installed. Compiles to nothing.
#include <nvml.h>

#include <cstddef>

#include "launcher/machine/gpu/nvml.h"

namespace ddprun::nvml {
namespace {

#define SAME_PLACE(ours, our_member, theirs, their_member) \
    static_assert(offsetof(ours, our_member) == offsetof(theirs, their_member))

static_assert(sizeof(PciInfo) == sizeof(nvmlPciInfo_t));
SAME_PLACE(PciInfo, bus_id, nvmlPciInfo_t, busId);
static_assert(sizeof(Utilization) == sizeof(nvmlUtilization_t));
SAME_PLACE(Utilization, gpu, nvmlUtilization_t, gpu);
static_assert(sizeof(Memory) == sizeof(nvmlMemory_t));
SAME_PLACE(Memory, used, nvmlMemory_t, used);
static_assert(sizeof(ProcessInfo) == sizeof(nvmlProcessInfo_t));
SAME_PLACE(ProcessInfo, used_bytes, nvmlProcessInfo_t, usedGpuMemory);
SAME_PLACE(ProcessInfo, compute_instance, nvmlProcessInfo_t, computeInstanceId);
static_assert(sizeof(FieldValue) == sizeof(nvmlFieldValue_t));
SAME_PLACE(FieldValue, code, nvmlFieldValue_t, nvmlReturn);
SAME_PLACE(FieldValue, value, nvmlFieldValue_t, value);

static_assert(static_cast<int>(Code::InsufficientSize) == NVML_ERROR_INSUFFICIENT_SIZE);
static_assert(static_cast<int>(Code::NoPermission) == NVML_ERROR_NO_PERMISSION);
static_assert(static_cast<int>(Code::DriverNotLoaded) == NVML_ERROR_DRIVER_NOT_LOADED);
static_assert(static_cast<int>(Code::FunctionNotFound) == NVML_ERROR_FUNCTION_NOT_FOUND);
static_assert(static_cast<int>(Code::GpuIsLost) == NVML_ERROR_GPU_IS_LOST);
static_assert(static_cast<int>(Code::ResetRequired) == NVML_ERROR_RESET_REQUIRED);
static_assert(static_cast<int>(Code::LibraryMismatch) == NVML_ERROR_LIB_RM_VERSION_MISMATCH);
static_assert(kMaxLinks >= NVML_NVLINK_MAX_LINKS);
#ifdef NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
static_assert(kFieldRecoveryAction == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
#endif

}  // namespace
}  // namespace ddprun::nvml
