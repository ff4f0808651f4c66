#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/nodes/exchange.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/meeting_point.h"

namespace ddprun {

/// Pure: what the launcher did not tell of the node, and of the place on it, of the process `rank`, from the
/// identity of everybody's host, by rank. Nodes are numbered as their first ranks.
void place_by_hosts(Placement& placement, const std::vector<std::string>& host_of_rank);

/// What all processes of a launcher know of each other after they have talked.
struct Gathered {
    MeetingPoint meeting;
    Placement placement;  ///< with the local rank and sizes, which some launchers do not tell
};

/// Where the launcher does not tell local ranks or the nodes' numbers, all tell each other on which host they
/// are: for processes that are ranks. One for each node does not need it.
enum class WhoIsWhere : std::uint8_t { Needed, AsTold };

/// Collective. `mine` is what rank 0 brings; the others hear it.
Result<Gathered> gather(Exchange& exchange, const Placement& placement,
                        const std::optional<MeetingPoint>& mine, WhoIsWhere who);

/// Again, where the channel keeps what was put: something newer than what has led nowhere.
Result<MeetingPoint> ask_meeting_point(Exchange& exchange);

}  // namespace ddprun
