#pragma once

#include "env/clock.h"
#include "env/nodes/launcher_env.h"
#include "env/result.h"

namespace ddprun {

/// Asks the PMIx server of this process's node for rank, size, local rank, local size, node and nodes, and
/// lets go of it again. libpmix is loaded now, so a program that never asks runs where it is absent; a server
/// that is gone is noticed within milliseconds.
///
/// Blocks for at most `timeout`. To be called once, before the program's own MPI is initialised.
/// Error: NotFound where libpmix or the server is absent or this build has no PMIx; Timeout; Protocol with
/// PMIx's own words for its other failures.
Result<Placement> ask_pmix(Duration timeout);

/// False in a build without the pmix option: ask_pmix always fails.
bool built_with_pmix();

}  // namespace ddprun
