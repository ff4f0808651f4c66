#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ddp/types.h"

namespace ddp {

enum class Backend : std::uint8_t { Cpu, Nccl, Staged, Mpi };
const char* name_of(Backend backend);

/// The first NCCL that takes several ranks per device.
inline constexpr int kMultiRankVersion = 23000;

/// One rank's device and NCCL, as the ranks of a node exchange them.
struct DeviceView {
    int rank = 0;              ///< rank in the world
    std::string device;        ///< PCI address, which also identifies the device in NCCL
    int nccl_version = 0;      ///< 22809 is 2.28.9; 0 without NCCL
    std::string nccl_problem;  ///< reason why NCCL is missing
    /// Value of NCCL_MULTI_RANK_GPU_ENABLE in the environment; nullopt when it is not set.
    std::optional<bool> multi_rank;
    bool operator==(const DeviceView&) const = default;
};
std::string encode(const DeviceView& view);
/// Throws MismatchError when encode() of this release did not make the message.
DeviceView decode_view(const std::string& message);

/// The first device that several ranks share, "ranks 0-3 share GPU 0000:41:00.0"; "" when every rank has its
/// own.
std::string shared_device(const std::vector<DeviceView>& views);

struct BackendQuestion {
    std::string requested = "auto";     ///< auto, nccl, staged, cpu, mpi
    Device device = {};                 ///< device of the buffers
    std::vector<DeviceView> node = {};  ///< all ranks of this node; empty for host memory
    bool one_node = true;               ///< the world is on one node
};
struct BackendChoice {
    Backend backend = Backend::Cpu;
    std::string why;  ///< "auto: buffers are in host memory"
    /// Tell NCCL, before it starts, that several ranks share a device (NCCL 2.30).
    bool enable_multi_rank = false;
};

/// True when a request is for buffers on devices. Throws InvalidInput for an unknown name, and for a backend
/// and a device that contradict each other.
bool is_for_devices(const std::string& requested, const Device& device);
/// Chooses the backend of a group; the same on all ranks of a node. Throws InvalidInput with the remedy where
/// none fits.
BackendChoice choose_backend(const BackendQuestion& question);

}  // namespace ddp
