#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/hang/hang_detector.h"

namespace ddprun {

class Visitor;

/// Samples one rank: its process, the processes below it, its line of the segment.
HangSample sample_rank(int rank, pid_t pid, const RankLine& line);

/// The samples of one node's workers.
struct NodeLook {
    std::uint64_t generation = 0;
    bool is_running = false;  ///< all of its workers have been started and none is being stopped
    std::string host = {};
    std::vector<HangSample> ranks = {};
    bool operator==(const NodeLook&) const = default;
};
void describe(Visitor& v, NodeLook& look);

}  // namespace ddprun
