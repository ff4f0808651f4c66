#pragma once

#include <memory>
#include <string_view>

#include "env/clock.h"
#include "env/nodes/exchange.h"
#include "env/nodes/launcher_env.h"
#include "env/result.h"

namespace ddprun {

/// A conversation with the PMIx server of this process's node, which ends (Finalize) with its last owner;
/// null: there is none. Who goes on with an exchange holds it until that has begun: between two conversations
/// a process does not count for its neighbours' fence, which then waits for nobody.
using PmixSession = std::shared_ptr<void>;

struct PmixAnswer {
    Placement says;
    PmixSession session;
};
/// Asks for rank, size, local rank, local size, node and nodes. libpmix is loaded now, so a program that
/// never asks runs where it is absent; a server that is gone is noticed within milliseconds.
///
/// Blocks for at most `timeout`. To be called once, before the program's own MPI is initialised.
/// Error: NotFound where libpmix or the server is absent or this build has no PMIx; Timeout; Protocol with
/// PMIx's own words for its other failures.
Result<PmixAnswer> ask_pmix(Duration timeout);

/// What the launcher's variables did not tell, from its PMIx server, which is asked only where something is
/// missing. Error, as above, with what the variables said and the remedy; Mismatch where the server knows us
/// by another rank.
Result<PmixSession> fill_from_pmix(Placement& placement, Duration timeout);

/// A conversation of all processes of the launcher: Put, Commit, Fence with the data, Get. The end of the
/// object is Finalize, on every path; only a server that did not answer in time is left without it. Error: as
/// those of ask_pmix; Mismatch where the server knows us by another rank.
Result<std::unique_ptr<Exchange>> open_pmix_exchange(int rank, TimePoint deadline);

/// False in a build without the pmix option: ask_pmix and open_pmix_exchange always fail.
bool built_with_pmix();
/// Said where it is not.
inline constexpr std::string_view kNoPmix =
    "this build has no PMIx (libpmix-dev was missing when it was built, or -Dpmix=disabled)";

}  // namespace ddprun
