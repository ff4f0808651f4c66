// An NVML whose machine is described by the JSON file that FAKE_NVML names. The file is read anew at every
// question, so that a test can change the machine meanwhile (replace the file, do not write into it):
//
//   {"init": 0, "driver": "580.65.06", "cuda": 13000,
//    "gpus": [{"name": "H100", "uuid": "GPU-0", "bus_id": "00000000:3B:00.0", "total": 85899345920, "used":
//    1048576,
//              "busy": 3, "processes": [{"pid": 4171, "bytes": 1048576}],
//              "lost": 15, "ecc": 1, "uncorrected": 0, "uncorrected_ever": 0, "remap_pending": 0,
//              "remap_failed": 0, "pages_pending": 0, "mig": 0, "compute_mode": 0, "persistence": 1,
//              "throttle": 0, "temperature": 40, "capability": [9, 0], "pcie": [5, 5, 16, 16], "links": [1,
//              1], "recovery": 0}],
//    "ancestor": 40, "p2p": 0}
//
// All members are optional: a GPU answers "not supported" for those that its object lacks. Without the file
// there is no GPU.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "env/json.h"
#include "launcher/machine/gpu/nvml.h"

namespace {

using ddprun::as;
using ddprun::Json;
using ddprun::member;
using ddprun::nvml::Code;
using ddprun::nvml::Device;

Json machine() {
    const char* file = std::getenv("FAKE_NVML");
    if (file == nullptr) return Json::object();
    std::ifstream in(file);
    std::stringstream content;
    content << in.rdbuf();
    if (ddprun::Result<Json> read = ddprun::parse_json_object(content.str())) return *std::move(read);
    std::fprintf(stderr, "fake NVML: %s does not hold a JSON object\n", file);
    std::abort();
}

/// A handle is the index, counted from 1 so that none is null.
Device handle_of(unsigned index) { return reinterpret_cast<Device>(static_cast<std::uintptr_t>(index) + 1); }

Json gpu(Device device) { return machine()["gpus"][reinterpret_cast<std::uintptr_t>(device) - 1]; }

template <class T>
void assign(const Json& from, T* out) {
    *out = from.get<T>();
}

Code text(const Json& object, const char* key, char* out, unsigned length) {
    if (!object.contains(key)) return Code::NotSupported;
    const std::string value = object[key].get<std::string>();
    if (value.size() + 1 > length) return Code::InsufficientSize;
    std::memcpy(out, value.c_str(), value.size() + 1);
    return Code::Success;
}

template <class T>
Code number(const Json& object, const char* key, T* out) {
    if (!object.contains(key)) return Code::NotSupported;
    assign(object[key], out);
    return Code::Success;
}

template <class T>
Code element(const Json& object, const char* key, std::size_t at, T* out) {
    if (!object.contains(key) || at >= object[key].size()) return Code::NotSupported;
    assign(object[key][at], out);
    return Code::Success;
}

}  // namespace

extern "C" {

Code nvmlInit_v2() { return static_cast<Code>(as<int>(machine(), "init").value_or(0)); }
Code nvmlShutdown() { return Code::Success; }
Code nvmlSystemGetDriverVersion(char* out, unsigned length) { return text(machine(), "driver", out, length); }
Code nvmlSystemGetCudaDriverVersion_v2(int* version) { return number(machine(), "cuda", version); }

Code nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(member(machine(), "gpus").size());
    return Code::Success;
}
Code nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
    *device = handle_of(index);
    return static_cast<Code>(as<int>(gpu(*device), "lost").value_or(0));
}
Code nvmlDeviceGetUUID(Device device, char* out, unsigned length) {
    return text(gpu(device), "uuid", out, length);
}
Code nvmlDeviceGetName(Device device, char* out, unsigned length) {
    return text(gpu(device), "name", out, length);
}
Code nvmlDeviceGetPciInfo_v3(Device device, ddprun::nvml::PciInfo* pci) {
    return text(gpu(device), "bus_id", pci->bus_id, sizeof pci->bus_id);
}
Code nvmlDeviceGetMemoryInfo(Device device, ddprun::nvml::Memory* memory) {
    const Json of = gpu(device);
    const Code code = number(of, "total", &memory->total);
    memory->used = as<std::uint64_t>(of, "used").value_or(0);
    memory->free = memory->total - memory->used;
    return code;
}
Code nvmlDeviceGetUtilizationRates(Device device, ddprun::nvml::Utilization* utilization) {
    utilization->memory = 0;
    return number(gpu(device), "busy", &utilization->gpu);
}
Code nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, ddprun::nvml::ProcessInfo* out) {
    const Json processes = member(gpu(device), "processes");
    const unsigned room = *count;
    *count = static_cast<unsigned>(processes.size());
    if (room < *count) return Code::InsufficientSize;
    for (const Json& one : processes) {
        *out++ = {one["pid"].get<unsigned>(),
                  as<std::uint64_t>(one, "bytes").value_or(ddprun::nvml::kUnknownBytes), ~0U, ~0U};
    }
    return Code::Success;
}
Code nvmlDeviceGetEccMode(Device device, int* current, int* pending) {
    const Code code = number(gpu(device), "ecc", current);
    *pending = *current;
    return code;
}
Code nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, unsigned long long* count) {
    if (type != 1) return Code::NotSupported;
    return number(gpu(device), counter == 0 ? "uncorrected" : "uncorrected_ever", count);
}
Code nvmlDeviceGetRemappedRows(Device device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                               unsigned* failed) {
    *corrected = *uncorrected = 0;
    const Code code = number(gpu(device), "remap_pending", pending);
    return code == Code::Success ? number(gpu(device), "remap_failed", failed) : code;
}
Code nvmlDeviceGetRetiredPagesPendingStatus(Device device, int* pending) {
    return number(gpu(device), "pages_pending", pending);
}
Code nvmlDeviceGetMigMode(Device device, unsigned* current, unsigned* pending) {
    const Code code = number(gpu(device), "mig", current);
    *pending = *current;
    return code;
}
Code nvmlDeviceGetComputeMode(Device device, int* mode) { return number(gpu(device), "compute_mode", mode); }
Code nvmlDeviceGetPersistenceMode(Device device, int* mode) {
    return number(gpu(device), "persistence", mode);
}
Code nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long* reasons) {
    return number(gpu(device), "throttle", reasons);
}
Code nvmlDeviceGetTemperature(Device device, int, unsigned* celsius) {
    return number(gpu(device), "temperature", celsius);
}
Code nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
    const Code code = element(gpu(device), "capability", 0, major);
    return code == Code::Success ? element(gpu(device), "capability", 1, minor) : code;
}
Code nvmlDeviceGetCurrPcieLinkGeneration(Device device, unsigned* out) {
    return element(gpu(device), "pcie", 0, out);
}
Code nvmlDeviceGetMaxPcieLinkGeneration(Device device, unsigned* out) {
    return element(gpu(device), "pcie", 1, out);
}
Code nvmlDeviceGetCurrPcieLinkWidth(Device device, unsigned* out) {
    return element(gpu(device), "pcie", 2, out);
}
Code nvmlDeviceGetMaxPcieLinkWidth(Device device, unsigned* out) {
    return element(gpu(device), "pcie", 3, out);
}
Code nvmlDeviceGetNvLinkState(Device device, unsigned link, int* active) {
    return element(gpu(device), "links", link, active);
}
Code nvmlDeviceGetTopologyCommonAncestor(Device, Device, int* level) {
    return number(machine(), "ancestor", level);
}
Code nvmlDeviceGetP2PStatus(Device, Device, int, int* status) { return number(machine(), "p2p", status); }
Code nvmlDeviceGetFieldValues(Device device, int count, ddprun::nvml::FieldValue* values) {
    for (int at = 0; at < count; ++at) {
        const bool known = values[at].field == ddprun::nvml::kFieldRecoveryAction;
        values[at].value_type = 1;
        values[at].code =
            known ? number(gpu(device), "recovery", &values[at].value.number) : Code::NotSupported;
    }
    return Code::Success;
}

}  // extern "C"
