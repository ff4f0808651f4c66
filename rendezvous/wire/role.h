#pragma once

#include <cstdint>

namespace ddprun::rdzv {

/// What kind of program the client of a connection is. The handshake authenticates it.
enum class Role : std::uint8_t { Agent, Worker, Tool };

constexpr const char* role_name(Role role) {
    switch (role) {
        case Role::Agent: return "agent";
        case Role::Worker: return "worker";
        case Role::Tool: return "tool";
    }
    return "unknown";
}

}  // namespace ddprun::rdzv
