#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>

#include "ddp/net/link.h"

namespace ddp::net {

/// Failure notices between the leaders of nodes. A rank whose group failed abandons its connections, because
/// no rank may write to its buffers any more; its notice first tells the other nodes why. Notices have a tag
/// of their own.
class FailureNotice {
  public:
    /// The link is borrowed. This object must outlive it, or its connections: peers may send at any time.
    FailureNotice(Link& link, std::uint64_t tag) : link_(link), tag_(tag) {}
    FailureNotice(const FailureNotice&) = delete;
    FailureNotice& operator=(const FailureNotice&) = delete;

    /// Receives this peer's notice from now on, and sends ours to it later. A repeated call does nothing.
    void add_peer(std::uint32_t peer);
    /// Sends the notice to all peers, once. Returns when it was sent, or after a moment; the link is
    /// abandoned then.
    void send(const std::exception_ptr& failure);
    struct Received {
        std::uint32_t peer = 0;
        std::string text;  ///< encoded by encode_failure()
    };
    /// The received notice of the lowest rank, if any.
    [[nodiscard]] std::optional<Received> received() const;

  private:
    using Text = std::array<char, 1024>;  ///< ends with a 0, and is sent whole
    struct Peer {
        Text text{};
        Transfer received, sent;
    };
    Link& link_;
    const std::uint64_t tag_;
    std::map<std::uint32_t, Peer> peers_;  ///< by peer
    Text own_{};
    bool sent_ = false;
};

}  // namespace ddp::net
