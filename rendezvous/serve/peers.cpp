#include "rendezvous/serve/peers.h"

#include <fmt/core.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "env/hmac.h"
#include "env/text.h"

namespace ddprun::rdzv {

std::string Peer::name() const {
    const Hello& hello = handshake.peer();
    if (hello.name.empty()) return connection->peer();
    return fmt::format("{} '{}' ({})", role_name(hello.role), hello.name, connection->peer());
}

void Peer::send_unknown(const Frame& frame) const {
    const Failure failure{Errc::NotFound, fmt::format("message type {} is not known here", frame.type)};
    connection->send(encode_message(failure, frame.request));
}

Error Peer::misplaced(std::uint8_t type) const {
    return Error::protocol(fmt::format("{} from a {}", message_name(type), role_name(role())));
}

Peers::Peers(os::EventLoop& loop, Options options, PeersOwner& owner)
    : loop_(loop),
      options_(std::move(options)),
      owner_(owner),
      acceptor_(loop, *this),
      strangers_(options_.limits.strangers) {}

Peers::~Peers() {
    for (const auto& [id, peer] : peers_) loop_.cancel(peer->handshake_timer);
}

Peer* Peers::find(ClientId id) const {
    const auto found = peers_.find(id);
    return found == peers_.end() ? nullptr : found->second.get();
}

// ---- arrivals

void Peers::on_accept_failed(int error) {
    if (std::exchange(last_accept_error_, error) == error) return;
    owner_.on_log(fmt::format("cannot accept {}: {}; trying again", options_.noun, ::strerror(error)));
}

void Peers::on_accepted(UniqueFd fd) {
    last_accept_error_ = 0;
    Result<std::string> name = owner_.identify(fd.get());
    if (!name) return owner_.on_log(name.error().what);
    if (!make_room()) return turn_away(std::move(fd), *name);
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return owner_.on_log(nonce.error().with("refusing a connection").what);
    const ClientId id = ++last_id_;
    Connection::Options options{*std::move(name), kStrangerLimits, options_.limits.output_bytes,
                                nullptr,          options_.tls,    id};
    Result<std::unique_ptr<Connection>> connection =
        Connection::adopt(loop_, std::move(fd), std::move(options), *this);
    if (!connection) return owner_.on_log(connection.error().what);
    auto peer = std::make_unique<Peer>(
        Peer{id, *std::move(connection), ServerHandshake(options_.credentials, *std::move(nonce))});
    peer->handshake_timer =
        loop_.call_after(options_.limits.handshake, [this, raw = peer.get()] { end_handshake(*raw); });
    strangers_.arrived(id, loop_.now());
    peers_.emplace(id, std::move(peer));
}

/// Handles the end of the time for a handshake.
void Peers::end_handshake(Peer& peer) {
    peer.handshake_timer = 0;
    if (!peer.has_spoken && owner_.keeps_silent(peer, kept_silent_)) {
        peer.is_kept_silent = true;
        ++kept_silent_;
        return stranger_left(peer.id);
    }
    const std::string span = format_duration(options_.limits.handshake);
    refuse(peer, 0, {Errc::Timeout, fmt::format("no handshake within {}", span), 0});
}

/// Closes a stranger when there is no room; peers that have proved the token stay. False: there is none.
bool Peers::make_room() {
    if (!strangers_.is_crowded() && peers_.size() < options_.limits.connections) return true;
    return evict_stranger();
}

/// False: there is no stranger.
bool Peers::evict_stranger() {
    const std::optional<ClientId> id = strangers_.next_to_go();
    if (!id) return false;
    Peer& peer = *peers_.at(*id);
    const Error why{Errc::Limit,
                    fmt::format("{} connections wait for their handshake", strangers_.in_handshake()), 0};
    strangers_.left(*id);
    if (std::exchange(peer.stage, Peer::Stage::Leaving) ==
        Peer::Stage::Leaving) {  // has been told why already
        peer.connection->fail(why);
        return true;
    }
    owner_.on_log(fmt::format("closing {}: {}", peer.name(), why.what));
    peer.connection->dismiss(failure_of(why), why);
    return true;
}

/// Closes a connection after one Failure, as far as the kernel takes it.
void Peers::turn_away(UniqueFd fd, const std::string& name) {
    const Failure why{Errc::Limit, fmt::format("there are {} {}", peers_.size(), options_.noun)};
    owner_.on_log(fmt::format("refusing {}: {}", name, why.what));
    if (options_.tls) return;  // unknown whether the peer expects TLS
    if (const Result<EncodedMessage> message = encode_message(why, 0)) {
        static_cast<void>(
            ::send(fd.get(), message->head.data(), message->head.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
    }
}

void Peers::stranger_left(ClientId id) {
    if (strangers_.left(id)) acceptor_.room_was_made();
}

// ---- received bytes and messages

bool Peers::on_first_byte(Connection& connection, char byte) {
    Peer& peer = peer_of(connection);
    peer.has_spoken = true;
    return peer.stage == Peer::Stage::Handshake && owner_.on_first_byte(peer, byte);
}

void Peers::on_bytes(Connection& connection, std::string_view bytes) {
    owner_.on_bytes(peer_of(connection), bytes);
}

void Peers::on_frame(Connection& connection, Frame frame) {
    Peer& peer = peer_of(connection);
    if (peer.stage == Peer::Stage::Leaving) return;
    const std::uint32_t request = frame.request;
    const Status kept = peer.stage == Peer::Stage::Handshake ? shake_hands(peer, std::move(frame))
                                                             : owner_.on_frame(peer, std::move(frame));
    if (!kept) refuse(peer, request, kept.error());
}

/// Error: the caller must refuse the peer and tell it why.
Status Peers::shake_hands(Peer& peer, Frame frame) {
    strangers_.spoke(peer.id, loop_.now());
    const std::uint32_t request = frame.request;
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    const Result<bool> has_session = owner_.on_hello(peer.handshake.peer());
    if (!has_session) return has_session.error();
    if (*has_session) peer.handshake.session_is_here();
    peer.handshake.bind_to(peer.connection->tls_binding());
    Result<HandshakeMessage> answer = peer.handshake.receive(*message);
    if (!answer) {
        owner_.on_log(fmt::format("refusing {}: {}", peer.name(), answer.error().what));
        close_with(peer, peer.handshake.refusal(), answer.error());
        return {};
    }
    peer.connection->send(encode_message(*std::move(answer), request));
    if (!peer.handshake.authenticated()) return {};
    admit(peer, Peer::Stage::Serving);
    peer.connection->set_limits(kPeerLimits);
    return owner_.on_entered(peer);
}

void Peers::admit(Peer& peer, Peer::Stage stage) {
    peer.stage = stage;
    stranger_left(peer.id);
    loop_.cancel(std::exchange(peer.handshake_timer, 0));
}

void Peers::take_over(Peer& newcomer, Peer& peer) {
    peer.connection = std::move(newcomer.connection);
    peer.connection->set_id(peer.id);
    peers_.erase(newcomer.id);
}

// ---- the end of a peer

/// Sends the last message to a peer that broke the protocol, and logs the error once.
void Peers::refuse(Peer& peer, std::uint32_t request, const Error& why) {
    if (peer.stage == Peer::Stage::Leaving) return;
    if (!peer.is_reported) owner_.on_log(fmt::format("closing {}: {}", peer.name(), why.what));
    if (request != 0) peer.connection->send(encode_message(failure_of(why), request));
    close_with(peer, failure_of(why), why);
}

void Peers::close_with(Peer& peer, const Failure& failure, const Error& why) {
    peer.stage = Peer::Stage::Leaving;
    strangers_.refused(peer.id);
    peer.connection->refuse(failure, why, options_.limits.goodbye);
}

void Peers::on_closed(Connection& connection, const Error& why) {
    const auto entry = peers_.find(connection.id());
    if (owner_.waits_for_redial(*entry->second, why)) return;
    // The peer is removed before the owner is called, so that nobody can find it any more.
    const std::unique_ptr<Peer> peer = std::move(entry->second);
    peers_.erase(entry);
    loop_.cancel(peer->handshake_timer);
    if (peer->is_kept_silent) --kept_silent_;
    stranger_left(peer->id);
    owner_.on_gone(*peer, why);
    // A worker or tool that closes its connection has finished, and an agent may close an unneeded connection
    // before Hello, because another one was faster: neither is logged. Nor is the end of a foreign peer with
    // its generation.
    const bool is_foreign = peer->stage == Peer::Stage::Foreign;
    const bool has_finished = why.code == Errc::Closed || (is_foreign && why.code == Errc::StaleGeneration);
    if (!has_finished && peer->stage != Peer::Stage::Leaving && !peer->is_reported)
        owner_.on_log(fmt::format("closed {}: {}", peer->name(), why.what));
}

}  // namespace ddprun::rdzv
