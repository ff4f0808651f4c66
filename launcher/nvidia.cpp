#include "launcher/nvidia.h"

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>

#include <fmt/core.h>

#include "env/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxSmallFile = 64 * 1024;

/// "0000:3b:00.0" of "00000000:3B:00.0": NVML and sysfs differ in the width of the domain and in case.
std::string sysfs_bus_id(std::string_view nvml_id) {
    std::string id = lower(nvml_id);
    if (id.size() == 16 && id.starts_with("0000")) id.erase(0, 4);
    return id;
}

int numa_node_of(const std::string& bus_id) {
    const Result<std::string> text = read_file(fmt::format("/sys/bus/pci/devices/{}/numa_node", bus_id), kMaxSmallFile);
    if (!text) return -1;
    const Result<std::int64_t> node = parse_int(trim(*text));
    return node && *node >= 0 ? static_cast<int>(*node) : -1;
}

/// NVML's C interface, as far as it is used here. The structure is that of nvmlDeviceGetPciInfo_v3 in nvml.h.
struct NvmlPciInfo {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

class Nvml {
  public:
    Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
        if (library_ == nullptr) return;
        const bool complete = load(init_, "nvmlInit_v2") && load(shutdown_, "nvmlShutdown") &&
                              load(count_, "nvmlDeviceGetCount_v2") && load(handle_, "nvmlDeviceGetHandleByIndex_v2") &&
                              load(uuid_, "nvmlDeviceGetUUID") && load(pci_, "nvmlDeviceGetPciInfo_v3");
        ready_ = complete && init_() == 0;
    }
    ~Nvml() {
        if (ready_) shutdown_();
        if (library_ != nullptr) ::dlclose(library_);
    }
    Nvml(const Nvml&) = delete;
    Nvml& operator=(const Nvml&) = delete;

    [[nodiscard]] bool ready() const { return ready_; }

    [[nodiscard]] std::vector<Gpu> gpus() const {
        unsigned count = 0;
        if (count_(&count) != 0) return {};
        std::vector<Gpu> found;
        for (unsigned index = 0; index < count; ++index) found.push_back(gpu(index));
        return found;
    }

  private:
    [[nodiscard]] Gpu gpu(unsigned index) const {
        Gpu gpu;
        gpu.id = fmt::format("{}", index);
        void* device = nullptr;
        if (handle_(index, &device) != 0) return gpu;
        std::array<char, 96> uuid{};
        if (uuid_(device, uuid.data(), static_cast<unsigned>(uuid.size() - 1)) == 0) gpu.uuid = uuid.data();
        NvmlPciInfo pci{};
        if (pci_(device, &pci) == 0) gpu.numa_node = numa_node_of(sysfs_bus_id(pci.bus_id));
        return gpu;
    }

    template <class Function>
    bool load(Function*& function, const char* name) {
        function = reinterpret_cast<Function*>(::dlsym(library_, name));
        return function != nullptr;
    }

    void* library_;
    bool ready_ = false;
    int (*init_)() = nullptr;
    int (*shutdown_)() = nullptr;
    int (*count_)(unsigned*) = nullptr;
    int (*handle_)(unsigned, void**) = nullptr;
    int (*uuid_)(void*, char*, unsigned) = nullptr;
    int (*pci_)(void*, NvmlPciInfo*) = nullptr;
};

std::vector<std::string> names_in(const char* directory) {
    std::vector<std::string> names;
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(directory), ::closedir);
    if (!opened) return names;
    while (const dirent* entry = ::readdir(opened.get())) names.emplace_back(entry->d_name);
    std::sort(names.begin(), names.end());
    return names;
}

/// /proc/driver/nvidia/gpus/<bus id>/information has a line "GPU UUID: \t GPU-...".
std::vector<Gpu> gpus_from_proc() {
    std::vector<Gpu> found;
    for (const std::string& bus_id : names_in("/proc/driver/nvidia/gpus")) {
        if (bus_id.starts_with('.')) continue;
        Gpu gpu;
        gpu.id = fmt::format("{}", found.size());
        gpu.numa_node = numa_node_of(bus_id);
        const Result<std::string> text =
            read_file(fmt::format("/proc/driver/nvidia/gpus/{}/information", bus_id), kMaxSmallFile);
        if (text) {
            for (const std::string_view line : split(*text, '\n')) {
                if (line.starts_with("GPU UUID:")) gpu.uuid = trim(line.substr(9));
            }
        }
        found.push_back(std::move(gpu));
    }
    return found;
}

std::vector<Gpu> gpus_from_dev() {
    std::vector<Gpu> found;
    for (const std::string& name : names_in("/dev")) {
        if (!name.starts_with("nvidia") || !parse_uint(std::string_view(name).substr(6))) continue;
        found.push_back({fmt::format("{}", found.size()), "", -1});
    }
    return found;
}

}  // namespace

PhysicalGpus find_nvidia_gpus() {
    // Without the control device there is no driver, and loading NVML would only cost time.
    const bool has_driver = ::access("/dev/nvidiactl", F_OK) == 0 || ::access("/dev/dxg", F_OK) == 0;
    if (has_driver) {
        if (const Nvml nvml; nvml.ready()) return {nvml.gpus(), "NVML"};
    }
    if (std::vector<Gpu> found = gpus_from_proc(); !found.empty()) return {std::move(found), "/proc/driver/nvidia"};
    return {gpus_from_dev(), "/dev"};
}

}  // namespace ddprun
