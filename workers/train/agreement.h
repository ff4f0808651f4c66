#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/lifeline.h"
#include "ddp/process_group.h"

namespace train {

/// The exit codes of sysexits.h that train uses.
enum class ExitCode : std::uint8_t {
    Ok = 0,
    Failed = 1,
    Usage = 64,
    DataError = 65,
    NoInput = 66,
    Unavailable = 69,
    CannotCreate = 73,
    Stopped = ddp::kStoppedEarly
};

/// A reason why training cannot start: exit code and message.
struct StartupError {
    ExitCode code = ExitCode::Failed;
    std::string what;
};

/// A startup error of the world, the same on every rank.
struct AgreedError {
    StartupError error;
    int reporter = 0;  ///< the rank that prints it, once for all
};

/// The values that must be equal on all ranks.
struct CommonSettings {
    ddp::NamedValue data;                   ///< fingerprint of the data, wherever it lies
    std::vector<ddp::NamedValue> settings;  ///< named after their options
};

/// Collective: when a rank has a startup error, no rank starts, all end with the same code, and one rank
/// prints the reason, with its rank when others have none. Ranks whose `common` differs have an error too.
std::optional<AgreedError> agree(ddp::ProcessGroup& group, const std::optional<StartupError>& mine,
                                 const CommonSettings& common);

/// How a rank learns that it should stop; both are set on all ranks or on none.
struct StopRequest {
    std::function<bool()> wanted;                     ///< this rank has been asked, at a time of its own
    std::function<bool(std::uint64_t steps)> agreed;  ///< ddprun has found the step for all ranks
};

}  // namespace train
