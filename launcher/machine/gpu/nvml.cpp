#include "launcher/machine/gpu/nvml.h"

#include <dlfcn.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>

#include "env/io/library.h"

namespace ddprun::nvml {
namespace {

bool find_required(void* library, Api& api) {
    return find_function(library, "nvmlInit_v2", api.init) &&
           find_function(library, "nvmlShutdown", api.shutdown) &&
           find_function(library, "nvmlDeviceGetCount_v2", api.count) &&
           find_function(library, "nvmlDeviceGetHandleByIndex_v2", api.handle) &&
           find_function(library, "nvmlDeviceGetUUID", api.uuid) &&
           find_function(library, "nvmlDeviceGetPciInfo_v3", api.pci);
}

void find_optional(void* library, Api& api) {
    find_function(library, "nvmlSystemGetDriverVersion", api.driver_version);
    find_function(library, "nvmlSystemGetCudaDriverVersion_v2", api.cuda_version);
    find_function(library, "nvmlDeviceGetName", api.name);
    find_function(library, "nvmlDeviceGetMemoryInfo", api.memory);
    find_function(library, "nvmlDeviceGetUtilizationRates", api.utilization);
    find_function(library, "nvmlDeviceGetComputeRunningProcesses_v3", api.processes);
    find_function(library, "nvmlDeviceGetEccMode", api.ecc_mode);
    find_function(library, "nvmlDeviceGetTotalEccErrors", api.ecc_errors);
    find_function(library, "nvmlDeviceGetRemappedRows", api.remapped_rows);
    find_function(library, "nvmlDeviceGetRetiredPagesPendingStatus", api.retired_pages_pending);
    find_function(library, "nvmlDeviceGetMigMode", api.mig_mode);
    find_function(library, "nvmlDeviceGetComputeMode", api.compute_mode);
    find_function(library, "nvmlDeviceGetPersistenceMode", api.persistence_mode);
    find_function(library, "nvmlDeviceGetCurrentClocksThrottleReasons", api.throttle_reasons);
    find_function(library, "nvmlDeviceGetTemperature", api.temperature);
    find_function(library, "nvmlDeviceGetCudaComputeCapability", api.capability);
    find_function(library, "nvmlDeviceGetCurrPcieLinkGeneration", api.pcie_generation);
    find_function(library, "nvmlDeviceGetMaxPcieLinkGeneration", api.pcie_max_generation);
    find_function(library, "nvmlDeviceGetCurrPcieLinkWidth", api.pcie_width);
    find_function(library, "nvmlDeviceGetMaxPcieLinkWidth", api.pcie_max_width);
    find_function(library, "nvmlDeviceGetNvLinkState", api.link_state);
    find_function(library, "nvmlDeviceGetTopologyCommonAncestor", api.common_ancestor);
    find_function(library, "nvmlDeviceGetP2PStatus", api.p2p_status);
    find_function(library, "nvmlDeviceGetFieldValues", api.field_values);
}

Error init_error(Code code) {
    if (code == Code::LibraryMismatch) return {Errc::Mismatch, explain(code)};
    if (code == Code::DriverNotLoaded) return {Errc::NotFound, explain(code)};
    return {Errc::System, fmt::format("initialising NVML: {}", explain(code))};
}

}  // namespace

bool may_be_there() {
    // Without the control device no driver is loaded, and loading NVML would only cost time.
    return std::getenv("DDPRUN_NVML_LIBRARY") != nullptr || ::access("/dev/nvidiactl", F_OK) == 0 ||
           ::access("/dev/dxg", F_OK) == 0;
}

Result<Session> Session::open() {
    const char* named = std::getenv("DDPRUN_NVML_LIBRARY");
    if (!may_be_there())
        return Error{Errc::NotFound, "no NVIDIA driver is loaded (/dev/nvidiactl does not exist)"};
    const char* file = named != nullptr ? named : "libnvidia-ml.so.1";
    void* library = load_library(file);
    if (library == nullptr) return Error{Errc::NotFound, fmt::format("loading NVML: {}", ::dlerror())};
    Api api;
    if (!find_required(library, api)) {
        ::dlclose(library);
        return Error{Errc::NotFound, fmt::format("{} lacks entry points that ddprun needs", file)};
    }
    if (const Code code = api.init(); code != Code::Success) {
        ::dlclose(library);
        return init_error(code);
    }
    find_optional(library, api);
    return Session(library, api);
}

Session::~Session() {
    if (library_ == nullptr) return;
    api_.shutdown();
    ::dlclose(library_);
}

std::string explain(Code code) {
    switch (code) {
        case Code::Success: return "success";
        case Code::NotSupported: return "not supported by this GPU";
        case Code::NoPermission: return "no permission";
        case Code::InsufficientSize: return "more entries than asked for";
        case Code::DriverNotLoaded: return "the NVIDIA kernel module is not loaded";
        case Code::FunctionNotFound: return "the driver is too old for this question";
        case Code::GpuIsLost: return "the GPU has fallen off the bus or does not answer";
        case Code::ResetRequired: return "the GPU needs a reset";
        case Code::LibraryMismatch:
            return "the NVIDIA libraries and the loaded kernel module are of different versions";
    }
    return fmt::format("NVML error {}", static_cast<int>(code));
}

}  // namespace ddprun::nvml
