#pragma once

#include <string>

#include "env/result.h"

/// The part of NVIDIA's management library (NVML) that we use, declared as in nvml.h, whose ABI is stable;
/// nvml_abi_check.cpp compares them if that header is installed.
namespace ddprun::nvml {

using Device = void*;  ///< nvmlDevice_t

enum class Code : int {
    Success = 0,
    NotSupported = 3,
    NoPermission = 4,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    FunctionNotFound = 13,
    GpuIsLost = 15,
    ResetRequired = 16,
    LibraryMismatch = 18,  ///< the library and the loaded kernel module are of different versions
};

struct PciInfo {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};
struct Utilization {
    unsigned gpu, memory;
};
struct Memory {
    unsigned long long total, free, used;
};
struct ProcessInfo {
    unsigned pid;
    unsigned long long used_bytes;  ///< kUnknownBytes when the driver does not tell
    unsigned gpu_instance, compute_instance;
};
constexpr unsigned long long kUnknownBytes = ~0ULL;
struct FieldValue {
    unsigned field, scope;
    long long timestamp, latency_us;
    int value_type;
    Code code;
    union {
        double real;
        unsigned number;
        unsigned long long large;
    } value;
};
constexpr unsigned kFieldRecoveryAction = 230;
constexpr unsigned kMaxLinks = 36;  ///< by the newest library; older GPUs have fewer

/// The entry points. Optional ones are null in older libraries.
struct Api {
    Code (*init)() = nullptr;
    Code (*shutdown)() = nullptr;
    Code (*count)(unsigned*) = nullptr;
    Code (*handle)(unsigned index, Device*) = nullptr;
    Code (*uuid)(Device, char*, unsigned length) = nullptr;
    Code (*pci)(Device, PciInfo*) = nullptr;
    // optional
    Code (*driver_version)(char*, unsigned length) = nullptr;
    Code (*cuda_version)(int*) = nullptr;  ///< 12040: the newest CUDA that this driver runs
    Code (*name)(Device, char*, unsigned length) = nullptr;
    Code (*memory)(Device, Memory*) = nullptr;
    Code (*utilization)(Device, Utilization*) = nullptr;
    Code (*processes)(Device, unsigned* count, ProcessInfo*) = nullptr;
    Code (*ecc_mode)(Device, int* current, int* pending) = nullptr;
    Code (*ecc_errors)(Device, int type, int counter, unsigned long long*) = nullptr;
    Code (*remapped_rows)(Device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                          unsigned* failed) = nullptr;
    Code (*retired_pages_pending)(Device, int*) = nullptr;
    Code (*mig_mode)(Device, unsigned* current, unsigned* pending) = nullptr;
    Code (*compute_mode)(Device, int*) = nullptr;
    Code (*persistence_mode)(Device, int*) = nullptr;
    Code (*throttle_reasons)(Device, unsigned long long*) = nullptr;
    Code (*temperature)(Device, int sensor, unsigned*) = nullptr;
    Code (*capability)(Device, int* major, int* minor) = nullptr;
    Code (*pcie_generation)(Device, unsigned*) = nullptr;
    Code (*pcie_max_generation)(Device, unsigned*) = nullptr;
    Code (*pcie_width)(Device, unsigned*) = nullptr;
    Code (*pcie_max_width)(Device, unsigned*) = nullptr;
    Code (*link_state)(Device, unsigned link, int* active) = nullptr;
    Code (*common_ancestor)(Device, Device, int* level) = nullptr;
    Code (*p2p_status)(Device, Device, int what, int* status) = nullptr;
    Code (*field_values)(Device, int count, FieldValue*) = nullptr;
};

/// NVML, loaded and initialised as long as this lives. Creates no CUDA context. Not copied.
class Session {
  public:
    /// Loads libnvidia-ml.so.1, or the file that DDPRUN_NVML_LIBRARY names. Error: NotFound (no driver, or no
    /// library), Mismatch (library and kernel module differ), System.
    static Result<Session> open();
    Session(Session&& other) noexcept : library_(other.library_), api_(other.api_) {
        other.library_ = nullptr;
    }
    Session& operator=(Session&&) = delete;
    ~Session();

    const Api* operator->() const { return &api_; }

  private:
    Session(void* library, const Api& api) : library_(library), api_(api) {}
    void* library_;
    Api api_;
};

/// True when open() would load the library: a driver is loaded, or a library is named. Takes no time.
bool may_be_there();

/// A message for a code ("the GPU has fallen off the bus"), or "NVML error 7" for a rare one.
std::string explain(Code code);

}  // namespace ddprun::nvml
