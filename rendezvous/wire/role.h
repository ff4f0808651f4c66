#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace ddprun::rdzv {

/// What kind of program the client of a connection is. The handshake authenticates it.
enum class Role : std::uint8_t { Agent, Worker, Tool };

/// In the order of Role.
inline constexpr std::array<std::string_view, 3> kRoleNames{"agent", "worker", "tool"};
constexpr std::string_view role_name(Role role) { return kRoleNames[static_cast<std::size_t>(role)]; }

}  // namespace ddprun::rdzv
