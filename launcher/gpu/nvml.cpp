#include "launcher/gpu/nvml.h"

#include <dlfcn.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>

#include "env/io/library.h"

namespace ddprun::nvml {
namespace {

template <class Function>
bool find(void* library, Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    return function != nullptr;
}

bool find_required(void* library, Api& api) {
    return find(library, api.init, "nvmlInit_v2") && find(library, api.shutdown, "nvmlShutdown") &&
           find(library, api.count, "nvmlDeviceGetCount_v2") &&
           find(library, api.handle, "nvmlDeviceGetHandleByIndex_v2") &&
           find(library, api.uuid, "nvmlDeviceGetUUID") && find(library, api.pci, "nvmlDeviceGetPciInfo_v3");
}

void find_optional(void* library, Api& api) {
    find(library, api.driver_version, "nvmlSystemGetDriverVersion");
    find(library, api.cuda_version, "nvmlSystemGetCudaDriverVersion_v2");
    find(library, api.name, "nvmlDeviceGetName");
    find(library, api.memory, "nvmlDeviceGetMemoryInfo");
    find(library, api.utilization, "nvmlDeviceGetUtilizationRates");
    find(library, api.processes, "nvmlDeviceGetComputeRunningProcesses_v3");
    find(library, api.ecc_mode, "nvmlDeviceGetEccMode");
    find(library, api.ecc_errors, "nvmlDeviceGetTotalEccErrors");
    find(library, api.remapped_rows, "nvmlDeviceGetRemappedRows");
    find(library, api.retired_pages_pending, "nvmlDeviceGetRetiredPagesPendingStatus");
    find(library, api.mig_mode, "nvmlDeviceGetMigMode");
    find(library, api.compute_mode, "nvmlDeviceGetComputeMode");
    find(library, api.persistence_mode, "nvmlDeviceGetPersistenceMode");
    find(library, api.throttle_reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
    find(library, api.temperature, "nvmlDeviceGetTemperature");
    find(library, api.capability, "nvmlDeviceGetCudaComputeCapability");
    find(library, api.pcie_generation, "nvmlDeviceGetCurrPcieLinkGeneration");
    find(library, api.pcie_max_generation, "nvmlDeviceGetMaxPcieLinkGeneration");
    find(library, api.pcie_width, "nvmlDeviceGetCurrPcieLinkWidth");
    find(library, api.pcie_max_width, "nvmlDeviceGetMaxPcieLinkWidth");
    find(library, api.link_state, "nvmlDeviceGetNvLinkState");
    find(library, api.common_ancestor, "nvmlDeviceGetTopologyCommonAncestor");
    find(library, api.p2p_status, "nvmlDeviceGetP2PStatus");
    find(library, api.field_values, "nvmlDeviceGetFieldValues");
}

Error init_error(Code code) {
    if (code == Code::LibraryMismatch) return {Errc::Mismatch, explain(code)};
    if (code == Code::DriverNotLoaded) return {Errc::NotFound, explain(code)};
    return {Errc::System, fmt::format("initialising NVML: {}", explain(code))};
}

}  // namespace

bool may_be_there() {
    // Without the control device there is no driver, and loading NVML would only cost time.
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
        case Code::Success:
            return "success";
        case Code::NotSupported:
            return "not supported by this GPU";
        case Code::NoPermission:
            return "no permission";
        case Code::InsufficientSize:
            return "more entries than asked for";
        case Code::DriverNotLoaded:
            return "the NVIDIA kernel module is not loaded";
        case Code::FunctionNotFound:
            return "the driver is too old for this question";
        case Code::GpuIsLost:
            return "the GPU has fallen off the bus or does not answer";
        case Code::ResetRequired:
            return "the GPU needs a reset";
        case Code::LibraryMismatch:
            return "the NVIDIA libraries and the loaded kernel module are of different versions";
    }
    return fmt::format("NVML error {}", static_cast<int>(code));
}

}  // namespace ddprun::nvml
