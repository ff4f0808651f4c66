#include "rendezvous/serve/server.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"
#include "rendezvous/serve/admission.h"

namespace ddprun::rdzv {
namespace {

Arrival arrival_of(const Connection& connection, char first_byte) {
    return {connection.remote_host(), connection.local_host(), first_byte, connection.is_sealed()};
}

}  // namespace

Server::Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler)
    : loop_(loop),
      options_(std::move(options)),
      handler_(&handler),
      store_({loop, [this](StoreAnswer one) { answer(std::move(one)); },
              [this](const std::string& line) { handler_->on_log(line); }},
             options_.store_limits),
      torch_(options_.torch_limits),
      agents_(loop, {options_.heartbeats, options_.limits.output_bytes}),
      peers_(loop, {options_.credentials, options_.limits, "connections", options_.tls}, *this) {}

Result<std::unique_ptr<Server>> Server::create(os::EventLoop& loop, ServerOptions options,
                                               ServerHandler& handler) {
    if (options.credentials.token.empty())
        return Error{Errc::InvalidArgument, "a rendezvous server without a token", 0};
    std::unique_ptr<Server> server(new Server(loop, std::move(options), handler));
    if (const Status opened = server->open(); !opened) return opened.error();
    return server;
}

Status Server::open() {
    if (options_.local_listener) {
        const Status served =
            store_.serve(std::move(options_.local_listener), options_.credentials, options_.limits);
        if (!served) return served;
    }
    if (options_.listener) {
        const Result<Endpoint> bound = local_endpoint(options_.listener.get());
        if (!bound) return bound.error();
        bound_ = {"", bound->port};
        return peers_.listen(std::move(options_.listener));
    }
    Result<Listener> listener = listen_tcp(options_.where);
    if (!listener) return listener.error();
    bound_ = std::move(listener->bound);
    return peers_.listen(std::move(listener->fd));
}

Status Server::listen_also(const Endpoint& where) {
    Result<Listener> listener = listen_tcp(where);
    return listener ? peers_.listen(std::move(listener->fd)) : Status(listener.error());
}

// ---- admission and handshake

bool Server::on_first_byte(Peer& peer, char byte) {
    const Arrival arrival = arrival_of(*peer.connection, byte);
    if (!may_be_torch(byte)) {
        if (const Status admitted = admits_speech(arrival, options_.tls != nullptr); !admitted)
            peers_.refuse(peer, 0, admitted.error());
        return false;
    }
    if (const Status admitted = admits_torch(arrival, torch_door()); !admitted) {
        peer.connection->fail(admitted.error().with("a client of PyTorch's TCPStore"));
        return true;
    }
    torch_.admit(peer.id, *peer.connection);
    peers_.admit(peer, Peer::Stage::Foreign);
    return true;
}

bool Server::keeps_silent(const Peer& peer, std::size_t kept) {
    return kept < torch_.most_silent() && admits_torch(arrival_of(*peer.connection, 0), torch_door());
}

TorchDoor Server::torch_door() const {
    return {options_.serves_torch, store().generation(), torch_.size(), options_.torch_limits.clients,
            agents_.node_addresses()};
}

Status Server::on_entered(Peer& peer) {
    const Hello& hello = peer.handshake.peer();
    if (AgentSession* const session = agents_.find(hello)) resume(peer, *session);
    else if (hello.role == Role::Agent && hello.session.empty())
        peer.session = &agents_.begin(peer.id, hello.nonce, *peer.connection);
    return {};
}

/// Moves the newcomer's connection to the session's peer; the previous one is closed.
void Server::resume(Peer& newcomer, AgentSession& session) {
    const Duration silent_for = loop_.now() - session.connection->last_heard();
    agents_.resume(session, *newcomer.connection);
    Peer& peer = *peers_.find(session.id);
    peers_.take_over(newcomer, peer);
    handler_->on_detail(fmt::format("another connection of {}, nothing was heard for {}", peer.name(),
                                    format_duration(silent_for)));
}

// ---- received messages

Status Server::on_frame(Peer& peer, Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Heartbeat) return serve_heartbeat(peer, std::move(frame));
    if (peer.session != nullptr) AgentSessions::count(*peer.session, frame);
    if (kind == MessageKind::StoreRequest) return serve_store(peer, std::move(frame));
    if (kind == MessageKind::ClientGone) return forget_client(peer, std::move(frame));
    if (kind == MessageKind::Unknown) {
        peer.send_unknown(frame);
        return {};
    }
    if (kind == MessageKind::JobMoved && peer.role() == Role::Tool) return hear_of_move(std::move(frame));
    if (peer.session != nullptr) return serve_agent(peer, std::move(frame));
    return peer.misplaced(type);
}

Status Server::serve_heartbeat(Peer& peer, Frame frame) {
    const Result<Heartbeat> heartbeat = decode_heartbeat(std::move(frame));
    if (!heartbeat) return heartbeat.error();
    return peer.session != nullptr ? agents_.take(*peer.session, *heartbeat) : Status();
}

Status Server::serve_store(Peer& peer, Frame frame) {
    const std::uint32_t number = frame.request;
    Result<StoreRequest> request = decode_store_request(std::move(frame));
    if (!request) return request.error();
    if (request->client != 0 && peer.session == nullptr)
        return Error::protocol("'client' in a request of no agent");
    store_.ask({peer.id, request->client}, number, *std::move(request));
    return {};
}

Status Server::forget_client(Peer& peer, Frame frame) {
    const Result<ClientGone> gone = decode_client_gone(std::move(frame));
    if (!gone) return gone.error();
    if (peer.session == nullptr) return Error::protocol("ClientGone from no agent");
    store_.disconnect({peer.id, gone->client});
    peer.session->held.forget(gone->client);
    return {};
}

Status Server::hear_of_move(Frame frame) {
    const Result<JobMoved> moved = decode_job_moved(std::move(frame));
    if (!moved) return moved.error();
    handler_->on_job_moved(*moved);
    return {};
}

Status Server::serve_agent(Peer& peer, Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    AgentSession& session = *peer.session;
    if (!session.is_joined && kind == MessageKind::AgentHello) {
        const Result<AgentHello> hello = decode_agent_hello(std::move(frame));
        if (!hello) return hello.error();
        agents_.join(session, *hello);
        peer.is_reported = true;
        handler_->on_agent_joined(peer.id, *hello);
        return {};
    }
    if (session.is_joined && (kind == MessageKind::FromAgent || kind == MessageKind::EitherWay)) {
        const Result<FromAgent> message = decode_from_agent(std::move(frame));
        if (!message) return message.error();
        handler_->on_agent_message(peer.id, *message);
        return {};
    }
    const char* const when = session.is_joined ? "from an agent" : "before AgentHello";
    return Error::protocol(fmt::format("{} {}", message_name(type), when));
}

// ---- sent messages

void Server::answer(StoreAnswer answer) {
    Peer* const peer = peers_.find(answer.client.connection);
    if (peer == nullptr) return;
    if (peer->session != nullptr) return AgentSessions::answer(*peer->session, std::move(answer));
    peer->connection->send(encode_message(std::move(answer.reply), answer.request));
}

bool Server::send(AgentId agent, ToAgent message) {
    AgentSession* const session = agents_.joined(agent);
    if (session == nullptr) return false;
    session->connection->send(encode_message(std::move(message)));
    return session->connection->takes_messages();
}

void Server::broadcast(ToAgent message) {
    if (const Status sent = agents_.broadcast(std::move(message)); !sent)
        handler_->on_log(sent.error().with("broadcast").what);
}

void Server::refuse_agent(AgentId agent, const Error& why) {
    if (agents_.joined(agent) != nullptr) peers_.refuse(*peers_.find(agent), 0, why);
}

void Server::begin_generation(std::uint64_t generation) {
    torch_.end_generation();
    store_.begin_generation(generation);
}

// ---- the end of a peer

bool Server::waits_for_redial(Peer& peer, const Error& why) {
    agents_.look_soon_whether_written();  // its unacknowledged bytes may count no more
    return peer.session != nullptr && agents_.waits_for_redial(*peer.session, why);
}

void Server::on_gone(Peer& peer, const Error& why) {
    if (peer.session != nullptr) agents_.end(*std::exchange(peer.session, nullptr));
    store_.disconnect_all(peer.id);
    torch_.left(peer.id);
    if (peer.is_reported) handler_->on_agent_lost(peer.id, why);
}

// ---- the clients of PyTorch's TCPStore

void TorchClients::admit(ClientId id, Connection& connection) {
    connection.limit_output(limits_.output_bytes);
    clients_.emplace(id, Client{connection, TorchParser(limits_)});
}

void TorchClients::hear(ClientId id, std::string_view bytes) {
    auto& [connection, parser] = clients_.at(id);
    parser.feed(bytes);
    while (connection.is_open()) {
        Result<std::optional<TorchRequest>> request = parser.next();
        if (!request) return connection.fail(request.error());
        if (!*request) return;
        TorchStore::Outcome outcome = store_.apply(id, **std::move(request));
        for (TorchStore::Answer& answer : outcome.answers) {
            const auto to = clients_.find(answer.client);
            if (to != clients_.end()) to->second.connection.send(EncodedMessage{std::move(answer.bytes), {}});
        }
        if (outcome.refused) connection.fail(*outcome.refused);
    }
}

void TorchClients::left(ClientId id) {
    if (clients_.erase(id) > 0) store_.disconnect(id);
}

std::size_t TorchClients::most_silent() const {
    const auto is_old = [](const auto& client) { return client.second.parser.is_ungreeted(); };
    return 2 * static_cast<std::size_t>(std::ranges::count_if(clients_, is_old));
}

void TorchClients::end_generation() {
    store_.clear();
    for (const auto& [id, client] : clients_)
        client.connection.fail({Errc::StaleGeneration, "its generation is over", 0});
}

}  // namespace ddprun::rdzv
