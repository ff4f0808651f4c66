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

/// What one rank of a node says of its device and its NCCL.
struct DeviceView {
    int rank = 0;              ///< in the world
    std::string device;        ///< its PCI address, by which NCCL knows it too
    int nccl_version = 0;      ///< 22809 is 2.28.9; 0 none
    std::string nccl_problem;  ///< why there is none
    /// NCCL_MULTI_RANK_GPU_ENABLE in its environment; nullopt: not set.
    std::optional<bool> multi_rank;
    bool operator==(const DeviceView&) const = default;
};
std::string encode(const DeviceView& view);
/// Throws MismatchError when it is none of encode()'s: another release.
DeviceView decode_view(const std::string& message);

/// "ranks 0-3 share GPU 0000:41:00.0", the first that is shared; "" when every rank has its own.
std::string shared_device(const std::vector<DeviceView>& views);

struct BackendQuestion {
    std::string requested = "auto";     ///< auto, nccl, staged, cpu, mpi
    Device device = {};                 ///< where the buffers will be
    std::vector<DeviceView> node = {};  ///< all ranks of this node, where buffers are on devices
    bool one_node = true;               ///< the world has no other
};
struct BackendChoice {
    Backend backend = Backend::Cpu;
    std::string why;  ///< "auto: buffers are in host memory"
    /// NCCL is to be told, before it starts, that several ranks share a device (2.30).
    bool enable_multi_rank = false;
};

/// Whether a request is for buffers on devices. Throws InvalidInput for an unknown name, and for a backend
/// and a device that do not go together.
bool is_for_devices(const std::string& requested, const Device& device);
/// Which backend a group gets; the same on all ranks of a node. Throws InvalidInput where nothing fits, with
/// what would.
BackendChoice choose_backend(const BackendQuestion& question);

}  // namespace ddp
