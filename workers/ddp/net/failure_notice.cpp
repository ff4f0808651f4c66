#include "ddp/net/failure_notice.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "ddp/worker/encoded_failure.h"
#include "env/clock.h"

namespace ddp::net {

namespace {

constexpr std::chrono::milliseconds kSendTimeout{200};

}  // namespace

void FailureNotice::add_peer(std::uint32_t peer) {
    const auto [peer_state, is_new] = peers_.try_emplace(peer);
    if (is_new)
        link_.receive(peer, tag_, std::as_writable_bytes(std::span(peer_state->second.text)),
                      peer_state->second.received);
}

void FailureNotice::send(const std::exception_ptr& failure) {
    if (std::exchange(sent_, true)) return;
    encode_failure(failure).copy(own_.data(), own_.size() - 1);
    for (auto& [peer, peer_state] : peers_)
        link_.send(peer, tag_, std::as_bytes(std::span(own_)), peer_state.sent);
    // A peer that has sent its own notice needs none.
    const auto has_left = [](const auto& peer_state) {
        return peer_state.second.sent.done || peer_state.second.received.done;
    };
    const auto until = ddprun::MonotonicClock::now() + kSendTimeout;
    while (!std::all_of(peers_.begin(), peers_.end(), has_left) && ddprun::MonotonicClock::now() < until) {
        if (!link_.progress()) link_.sleep(std::chrono::milliseconds(1));
    }
    link_.abandon();
}

std::optional<FailureNotice::Received> FailureNotice::received() const {
    for (const auto& [peer, peer_state] : peers_) {
        if (peer_state.received.done && peer_state.received.failure.empty())
            return Received{peer, peer_state.text.data()};
    }
    return std::nullopt;
}

}  // namespace ddp::net
