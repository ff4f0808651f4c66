#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "env/clock.h"

/// Everything a peer can make grow, and every wait for a peer, in one place.
namespace ddprun::rdzv {

/// What one message may carry.
struct FrameLimits {
    std::uint32_t json_bytes;
    std::uint32_t blob_bytes;
};
/// Before a peer has proved that it knows the token.
inline constexpr FrameLimits kStrangerLimits{4096, 0};
inline constexpr FrameLimits kPeerLimits{1U << 20, 64U << 20};

/// The store, all clients together unless it says "per".
struct StoreLimits {
    std::size_t key_bytes = 1024;         ///< per key and per barrier name
    std::size_t value_bytes = 64U << 20;  ///< per value
    std::size_t keys = 1U << 20;
    std::size_t total_bytes = std::size_t{1} << 30;  ///< keys and values
    std::size_t keys_per_wait = 16384;
    std::size_t waiters_per_client = 1024;
    std::size_t waiting_bytes_per_client =
        16U << 20;  ///< what is kept of Waits, Gets and Barriers that wait: names and notes
    std::size_t waiting_bytes = 512U << 20;  ///< the same, of all clients
    int participants = 1 << 20;              ///< per barrier
};

/// The server's connections.
struct ServerLimits {
    std::size_t strangers = 512;  ///< connections that have not finished the handshake
    std::size_t connections = 65536;
    std::size_t output_bytes =
        160U << 20;                 ///< per connection, or client of an agent, not yet taken by the peer
    std::size_t unanswered = 4096;  ///< requests of one local client; beyond them nothing is read from it
    Duration handshake = std::chrono::seconds(10);  ///< from accept to the last handshake message
    Duration goodbye = std::chrono::seconds(2);     ///< for a refused peer to read why
};

/// Between an agent and the controller, each way: one limit, of which the others are parts.
struct Heartbeats {
    Duration timeout = std::chrono::seconds(3);  ///< nothing received for this long: the other side is lost
    Duration interval = timeout / 6;             ///< a silent side says at least so often that it lives
};
/// What workers say and hear by their agent's session takes turns with the agent's own messages: when the
/// other side has not acknowledged so much, no more of it is given to the session.
inline constexpr std::size_t kRelayWindow = 4U << 20;

/// Bytes of an agent's OutputPieces that the controller has not shown. So much waits there for each such
/// agent when nobody reads the controller's console.
inline constexpr std::size_t kOutputWindow = 256U << 10;

/// Data that the peer's kernel did not acknowledge for this long: the connection is over. For those without
/// heartbeats: workers, tools, strangers.
inline constexpr Duration kUserTimeout = std::chrono::seconds(20);
/// How much longer than its own deadline a client waits for the server's word on it.
inline constexpr Duration kAnswerGrace = std::chrono::milliseconds(500);

/// Text of a WorkerExited message is cut to these, so that no worker can make its agent's message too large:
/// escaped as JSON a byte can take six, and all of it together must stay below kPeerLimits.json_bytes.
inline constexpr std::size_t kReportLines = 64;
inline constexpr std::size_t kReportLineBytes = 1024;
inline constexpr std::size_t kReportErrorBytes = 65536;
inline constexpr std::size_t kReportTextBytes = 8192;

/// What workers exchange through their agents as PMIx servers. A fence's parts of all nodes come back as one
/// blob.
inline constexpr std::size_t kFencePartBytes = 16U << 20;
inline constexpr std::size_t kFenceBytes = kPeerLimits.blob_bytes;
inline constexpr std::size_t kOpenFences = 1024;    ///< of a job
inline constexpr std::size_t kOpenModexes = 65536;  ///< of a job, not yet answered

}  // namespace ddprun::rdzv
