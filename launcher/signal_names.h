#pragma once

#include <optional>
#include <string_view>

namespace ddprun {

/// "SIGTERM", "term", "TERM" or "15" as a signal number; nullopt for anything else.
std::optional<int> signal_from_name(std::string_view name);

}  // namespace ddprun
