#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/hang/hang_detector.h"

namespace ddprun {

/// Samples one rank: its process, the processes below it, its line of the segment.
HangSample sample_rank(int rank, pid_t pid, const RankLine& line);

/// The samples of one node's workers.
struct NodeLook {
    std::uint64_t generation = 0;
    bool is_running = false;  ///< all of its workers have been started and none is being stopped
    std::vector<HangSample> ranks;
    bool operator==(const NodeLook&) const = default;
};
/// Converts to one line of JSON with its newline, and back. Error: Protocol.
std::string to_json(const NodeLook& look);
Result<NodeLook> node_look_from_json(std::string_view line);

}  // namespace ddprun
