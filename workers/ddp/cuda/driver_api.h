#pragma once

#include <cstddef>
#include <string>

#include "ddp/shared_library.h"

/// The few calls of the CUDA driver that load and launch kernels, found at run time. Kernels are never linked
/// against the CUDA runtime: one binary runs with any, and without.
/// cuda_abi_check.cpp compares them with cuda.h where that header is there.
namespace ddp::cuda {

struct ContextObject;
struct ModuleObject;
struct FunctionObject;
struct StreamObject;
using ContextHandle = ContextObject*;
using ModuleHandle = ModuleObject*;
using FunctionHandle = FunctionObject*;

enum class DriverCode : int { Success = 0 };

struct DriverApi {
    std::string library;
    DriverCode (*init)(unsigned flags);
    DriverCode (*device_get)(int* device, int ordinal);
    DriverCode (*primary_context_retain)(ContextHandle* context, int device);
    DriverCode (*context_set_current)(ContextHandle context);
    DriverCode (*module_load_data)(ModuleHandle* module, const void* image);
    DriverCode (*module_unload)(ModuleHandle module);
    DriverCode (*module_get_function)(FunctionHandle* function, ModuleHandle module, const char* name);
    DriverCode (*launch_kernel)(FunctionHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                StreamObject* stream, void** arguments, void** extra);
    DriverCode (*get_error_string)(DriverCode code, const char** text);

    /// Throws ddp::Error "<attempt>: <the driver's explanation>" unless the code is Success.
    void check(DriverCode code, const std::string& attempt) const;
    /// "no kernel image is available for execution on the device (CUDA driver error 209): <what to do>"
    [[nodiscard]] std::string explain(DriverCode code) const;
};

/// DDP_CUDA_LIBRARY, else libcuda.so.1. Error: NotFound, Mismatch naming what it lacks.
ddprun::Result<DriverApi> load_driver_api();
ddprun::Result<DriverApi> driver_api_from(const SharedLibrary& library);

}  // namespace ddp::cuda
