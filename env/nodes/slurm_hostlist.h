#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// The hosts of a Slurm list, in its order: "a[01-03,07],b" gives a01 a02 a03 a07 b. Leading zeros are kept;
/// a name may have several brackets ("r[1-2]n[0-3]": the last runs fastest) and text after them. Error:
/// InvalidArgument for a malformed list, Limit for more than 65536 hosts.
Result<std::vector<std::string>> expand_hostlist(std::string_view text);

/// The tasks of each node from SLURM_TASKS_PER_NODE: "2(x2),1" gives 2 2 1.
/// Error: InvalidArgument, Limit, as above.
Result<std::vector<int>> parse_tasks_per_node(std::string_view text);

}  // namespace ddprun
