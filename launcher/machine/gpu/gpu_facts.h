#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/machine/gpu/nvidia.h"

namespace ddprun {

/// A process that has a CUDA context on a GPU.
struct GpuProcess {
    unsigned pid = 0;  ///< 0: in another container
    std::optional<std::uint64_t> used_bytes;
    std::string program;  ///< "" not known
    bool operator==(const GpuProcess&) const = default;
};

/// A fault of a GPU that the driver reported in the kernel's log.
struct Xid {
    std::string bus_id;  ///< as sysfs writes it: "0000:3b:00.0"
    int number = 0;
    std::string text;  ///< the text after the number
    bool operator==(const Xid&) const = default;
};

enum class ComputeMode : std::uint8_t { Shared, ExclusiveThread, Prohibited, ExclusiveProcess };

/// NVML's facts about one GPU. Facts that it does not tell are absent.
struct GpuFacts {
    unsigned index = 0;
    std::string name, uuid, bus_id;  ///< bus_id as sysfs writes it
    int numa_node = -1;
    std::string lost;  ///< why the GPU does not answer, and all fields below are absent; "" it answers
    std::optional<std::uint64_t> total_bytes, used_bytes;
    std::optional<bool> ecc;
    /// ECC errors since the driver's start, and in the GPU's life.
    std::optional<std::uint64_t> uncorrected_now, uncorrected_ever;
    std::optional<bool> remap_pending, remap_failed;  ///< replacement of defective memory rows
    std::optional<bool> pages_pending;                ///< the same on GPUs before Ampere
    std::optional<bool> mig, persistence;
    std::optional<ComputeMode> compute_mode;
    /// The driver's request: 0 nothing, 1 reset, 2 reboot, 3 drain, 4 drain and reset.
    std::optional<unsigned> recovery_action;
    std::optional<std::uint64_t> throttle_reasons;
    std::optional<unsigned> celsius;
    std::string capability;  ///< "9.0"
    std::optional<unsigned> pcie_generation, pcie_max_generation, pcie_width, pcie_max_width;
    unsigned links_up = 0, links = 0;  ///< NVLinks
    std::vector<GpuProcess> processes;
    std::vector<Xid> xids;  ///< those in the kernel's log
};

/// The connection between two GPUs, from near to far.
enum class GpuDistance : std::uint8_t {
    Unknown,
    NvLink,
    SameBoard,
    SameSwitch,
    SeveralSwitches,
    HostBridge,
    NumaNode,
    System
};
struct GpuPair {
    unsigned a = 0, b = 0;
    GpuDistance distance = GpuDistance::Unknown;
    std::optional<bool> peer_access;  ///< one can read the other's memory
};

struct NvidiaFacts {
    std::string problem;         ///< why NVML could not be asked; "" none
    bool mismatch = false;       ///< `problem` is a library that does not fit the kernel module
    bool has_device = false;     ///< PCI shows an NVIDIA GPU, with or without a driver
    std::string driver;          ///< "580.65.06"
    int cuda_version = 0;        ///< 13000: the newest CUDA that the driver runs
    std::vector<GpuFacts> gpus;  ///< by index
    std::vector<GpuPair> pairs;
};

enum class NvidiaDetail : std::uint8_t { Health, AndTopology };

/// Asks NVML about every GPU, and the kernel's log about its past. Creates no CUDA context. Never fails.
NvidiaFacts read_nvidia_facts(NvidiaDetail detail);

/// The GPUs as CUDA_VISIBLE_DEVICES can name them, for visible_gpus. Pure.
std::vector<Gpu> physical_gpus(const NvidiaFacts& nvidia);

/// Parses a line of the kernel's log: "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus.".
/// nullopt: the line is about something else. Pure.
std::optional<Xid> parse_xid(std::string_view line);

}  // namespace ddprun
