#include "rendezvous/serve/store_peers.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "env/io/socket.h"

namespace ddprun::rdzv {
namespace {

bool is_unix_socket(int fd) {
    int domain = 0;
    socklen_t length = sizeof domain;
    return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX;
}

}  // namespace

StorePeers::StorePeers(os::EventLoop& loop, bool is_local, Credentials credentials, ServerLimits limits,
                       StorePeersHandler& handler)
    : is_local_(is_local),
      most_unanswered_(limits.unanswered),
      handler_(handler),
      peers_(loop, {std::move(credentials), limits, is_local ? "connections of workers" : "connections"},
             *this) {}

Result<std::unique_ptr<StorePeers>> StorePeers::serve(os::EventLoop& loop, UniqueFd listener,
                                                      Credentials credentials, ServerLimits limits,
                                                      StorePeersHandler& handler) {
    const bool is_local = is_unix_socket(listener.get());
    std::unique_ptr<StorePeers> peers(
        new StorePeers(loop, is_local, std::move(credentials), limits, handler));
    if (const Status listens = peers->peers_.listen(std::move(listener)); !listens) return listens.error();
    return peers;
}

Result<std::string> StorePeers::identify(int fd) {
    if (!is_local_) return peer_name(fd);
    const Result<UnixPeer> who = unix_peer(fd);
    if (!who) return who.error();
    if (who->uid == ::geteuid() || who->uid == 0) return fmt::format("pid {}", who->pid);
    return Error{Errc::Refused, fmt::format("refusing pid {}: it is user {}'s", who->pid, who->uid), 0};
}

Result<std::optional<SessionCounts>> StorePeers::on_hello(const Hello& hello) {
    if (is_local_ && hello.role == Role::Agent)
        return Error::protocol("an agent goes to the controller's port");
    return std::optional<SessionCounts>();
}

Status StorePeers::on_entered(Peer& peer) {
    if (is_paused_) peer.connection->pause_reading();
    return {};
}

Status StorePeers::on_frame(Peer& peer, Frame frame) {
    const std::uint32_t number = frame.request;
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Unknown) peer.send_unknown(frame);
    if (kind == MessageKind::Unknown || kind == MessageKind::Heartbeat) return {};
    if (kind != MessageKind::StoreRequest) return peer.misplaced(type);
    Result<StoreRequest> request = decode_store_request(std::move(frame));
    if (!request) return request.error();
    if (request->client != 0)
        return Error::protocol(fmt::format("{}: 'client' is for agents", message_name(type)));
    if (++peer.unanswered == most_unanswered_) peer.connection->pause_reading();
    handler_.on_store_request(peer.id, number, *std::move(request));
    return {};
}

void StorePeers::answer(ClientId client, std::uint32_t number, StoreReply reply) {
    Peer* const peer = peers_.find(client);
    if (peer == nullptr) return;
    peer->connection->send(encode_message(std::move(reply), number));
    if (peer->unanswered-- == most_unanswered_ && !is_paused_) peer->connection->resume_reading();
}

void StorePeers::pause() {
    if (std::exchange(is_paused_, true)) return;
    for (const auto& [id, peer] : peers_.all()) {
        if (peer->stage == Peer::Stage::Serving) peer->connection->pause_reading();
    }
}

void StorePeers::resume() {
    if (!std::exchange(is_paused_, false)) return;
    for (const auto& [id, peer] : peers_.all()) {
        if (peer->unanswered < most_unanswered_) peer->connection->resume_reading();
    }
}

bool StorePeers::is_busy_but_for(const std::string& name) const {
    return std::any_of(peers_.all().begin(), peers_.all().end(), [&](const auto& entry) {
        const Peer& peer = *entry.second;
        const bool is_served = peer.stage == Peer::Stage::Serving && peer.handshake.peer().name != name;
        return is_served || peer.connection->kept_bytes() > 0;
    });
}

void StorePeers::on_gone(Peer& peer, const Error&) {
    if (peer.handshake.authenticated()) handler_.on_store_peer_gone(peer.id);
}

}  // namespace ddprun::rdzv
