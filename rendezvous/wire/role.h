#pragma once

#include <cstdint>

namespace ddprun::rdzv {

/// Who a connection speaks for. Part of what the handshake authenticates.
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
