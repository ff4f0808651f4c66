#include "rendezvous/local_clients.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "env/hmac.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun::rdzv {

/// One accepted connection.
struct LocalClients::Peer {
    std::uint64_t id;
    std::unique_ptr<Connection> connection;
    ServerHandshake handshake;
    os::EventLoop::TimerId timer = 0;  ///< of the handshake
    bool is_leaving = false;
    std::size_t unanswered = 0;

    [[nodiscard]] std::string name() const {
        const Hello& hello = handshake.peer();
        return hello.name.empty()
                   ? connection->peer()
                   : fmt::format("{} '{}' ({})", role_name(hello.role), hello.name, connection->peer());
    }
};

LocalClients::LocalClients(os::EventLoop& loop, Credentials credentials, ServerLimits limits,
                           LocalClientsHandler& handler)
    : loop_(loop),
      acceptor_(loop, *this),
      credentials_(std::move(credentials)),
      limits_(limits),
      handler_(handler) {}

Result<std::unique_ptr<LocalClients>> LocalClients::serve(os::EventLoop& loop, UniqueFd listener,
                                                          Credentials credentials, ServerLimits limits,
                                                          LocalClientsHandler& handler) {
    std::unique_ptr<LocalClients> clients(new LocalClients(loop, std::move(credentials), limits, handler));
    if (const Status listens = clients->acceptor_.listen(std::move(listener)); !listens)
        return listens.error();
    return clients;
}

LocalClients::~LocalClients() {
    for (const auto& [id, peer] : peers_) loop_.cancel(peer->timer);
}

// ---- arrivals

void LocalClients::on_accept_failed(int error) {
    handler_.on_local_log(
        fmt::format("cannot accept connections of workers: {}; trying again", ::strerror(error)));
}

void LocalClients::on_accepted(UniqueFd fd) {
    const Result<UnixPeer> who = unix_peer(fd.get());
    const bool is_own = who && (who->uid == ::geteuid() || who->uid == 0);
    if (!is_own)
        return handler_.on_local_log(who ? fmt::format("refusing pid {}: it is user {}'s", who->pid, who->uid)
                                         : who.error().what);
    if (peers_.size() >= limits_.connections) {
        return handler_.on_local_log(
            fmt::format("refusing pid {}: there are {} connections of workers", who->pid, peers_.size()));
    }
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return handler_.on_local_log(nonce.error().with("refusing a connection").what);
    Connection::Options options{fmt::format("pid {}", who->pid), kStrangerLimits, limits_.output_bytes};
    Result<std::unique_ptr<Connection>> connection =
        Connection::adopt(loop_, std::move(fd), std::move(options), *this);
    if (!connection) return handler_.on_local_log(connection.error().what);
    if (is_paused_) (*connection)->pause_reading();
    const std::uint64_t id = ++last_client_;
    auto peer = std::make_unique<Peer>(
        Peer{id, *std::move(connection), ServerHandshake(credentials_, *std::move(nonce))});
    peer->timer = loop_.call_after(limits_.handshake, [this, raw = peer.get()] {
        refuse(*raw, 0,
               {Errc::Timeout, fmt::format("no handshake within {}", format_duration(limits_.handshake)), 0});
    });
    ids_.emplace(peer->connection.get(), id);
    peers_.emplace(id, std::move(peer));
}

// ---- messages

void LocalClients::on_frame(Connection& connection, Frame frame) {
    Peer& peer = *peers_.at(ids_.at(&connection));
    if (peer.is_leaving) return;
    const std::uint32_t request = frame.request;
    const Status kept =
        peer.handshake.authenticated() ? serve(peer, std::move(frame)) : shake_hands(peer, std::move(frame));
    if (!kept) refuse(peer, request, kept.error());
}

/// Error, as of serve(): it broke the rules, and is to be refused.
Status LocalClients::shake_hands(Peer& peer, Frame frame) {
    const std::uint32_t request = frame.request;
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    Result<HandshakeMessage> answer = peer.handshake.receive(*message);
    if (!answer) {
        handler_.on_local_log(fmt::format("refusing {}: {}", peer.name(), answer.error().what));
        peer.is_leaving = true;
        peer.connection->refuse(peer.handshake.refusal(), answer.error(), limits_.goodbye);
        return {};
    }
    if (peer.handshake.authenticated() && peer.handshake.peer().role == Role::Agent) {
        return Error{Errc::Protocol, "an agent goes to the controller's port", 0};
    }
    peer.connection->send(encode_message(*std::move(answer), request));
    if (!peer.handshake.authenticated()) return {};
    loop_.cancel(std::exchange(peer.timer, 0));
    peer.connection->set_limits(kPeerLimits);
    return {};
}

Status LocalClients::serve(Peer& peer, Frame frame) {
    const std::uint32_t number = frame.request;
    const std::uint8_t type = frame.type;
    switch (kind_of(type)) {
        case MessageKind::Heartbeat: return {};
        case MessageKind::Unknown:
            peer.connection->send(encode_message(
                Failure{Errc::NotFound, fmt::format("message type {} is not known here", type)}, number));
            return {};
        case MessageKind::StoreRequest: break;
        default:
            return Error{
                Errc::Protocol,
                fmt::format("{} from a {}", message_name(type), role_name(peer.handshake.peer().role)), 0};
    }
    Result<StoreRequest> request = decode_store_request(std::move(frame));
    if (!request) return request.error();
    if (request->client != 0)
        return Error{Errc::Protocol, fmt::format("{}: 'client' is for agents", message_name(type)), 0};
    if (++peer.unanswered == limits_.unanswered) peer.connection->pause_reading();
    handler_.on_local_request(peer.id, number, *std::move(request));
    return {};
}

void LocalClients::answer(std::uint64_t client, std::uint32_t number, StoreReply reply) {
    const auto found = peers_.find(client);
    if (found == peers_.end()) return;
    Peer& peer = *found->second;
    peer.connection->send(encode_message(std::move(reply), number));
    if (peer.unanswered-- == limits_.unanswered && !is_paused_) peer.connection->resume_reading();
}

void LocalClients::pause() {
    if (std::exchange(is_paused_, true)) return;
    for (const auto& [id, peer] : peers_) peer->connection->pause_reading();
}

void LocalClients::resume() {
    if (!std::exchange(is_paused_, false)) return;
    for (const auto& [id, peer] : peers_) {
        if (peer->unanswered < limits_.unanswered) peer->connection->resume_reading();
    }
}

// ---- ends

/// The last word to a peer that broke the rules.
void LocalClients::refuse(Peer& peer, std::uint32_t request, const Error& why) {
    if (std::exchange(peer.is_leaving, true)) return;
    handler_.on_local_log(fmt::format("closing {}: {}", peer.name(), why.what));
    const Failure last_words{why.code, why.what};
    if (request != 0) peer.connection->send(encode_message(last_words, request));
    peer.connection->refuse(last_words, why, limits_.goodbye);
}

void LocalClients::on_closed(Connection& connection, const Error& why) {
    const auto known = ids_.find(&connection);
    const auto entry = peers_.extract(known->second);
    const Peer& peer = *entry.mapped();
    ids_.erase(known);
    loop_.cancel(peer.timer);
    if (!peer.is_leaving && why.code != Errc::Closed)
        handler_.on_local_log(fmt::format("closed {}: {}", peer.name(), why.what));
    if (peer.handshake.authenticated()) handler_.on_local_gone(peer.id);
}

}  // namespace ddprun::rdzv
