#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ddp/process_group.h"

namespace train {

/// Exit codes of sysexits.h, as far as train uses them.
enum class ExitCode : std::uint8_t {
    Ok = 0,
    Failed = 1,
    Usage = 64,
    DataError = 65,
    NoInput = 66,
    CannotCreate = 73
};

/// Something that keeps training from starting, and the one line about it.
struct Trouble {
    ExitCode code = ExitCode::Failed;
    std::string what;
};

/// Trouble of the whole world, as every rank knows it.
struct AgreedTrouble {
    Trouble trouble;
    int reporter = 0;  ///< the rank that prints it, once for all
};

/// Collective: is anyone in trouble? Then nobody starts, everyone ends with the same code, and one rank says
/// why, naming itself when the others are well. `fingerprint` must be the same on all ranks (it stands for
/// the data that they have read); where it is not, that is trouble too.
std::optional<AgreedTrouble> agree(ddp::ProcessGroup& group, const std::optional<Trouble>& mine,
                                   std::uint64_t fingerprint);

}  // namespace train
