#include "ddp/cuda/driver_api.h"

#include <fmt/core.h>

#include <vector>

#include "ddp/cuda/advice.h"
#include "ddp/device_error.h"
#include "ddp/types.h"
#include "env/text.h"

namespace ddp::cuda {

using ddprun::Errc;
using ddprun::Result;

Result<DriverApi> driver_api_from(const SharedLibrary& library) {
    DriverApi api{};
    api.library = library.name;
    std::vector<std::string> missing;
    const auto require = [&](const char* name, auto& slot) {
        if (!take(library.resolve, name, slot)) missing.emplace_back(name);
    };
    require("cuInit", api.init);
    require("cuDeviceGet", api.device_get);
    require("cuDevicePrimaryCtxRetain", api.primary_context_retain);
    require("cuCtxSetCurrent", api.context_set_current);
    require("cuModuleLoadData", api.module_load_data);
    require("cuModuleUnload", api.module_unload);
    require("cuModuleGetFunction", api.module_get_function);
    require("cuLaunchKernel", api.launch_kernel);
    require("cuGetErrorString", api.get_error_string);
    if (missing.empty()) return api;
    return ddprun::Error{Errc::Mismatch, fmt::format("{} lacks {}: a driver for CUDA 11 or newer is needed",
                                                     library.name, ddprun::join(missing, ", "))};
}

Result<DriverApi> load_driver_api() {
    const Result<SharedLibrary> library = open_library(library_names("DDP_CUDA_LIBRARY", {"libcuda.so.1"}));
    if (!library)
        return library.error().with("loading the CUDA driver (DDP_CUDA_LIBRARY names another file)");
    return driver_api_from(*library);
}

std::string DriverApi::explain(DriverCode code) const {
    const char* text = nullptr;
    get_error_string(code, &text);
    // Its numbers are the runtime's, as far as there is advice.
    const std::string advice = advice_for(static_cast<int>(code), 0, 0);
    return fmt::format("{} (CUDA driver error {}){}{}", text != nullptr ? text : "unknown error",
                       static_cast<int>(code), advice.empty() ? "" : ": ", advice);
}

void DriverApi::check(DriverCode code, const std::string& attempt) const {
    if (code == DriverCode::Success) return;
    const std::string what = fmt::format("{}: {}", attempt, explain(code));
    note_device_error(DeviceLibrary::Cuda, what);
    throw ddp::Error(what);
}

}  // namespace ddp::cuda
