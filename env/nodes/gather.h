#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/nodes/exchange.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/meeting_point.h"

namespace ddprun {

/// Fills in the node and the local rank that the launcher did not tell, from the host identities of all
/// ranks. Nodes are numbered in the order of their first ranks. Pure.
void place_by_hosts(Placement& placement, const std::vector<std::string>& host_of_rank);

/// The facts that each process of a launcher has after gather().
struct Gathered {
    MeetingPoint meeting;
    Placement placement;  ///< with the local rank and sizes, which some launchers do not tell
};

/// Needed: the processes are ranks, and exchange their hosts when the launcher does not tell local ranks or
/// node numbers. AsTold: there is one process per node, which does not need them.
enum class WhoIsWhere : std::uint8_t { Needed, AsTold };

/// Exchanges the meeting point and, if needed, the hosts. Collective. Rank 0 gives `mine`; the others get it.
Result<Gathered> gather(Exchange& exchange, const Placement& placement,
                        const std::optional<MeetingPoint>& mine, WhoIsWhere who);

/// Asks again, after a meeting point that led nowhere, on a channel that keeps values.
Result<MeetingPoint> ask_meeting_point(Exchange& exchange);

}  // namespace ddprun
