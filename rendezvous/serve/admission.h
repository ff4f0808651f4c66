#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/serve/store.h"

/// Which connections the server accepts, by their address and first byte, and which of them it closes to make
/// room. Pure.
namespace ddprun::rdzv {

/// What is known of a connection when its first byte comes.
struct Arrival {
    std::string from;  ///< the peer's numeric address
    std::string to;    ///< this side's numeric address
    char first_byte = 0;
    bool is_sealed = false;  ///< the connection is encrypted by TLS
};

/// Checks that the connection uses TLS exactly when the job does; a connection within this host may always be
/// plain. Error: Refused, with the remedy.
Status admits_speech(const Arrival& arrival, bool job_has_tls);

/// The state of the server that decides whether a client of PyTorch's TCPStore is accepted.
struct TorchDoor {
    bool is_open = false;          ///< the server serves PyTorch's TCPStore
    std::uint64_t generation = 0;  ///< the store's generation; 0: none has begun
    std::size_t clients = 0;       ///< clients connected now
    std::size_t most = 0;
    const std::set<std::string>& nodes;  ///< addresses of the job's nodes
};

/// Checks the peer's address, because these clients cannot prove that they know the token. Error: Refused,
/// Limit.
Status admits_torch(const Arrival& arrival, const TorchDoor& door);

/// Strangers: the connections that have not proved that they know the token. Chooses which of them is closed
/// to make room. Pure; every call takes logarithmic time, because all nodes of a large job connect at once.
///
/// A refused connection that is still open is closed first, then the one that has been silent for longest.
/// While all have spoken within kHandshakeSilence, none is closed: new connections wait in the kernel's
/// queue.
class Strangers {
  public:
    /// A peer that takes part in the handshake answers sooner than this.
    static constexpr Duration kHandshakeSilence = std::chrono::milliseconds(100);

    explicit Strangers(std::size_t most) : most_(most) {}

    void arrived(ClientId id, TimePoint now);
    /// The connection has sent a message. Ignored unless it is a stranger.
    void spoke(ClientId id, TimePoint now);
    /// The connection is being told why it is refused. Ignored unless it is a stranger.
    void refused(ClientId id);
    /// The connection has proved that it knows the token, or is gone. False: it was no stranger.
    bool left(ClientId id);

    [[nodiscard]] std::size_t in_handshake() const { return last_heard_.size(); }
    [[nodiscard]] bool is_crowded() const { return last_heard_.size() + refused_.size() >= most_; }
    /// The time from which another connection can be accepted; TimePoint::min(): now.
    [[nodiscard]] TimePoint room_at() const;
    /// The connection to close; nullopt when there are no strangers.
    [[nodiscard]] std::optional<ClientId> next_to_go() const;

  private:
    std::size_t most_;
    std::unordered_map<ClientId, TimePoint> last_heard_;      ///< last message or arrival, during a handshake
    std::set<std::pair<TimePoint, ClientId>> by_last_heard_;  ///< the same, by time
    std::set<ClientId> refused_;
};

}  // namespace ddprun::rdzv
