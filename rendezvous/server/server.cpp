#include "rendezvous/server/server.h"

#include <fmt/core.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "env/hmac.h"
#include "env/text.h"
#include "rendezvous/server/admission.h"

namespace ddprun::rdzv {
namespace {

Failure failure_of(const Error& error) { return {error.code, error.what}; }

Arrival arrival_of(const Connection& connection, char first_byte) {
    return {connection.remote_host(), connection.local_host(), first_byte, connection.is_sealed()};
}

}  // namespace

/// One accepted connection, from the first byte to the last.
struct Server::Peer {
    enum class Stage { Handshake, Serving, Torch, Leaving };

    ClientId id;
    std::unique_ptr<Connection> connection;
    ServerHandshake handshake;
    Stage stage = Stage::Handshake;
    os::EventLoop::TimerId handshake_timer = 0;
    AgentSession* session = nullptr;  ///< an agent's

    [[nodiscard]] bool is_joined_agent() const { return session != nullptr && session->is_joined; }
};

Server::Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler)
    : loop_(loop),
      options_(std::move(options)),
      handler_(handler),
      acceptor_(loop, *this),
      store_({loop, [this](StoreAnswer one) { answer(std::move(one)); },
              [this](const std::string& line) { handler_.on_log(line); }},
             options_.store_limits),
      torch_(options_.torch_limits),
      agents_(loop, {options_.heartbeats, options_.limits.output_bytes}),
      strangers_(options_.limits.strangers) {}

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
            store_.serve_local(std::move(options_.local_listener), options_.credentials, options_.limits);
        if (!served) return served;
    }
    if (options_.listener) {
        const Result<Endpoint> bound = local_endpoint(options_.listener.get());
        if (!bound) return bound.error();
        bound_ = {"", bound->port};
        return acceptor_.listen(std::move(options_.listener));
    }
    Result<Listener> listener = listen_tcp(options_.where);
    if (!listener) return listener.error();
    bound_ = std::move(listener->bound);
    return acceptor_.listen(std::move(listener->fd));
}

Status Server::listen_also(const Endpoint& where) {
    Result<Listener> listener = listen_tcp(where);
    return listener ? acceptor_.listen(std::move(listener->fd)) : Status(listener.error());
}

Server::~Server() {
    for (const auto& [id, peer] : peers_) loop_.cancel(peer->handshake_timer);
}

Server::Peer& Server::peer_of(const Connection& connection) { return *peers_.at(ids_.at(&connection)); }

std::string Server::describe(const Peer& peer) {
    const Hello& hello = peer.handshake.peer();
    if (hello.name.empty()) return peer.connection->peer();
    return fmt::format("{} '{}' ({})", role_name(hello.role), hello.name, peer.connection->peer());
}

// ---- arrivals

void Server::on_accept_failed(int error) {
    if (std::exchange(last_accept_error_, error) == error) return;
    handler_.on_log(fmt::format("cannot accept connections: {}; trying again", ::strerror(error)));
}

void Server::on_accepted(UniqueFd fd) {
    last_accept_error_ = 0;
    if (!make_room()) {
        return turn_away(std::move(fd),
                         {Errc::Limit, fmt::format("there are {} connections", peers_.size()), 0});
    }
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return handler_.on_log(nonce.error().with("refusing a connection").what);
    Connection::Options options{peer_name(fd.get()), kStrangerLimits, options_.limits.output_bytes, nullptr,
                                options_.tls};
    Result<std::unique_ptr<Connection>> connection =
        Connection::adopt(loop_, std::move(fd), std::move(options), *this);
    if (!connection) return handler_.on_log(connection.error().what);
    const ClientId id = next_client_++;
    auto peer = std::make_unique<Peer>(
        Peer{id, *std::move(connection), ServerHandshake(options_.credentials, *std::move(nonce))});
    peer->handshake_timer = loop_.call_after(options_.limits.handshake, [this, raw = peer.get()] {
        const std::string span = format_duration(options_.limits.handshake);
        refuse(*raw, 0, {Errc::Timeout, fmt::format("no handshake within {}", span), 0});
    });
    ids_.emplace(peer->connection.get(), id);
    strangers_.arrived(id, loop_.now());
    peers_.emplace(id, std::move(peer));
}

/// Who knows the token keeps others out, who has not proved it does not. False: there is no room to be made.
bool Server::make_room() {
    if (!strangers_.is_crowded() && peers_.size() < options_.limits.connections) return true;
    return evict_stranger();
}

/// False: there is none.
bool Server::evict_stranger() {
    const std::optional<ClientId> id = strangers_.next_to_go();
    if (!id) return false;
    Peer& peer = *peers_.at(*id);
    const Error why{Errc::Limit,
                    fmt::format("{} connections wait for their handshake", strangers_.in_handshake()), 0};
    strangers_.left(*id);
    if (std::exchange(peer.stage, Peer::Stage::Leaving) == Peer::Stage::Leaving) {  // and has been told why
        peer.connection->fail(why);
        return true;
    }
    handler_.on_log(fmt::format("closing {}: {}", describe(peer), why.what));
    peer.connection->dismiss(failure_of(why), why);
    return true;
}

/// Nothing is kept of it but one word, as far as the kernel takes it.
void Server::turn_away(UniqueFd fd, const Error& why) {
    handler_.on_log(fmt::format("refusing {}: {}", peer_name(fd.get()), why.what));
    if (options_.tls) return;  // which it may expect, or not
    if (const Result<EncodedMessage> message = encode_message(failure_of(why), 0)) {
        static_cast<void>(
            ::send(fd.get(), message->head.data(), message->head.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
    }
}

void Server::stranger_left(ClientId id) {
    if (strangers_.left(id)) acceptor_.room_was_made();
}

// ---- how they speak, and who they are

bool Server::on_first_byte(Connection& connection, char byte) {
    Peer& peer = peer_of(connection);
    if (peer.stage != Peer::Stage::Handshake) return false;
    const Arrival arrival = arrival_of(connection, byte);
    if (!may_be_torch(byte)) {
        if (const Status admitted = admits_speech(arrival, options_.tls != nullptr); !admitted)
            refuse(peer, 0, admitted.error());
        return false;
    }
    const TorchDoor door{options_.serves_torch, store().generation(), torch_.size(),
                         options_.torch_limits.clients, agents_.node_addresses()};
    if (const Status admitted = admits_torch(arrival, door); !admitted) {
        connection.fail(admitted.error().with("a client of PyTorch's TCPStore"));
        return true;
    }
    peer.stage = Peer::Stage::Torch;
    torch_.admit(peer.id, connection);
    stranger_left(peer.id);
    loop_.cancel(std::exchange(peer.handshake_timer, 0));
    return true;
}

void Server::on_bytes(Connection& connection, std::string_view bytes) {
    torch_.hear(ids_.at(&connection), bytes);
}

void Server::on_frame(Connection& connection, Frame frame) {
    Peer& peer = peer_of(connection);
    if (peer.stage == Peer::Stage::Leaving) return;
    const std::uint32_t request = frame.request;
    const Status kept = peer.stage == Peer::Stage::Handshake ? shake_hands(peer, std::move(frame))
                                                             : serve(peer, std::move(frame));
    if (!kept) refuse(peer, request, kept.error());
}

/// Error, as of those below: it broke the rules, and is to be refused.
Status Server::shake_hands(Peer& peer, Frame frame) {
    strangers_.spoke(peer.id, loop_.now());
    const std::uint32_t request = frame.request;
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    peer.handshake.bind_to(peer.connection->tls_binding());
    AgentSession* const session = agents_.find(peer.handshake.peer());
    if (session != nullptr)
        peer.handshake.session_is_here(AgentSessions::counts(*session, peer.handshake.peer()));
    Result<HandshakeMessage> answer = peer.handshake.receive(*message);
    if (!answer) {
        handler_.on_log(fmt::format("refusing {}: {}", describe(peer), answer.error().what));
        peer.stage = Peer::Stage::Leaving;
        strangers_.refused(peer.id);
        peer.connection->refuse(peer.handshake.refusal(), answer.error(), options_.limits.goodbye);
        return {};
    }
    peer.connection->send(encode_message(*std::move(answer), request));
    if (!peer.handshake.authenticated()) return {};
    welcome(peer);
    return session != nullptr ? go_on(peer, *session) : Status();
}

void Server::welcome(Peer& peer) {
    peer.stage = Peer::Stage::Serving;
    stranger_left(peer.id);
    loop_.cancel(std::exchange(peer.handshake_timer, 0));
    peer.connection->set_limits(kPeerLimits);
    const Hello& hello = peer.handshake.peer();
    if (hello.role == Role::Agent && hello.session.empty())
        peer.session = &agents_.begin(peer.id, hello.nonce, *peer.connection);
}

/// The newcomer's connection becomes that of the session's peer; the one before is closed.
Status Server::go_on(Peer& newcomer, AgentSession& session) {
    const Duration silent_for = loop_.now() - session.connection->last_heard();
    if (Status known = agents_.go_on(session, newcomer.handshake.peer(), *newcomer.connection); !known)
        return known;
    Peer& peer = *peers_.at(session.id);
    ids_.erase(peer.connection.get());
    peer.connection = std::move(newcomer.connection);
    ids_.at(peer.connection.get()) = peer.id;
    peers_.erase(newcomer.id);
    handler_.on_detail(fmt::format("another connection of {}, nothing was heard for {}", describe(peer),
                                   format_duration(silent_for)));
    return {};
}

// ---- what they say

Status Server::serve(Peer& peer, Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Heartbeat) return serve_heartbeat(peer, std::move(frame));
    if (peer.session != nullptr) AgentSessions::count(*peer.session, frame);
    if (kind == MessageKind::StoreRequest) return serve_store(peer, std::move(frame));
    if (kind == MessageKind::ClientGone) return forget_client(peer, std::move(frame));
    if (kind == MessageKind::Unknown) {
        const Failure failure{Errc::NotFound, fmt::format("message type {} is not known here", type)};
        peer.connection->send(encode_message(failure, frame.request));
        return {};
    }
    if (kind == MessageKind::JobMoved && peer.handshake.peer().role == Role::Tool)
        return hear_of_move(std::move(frame));
    if (peer.session != nullptr) return serve_agent(peer, std::move(frame));
    return Error{Errc::Protocol,
                 fmt::format("{} from a {}", message_name(type), role_name(peer.handshake.peer().role)), 0};
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
        return Error{Errc::Protocol, "'client' in a request of no agent", 0};
    store_.ask({peer.id, request->client}, number, *std::move(request));
    return {};
}

Status Server::forget_client(Peer& peer, Frame frame) {
    const Result<ClientGone> gone = decode_client_gone(std::move(frame));
    if (!gone) return gone.error();
    if (peer.session == nullptr) return Error{Errc::Protocol, "ClientGone from no agent", 0};
    store_.disconnect({peer.id, gone->client});
    peer.session->held.forget(gone->client);
    return {};
}

Status Server::hear_of_move(Frame frame) {
    const Result<JobMoved> moved = decode_job_moved(std::move(frame));
    if (!moved) return moved.error();
    handler_.on_job_moved(*moved);
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
        handler_.on_agent_joined(peer.id, *hello);
        return {};
    }
    if (session.is_joined && (kind == MessageKind::FromAgent || kind == MessageKind::EitherWay)) {
        const Result<FromAgent> message = decode_from_agent(std::move(frame));
        if (!message) return message.error();
        handler_.on_agent_message(peer.id, *message);
        return {};
    }
    const char* const when = session.is_joined ? "from an agent" : "before AgentHello";
    return Error{Errc::Protocol, fmt::format("{} {}", message_name(type), when), 0};
}

// ---- what they are told

void Server::answer(StoreAnswer answer) {
    const auto found = peers_.find(answer.client.connection);
    if (found == peers_.end()) return;
    Peer& peer = *found->second;
    if (peer.session != nullptr) return AgentSessions::answer(*peer.session, std::move(answer));
    peer.connection->send(encode_message(std::move(answer.reply), answer.request));
}

bool Server::send(AgentId agent, ToAgent message) {
    AgentSession* const session = agents_.joined(agent);
    if (session == nullptr) return false;
    session->connection->send(encode_message(std::move(message)));
    return session->connection->takes_messages();
}

void Server::broadcast(ToAgent message) {
    if (const Status sent = agents_.broadcast(std::move(message)); !sent)
        handler_.on_log(sent.error().with("broadcast").what);
}

void Server::refuse_agent(AgentId agent, const Error& why) {
    if (agents_.joined(agent) != nullptr) refuse(*peers_.at(agent), 0, why);
}

void Server::begin_generation(std::uint64_t generation) {
    torch_.end_generation();
    store_.begin_generation(generation);
}

// ---- their end

/// The last word to a peer that broke the rules; it is logged once, here.
void Server::refuse(Peer& peer, std::uint32_t request, const Error& why) {
    if (peer.stage == Peer::Stage::Leaving) return;
    if (!peer.is_joined_agent()) handler_.on_log(fmt::format("closing {}: {}", describe(peer), why.what));
    strangers_.refused(peer.id);
    peer.stage = Peer::Stage::Leaving;
    if (peer.session != nullptr) peer.session->is_leaving = true;
    if (request != 0) peer.connection->send(encode_message(failure_of(why), request));
    peer.connection->refuse(failure_of(why), why, options_.limits.goodbye);
}

void Server::on_closed(Connection& connection, const Error& why) {
    agents_.look_soon_whether_written();  // what it had not taken is waited for no more
    const auto known = ids_.find(&connection);
    const auto entry = peers_.find(known->second);
    if (AgentSession* const session = entry->second->session;
        session != nullptr && agents_.waits_for_redial(*session, why))
        return;
    // Taken out before the handler hears of it: from here on the peer does not exist for anybody.
    const std::unique_ptr<Peer> peer = std::move(entry->second);
    const bool was_joined = peer->is_joined_agent();
    peers_.erase(entry);
    ids_.erase(known);
    loop_.cancel(peer->handshake_timer);
    if (peer->session != nullptr) agents_.end(*std::exchange(peer->session, nullptr));
    store_.disconnect_all(peer->id);
    torch_.left(peer->id);
    stranger_left(peer->id);
    if (was_joined) return handler_.on_agent_lost(peer->id, why);
    // A worker or tool that closes its connection has simply finished.
    // Nor is one that an agent does not need, for another was faster: it may go before it has said a word.
    const std::string& named = peer->handshake.peer().job_id;
    const bool is_spare = why.code == Errc::Closed && (named.empty() || named == options_.credentials.job_id);
    const bool is_news =
        (peer->stage == Peer::Stage::Handshake && !is_spare) ||
        (peer->stage == Peer::Stage::Serving && why.code != Errc::Closed) ||
        (peer->stage == Peer::Stage::Torch && why.code != Errc::Closed && why.code != Errc::StaleGeneration);
    if (is_news) handler_.on_log(fmt::format("closed {}: {}", describe(*peer), why.what));
}

}  // namespace ddprun::rdzv
