#pragma once

#include <memory>
#include <string_view>

#include "env/clock.h"
#include "env/nodes/exchange.h"
#include "env/nodes/launcher_env.h"
#include "env/result.h"

namespace ddprun {

/// A conversation with the PMIx server of this process's node, which ends (Finalize) with its last owner;
/// null: none. Hold it until an exchange has begun: between two conversations the neighbours' fence does not
/// wait for this process.
using PmixSession = std::shared_ptr<void>;

struct PmixAnswer {
    Placement placement;
    PmixSession session;
};
/// Asks for rank, size, local rank, local size, node and nodes. Loads libpmix now, so that a program that
/// never asks runs without it; notices an ended server within milliseconds.
///
/// Blocks for at most `timeout`. Call it once, before the program's own MPI is initialised.
/// Error: NotFound when libpmix or the server is absent or this build has no PMIx; Timeout; Protocol with
/// PMIx's message for its other failures.
Result<PmixAnswer> ask_pmix(Duration timeout);

/// Fills in facts that the launcher's variables lack from its PMIx server, which is asked only when one is
/// missing. Error, as ask_pmix, with the variables' facts and the remedy; Mismatch when the server has
/// another rank for us.
Result<PmixSession> fill_from_pmix(Placement& placement, Duration timeout);

/// Opens a conversation of all processes of the launcher: Put, Commit, Fence with the data, Get. The
/// destructor calls Finalize, except after a call that timed out. Error: as those of ask_pmix; Mismatch when
/// the server has another rank for us.
Result<std::unique_ptr<Exchange>> open_pmix_exchange(int rank, TimePoint deadline);

/// False in a build without the pmix option: ask_pmix and open_pmix_exchange always fail.
bool built_with_pmix();
/// The message of such a build.
inline constexpr std::string_view kNoPmix =
    "this build has no PMIx (libpmix-dev was missing when it was built, or -Dpmix=disabled)";

}  // namespace ddprun
