#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "env/clock.h"

/// All limits on what a peer can make grow, and all waits for a peer.
namespace ddprun::rdzv {

/// The limits of one message.
struct FrameLimits {
    std::uint32_t json_bytes;
    std::uint32_t blob_bytes;
};
/// The limits before a peer has proved that it knows the token.
inline constexpr FrameLimits kStrangerLimits{4096, 0};
inline constexpr FrameLimits kPeerLimits{1U << 20, 64U << 20};

/// The limits of the store, for all clients together unless marked "per".
struct StoreLimits {
    std::size_t key_bytes = 1024;         ///< per key and per barrier name
    std::size_t value_bytes = 64U << 20;  ///< per value
    std::size_t keys = 1U << 20;
    std::size_t total_bytes = std::size_t{1} << 30;  ///< keys and values
    std::size_t keys_per_wait = 16384;
    std::size_t waiters_per_client = 1024;
    std::size_t waiting_bytes_per_client = 16U << 20;  ///< memory of waiting Wait, Get and Barrier requests
    std::size_t waiting_bytes = 512U << 20;            ///< the same, for all clients
    int participants = 1 << 20;                        ///< per barrier
};

/// The limits of the server's connections.
struct ServerLimits {
    std::size_t strangers = 512;  ///< connections that have not finished the handshake
    std::size_t connections = 65536;
    std::size_t output_bytes =
        160U << 20;                 ///< per connection, or client of an agent, not yet taken by the peer
    std::size_t unanswered = 4096;  ///< requests of one local client; beyond them it is not read
    Duration handshake = std::chrono::seconds(10);  ///< from accept to the last handshake message
    Duration goodbye = std::chrono::seconds(2);     ///< for a refused peer to read why
};

/// The heartbeats between an agent and the controller, in each direction.
struct Heartbeats {
    Duration timeout = std::chrono::seconds(3);  ///< nothing received for this long: the other side is lost
    Duration interval = timeout / 6;             ///< the time between two heartbeats
};
/// Store messages of workers wait while their agent's session has this many unacknowledged bytes, so that
/// they do not delay the agent's own messages.
inline constexpr std::size_t kRelayWindow = 4U << 20;

/// The most bytes of an agent's OutputPieces that the controller has not shown. The controller holds as much
/// for each such agent when nobody reads its console.
inline constexpr std::size_t kOutputWindow = 256U << 10;

/// A connection is lost when the peer's kernel has not acknowledged data for this long. It matters for peers
/// without heartbeats: workers, tools, strangers.
inline constexpr Duration kUserTimeout = std::chrono::seconds(20);
/// The time after its own deadline for which a client still waits for the server's Timeout answer.
inline constexpr Duration kAnswerGrace = std::chrono::milliseconds(500);

/// The text of a WorkerExited message is cut to these limits, so that the message stays below
/// kPeerLimits.json_bytes even when each byte is escaped to six in JSON.
inline constexpr std::size_t kReportLines = 64;
inline constexpr std::size_t kReportLineBytes = 1024;
inline constexpr std::size_t kReportErrorBytes = 65536;
inline constexpr std::size_t kReportTextBytes = 8192;

/// The limits of PMIx exchanges between workers. The parts of all nodes in a fence come back as one blob.
inline constexpr std::size_t kFencePartBytes = 16U << 20;
inline constexpr std::size_t kFenceBytes = kPeerLimits.blob_bytes;
inline constexpr std::size_t kOpenFences = 1024;    ///< per job
inline constexpr std::size_t kOpenModexes = 65536;  ///< unanswered requests per job

}  // namespace ddprun::rdzv
