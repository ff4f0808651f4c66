#include "rendezvous/server.h"

#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "env/hmac.h"
#include "env/text.h"

namespace ddprun::rdzv {
namespace {

/// So many per event; the handshakes of those accepted get their turn in between.
constexpr int kAcceptsPerEvent = 64;
/// How long nothing is accepted after the process ran out of descriptors.
constexpr Duration kAcceptPause = std::chrono::milliseconds(200);

bool is_loopback_host(const std::string& host) { return host == "::1" || host.starts_with("127."); }

/// What it says does not leave this host.
bool is_of_this_host(const Connection& connection) {
    const std::string host = connection.remote_host();
    return is_loopback_host(host) || host == connection.local_host();
}

Failure failure_of(const Error& error) { return {error.code, error.what}; }

/// The controller's own, and that of this host's workers.
constexpr ClientId kOwn = 0;

/// The answers to an agent's workers that wait for room in its session.
class HeldAnswers {
  public:
    [[nodiscard]] bool empty() const { return answers_.empty(); }
    /// What waits for one client has a limit: beyond it the client is told so instead.
    void push(StoreAnswer answer, std::size_t most) {
        const auto* const value = std::get_if<Value>(&answer.reply);
        const auto* const exchanged = std::get_if<Exchanged>(&answer.reply);
        const std::size_t bytes = value != nullptr ? value->value.size() : exchanged != nullptr ? exchanged->value.size() : 0;
        std::size_t& all = bytes_[answer.client.number];
        const bool fits = all + bytes <= most;
        if (!fits) answer.reply = Failure{Errc::Limit, fmt::format("{} of answers to this client have not been taken yet", format_bytes(all))};
        all += fits ? bytes : 0;
        answers_.push_back({std::move(answer), fits ? bytes : 0});
    }
    StoreAnswer pop() {
        Held first = std::move(answers_.front());
        answers_.pop_front();
        const auto sum = bytes_.find(first.answer.client.number);
        sum->second -= first.bytes;
        if (answers_.empty()) bytes_.clear();
        return std::move(first.answer);
    }
    void forget(std::uint64_t client) {
        std::erase_if(answers_, [&](const Held& held) { return held.answer.client.number == client; });
        bytes_.erase(client);
    }

  private:
    struct Held {
        StoreAnswer answer;
        std::size_t bytes;
    };
    std::deque<Held> answers_;
    std::unordered_map<std::uint64_t, std::size_t> bytes_;  ///< by client
};

Result<Endpoint> bound_address(int fd) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
        return Error::system("getsockname");
    if (address.ss_family == AF_INET)
        return Endpoint{"", ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port)};
    return Endpoint{"", ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port)};
}

/// accept(2): it was gone before we came to it, or its network is; the next one may do.
bool is_of_that_connection(int error) {
    switch (error) {
        case ECONNABORTED: case EINTR: case EPROTO: case ENOPROTOOPT: case ENETDOWN: case EHOSTDOWN: case ENONET:
        case EHOSTUNREACH: case ENETUNREACH: case EOPNOTSUPP: return true;
        default: return false;
    }
}

}  // namespace

/// One accepted connection, from the first byte to the last.
struct Server::Peer {
    enum class Stage { Handshake, Serving, Torch, Leaving };

    ClientId id;
    std::unique_ptr<Connection> connection;
    ServerHandshake handshake;
    Stage stage = Stage::Handshake;
    bool joined = false;  ///< an agent whose AgentHello the controller has
    os::EventLoop::TimerId handshake_timer = 0;
    std::unique_ptr<TorchParser> torch = nullptr;  ///< of a TCPStore client
    std::string session = {};                ///< an agent's
    Inbox inbox = {};                        ///< of the session
    HeldAnswers held = {};                   ///< likewise
    os::EventLoop::TimerId outage_timer = 0; ///< its connection is lost, and when this ends the session is
};

Server::Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler)
    : loop_(loop), options_(std::move(options)), handler_(handler), store_(options_.store_limits), torch_store_(options_.torch_limits),
      strangers_(options_.limits.strangers), silence_(options_.heartbeats, loop.now()) {}

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
        Result<std::unique_ptr<LocalClients>> local =
            LocalClients::serve(loop_, std::move(options_.local_listener), options_.credentials, options_.limits, *this);
        if (!local) return local.error();
        local_ = *std::move(local);
    }
    if (options_.listener) {
        Result<Endpoint> bound = bound_address(options_.listener.get());
        if (!bound) return bound.error();
        bound_ = *std::move(bound);
        return accept_from(std::move(options_.listener));
    }
    Result<Listener> listener = listen_tcp(options_.where);
    if (!listener) return listener.error();
    bound_ = std::move(listener->bound);
    return accept_from(std::move(listener->fd));
}

Status Server::listen_also(const Endpoint& where) {
    Result<Listener> listener = listen_tcp(where);
    return listener ? accept_from(std::move(listener->fd)) : Status(listener.error());
}

Status Server::accept_from(UniqueFd listener) {
    const int fd = listener.get();
    if (const Status watched = loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { accept_some(fd); }); !watched) return watched;
    listeners_.push_back(std::move(listener));
    return {};
}

Server::~Server() {
    for (const os::EventLoop::TimerId timer : {expiry_timer_, heartbeat_timer_, silence_timer_, accept_timer_})
        loop_.cancel(timer);
    for (const auto& [id, peer] : peers_) {
        for (const os::EventLoop::TimerId timer : {peer->handshake_timer, peer->outage_timer}) loop_.cancel(timer);
    }
    for (const auto& [key, end] : writing_ends_) loop_.cancel(end.timer);
    for (const UniqueFd& listener : listeners_) loop_.unwatch(listener.get());
}

std::string Server::describe(const Peer& peer) const {
    const Hello& hello = peer.handshake.peer();
    if (hello.name.empty()) return peer.connection->peer();
    return fmt::format("{} '{}' ({})", role_name(hello.role), hello.name, peer.connection->peer());
}

// ---- arrivals

void Server::accept_some(int listener) {
    for (int i = 0; i < kAcceptsPerEvent; ++i) {
        if (!accept_one(listener)) return;
    }
}

bool Server::accept_one(int listener) {
    if (const TimePoint room_at = strangers_.room_at(); room_at > loop_.now()) {
        stop_accepting(room_at);
        waits_for_room_ = true;
        return false;
    }
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
        admit(std::move(fd));
        return true;
    }
    const int error = errno;
    if (error == EAGAIN || error == EWOULDBLOCK) return false;
    if (is_of_that_connection(error)) return true;
    const bool is_full = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
    if (is_full && evict_stranger()) return true;
    pause_accepting(error);
    return false;
}

/// A listener that cannot be served stays readable: without the pause the loop would spin.
void Server::pause_accepting(int error) {
    handler_.on_log(fmt::format("cannot accept connections: {}; trying again", ::strerror(error)));
    stop_accepting(loop_.now() + kAcceptPause);
}

void Server::stop_accepting(TimePoint until) {
    for (const UniqueFd& listener : listeners_) loop_.change(listener.get(), 0);
    accept_timer_ = loop_.call_at(until, [this] { accept_again(); });
}

void Server::accept_again() {
    loop_.cancel(std::exchange(accept_timer_, 0));
    waits_for_room_ = false;
    for (const UniqueFd& listener : listeners_) loop_.change(listener.get(), EPOLLIN);
}

void Server::stranger_left(ClientId id) {
    if (strangers_.left(id) && waits_for_room_) accept_again();
}

void Server::admit(UniqueFd fd) {
    if (!make_room()) {
        return turn_away(std::move(fd), {Errc::Limit, fmt::format("there are {} connections", peers_.size()), 0});
    }
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return handler_.on_log(nonce.error().with("refusing a connection").what);
    Connection::Options options{peer_name(fd.get()), kStrangerLimits, options_.limits.output_bytes, nullptr, options_.tls};
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
    const Error why{Errc::Limit, fmt::format("{} connections wait for their handshake", strangers_.in_handshake()), 0};
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
        static_cast<void>(::send(fd.get(), message->head.data(), message->head.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
    }
}

// ---- messages

void Server::on_frame(Connection& connection, Frame frame) {
    Peer& peer = *peers_.at(ids_.at(&connection));
    if (peer.stage == Peer::Stage::Leaving) return;
    const std::uint32_t request = frame.request;
    const Status kept =
        peer.stage == Peer::Stage::Handshake ? shake_hands(peer, std::move(frame)) : serve(peer, std::move(frame));
    if (!kept) refuse(peer, request, kept.error());
}

/// Error, as of those below: it broke the rules, and is to be refused.
Status Server::shake_hands(Peer& peer, Frame frame) {
    strangers_.spoke(peer.id, loop_.now());
    const std::uint32_t request = frame.request;
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    peer.handshake.bind_to(peer.connection->tls_binding());
    Peer* const session = session_of(peer.handshake.peer());
    if (session != nullptr) {
        const std::uint64_t begins = std::max(session->connection->acknowledged(), peer.handshake.peer().received);
        peer.handshake.session_is_here({session->inbox.received(), begins});
    }
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
    if (hello.role != Role::Agent || !hello.session.empty()) return;
    peer.session = hello.nonce;
    peer.connection->keep_messages();
    sessions_.emplace(peer.session, peer.id);
}

/// The session that a Hello wants to go on with; null: it is over, or there never was one.
Server::Peer* Server::session_of(const Hello& hello) {
    const auto found = sessions_.find(hello.session);
    if (found == sessions_.end() || hello.role != Role::Agent) return nullptr;
    Peer& peer = *peers_.at(found->second);
    return peer.stage == Peer::Stage::Serving && peer.connection->takes_messages() ? &peer : nullptr;
}

/// The newcomer's connection carries the session from here on; the one before is closed, with what was still unread of it:
/// the agent says that again.
Status Server::go_on(Peer& newcomer, Peer& session) {
    const std::uint64_t received = newcomer.handshake.peer().received;
    if (received > session.connection->acknowledged()) {
        if (Status known = session.connection->acknowledge(received); !known) return known;
    }
    newcomer.connection->go_on_from(*session.connection);
    const Duration silent_for = loop_.now() - session.connection->last_heard();
    ids_.erase(session.connection.get());
    session.connection = std::move(newcomer.connection);
    ids_.at(session.connection.get()) = session.id;
    loop_.cancel(std::exchange(session.outage_timer, 0));
    peers_.erase(newcomer.id);
    handler_.on_detail(fmt::format("another connection of {}, nothing was heard for {}", describe(session), format_duration(silent_for)));
    return {};
}

Status Server::serve(Peer& peer, Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Heartbeat) {
        const Result<Heartbeat> heartbeat = decode_heartbeat(std::move(frame));
        if (!heartbeat) return heartbeat.error();
        if (peer.session.empty()) return {};
        on_written(*peer.connection);
        const Status known = peer.connection->acknowledge(heartbeat->received);
        if (known) say_held(peer);
        return known;
    }
    if (!peer.session.empty()) {
        (void)peer.inbox.take(frame.json.size() + frame.blob.size());
        if (peer.inbox.owes_a_word()) peer.connection->beat(peer.inbox.word());
    }
    if (kind == MessageKind::StoreRequest) return serve_store(peer, std::move(frame));
    if (kind == MessageKind::ClientGone) return forget_client(peer, std::move(frame));
    if (kind == MessageKind::Unknown) {
        const Failure failure{Errc::NotFound, fmt::format("message type {} is not known here", type)};
        peer.connection->send(encode_message(failure, frame.request));
        return {};
    }
    const Role role = peer.handshake.peer().role;
    if (role == Role::Agent) return serve_agent(peer, std::move(frame));
    return Error{Errc::Protocol, fmt::format("{} from a {}", message_name(type), role_name(role)), 0};
}

Status Server::serve_agent(Peer& peer, Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (!peer.joined && kind == MessageKind::AgentHello) {
        const Result<AgentHello> hello = decode_agent_hello(std::move(frame));
        if (!hello) return hello.error();
        peer.joined = true;
        ++joined_agents_;
        node_addresses_.insert(peer.connection->remote_host());
        node_addresses_.insert(hello->addresses.begin(), hello->addresses.end());
        if (heartbeat_timer_ == 0) beat();
        if (silence_timer_ == 0) look_for_silence();
        handler_.on_agent_joined(peer.id, *hello);
        return {};
    }
    if (peer.joined && (kind == MessageKind::FromAgent || kind == MessageKind::EitherWay)) {
        const Result<FromAgent> message = decode_from_agent(std::move(frame));
        if (!message) return message.error();
        handler_.on_agent_message(peer.id, *message);
        return {};
    }
    const char* const when = peer.joined ? "from an agent" : "before AgentHello";
    return Error{Errc::Protocol, fmt::format("{} {}", message_name(type), when), 0};
}

/// The last word to a peer that broke the rules; it is logged once, here.
void Server::refuse(Peer& peer, std::uint32_t request, const Error& why) {
    if (peer.stage == Peer::Stage::Leaving) return;
    if (!peer.joined) handler_.on_log(fmt::format("closing {}: {}", describe(peer), why.what));
    strangers_.refused(peer.id);
    peer.stage = Peer::Stage::Leaving;
    if (request != 0) peer.connection->send(encode_message(failure_of(why), request));
    peer.connection->refuse(failure_of(why), why, options_.limits.goodbye);
}

void Server::on_written(Connection&) {
    if (writing_ends_.empty() || is_looking_) return;
    is_looking_ = true;  // once for all that the same batch writes
    loop_.post([this, alive = std::weak_ptr<bool>(alive_)] {
        if (alive.expired()) return;
        is_looking_ = false;
        look_whether_written();
    });
}

void Server::when_written(Duration patience, os::EventLoop::Handler handler) {
    const std::uint64_t key = ++last_writing_end_;
    const auto timer = loop_.call_after(patience, [this, key] { release(key); });
    writing_ends_.emplace(key, WritingEnd{std::move(handler), timer});
    look_whether_written();
}

void Server::look_whether_written() {
    if (queued_bytes() != 0) return;
    while (!writing_ends_.empty()) release(writing_ends_.begin()->first);
}

void Server::release(std::uint64_t key) {
    auto end = writing_ends_.extract(key);
    loop_.cancel(end.mapped().timer);
    loop_.post(std::move(end.mapped().handler));
}

void Server::on_closed(Connection& connection, const Error& why) {
    on_written(connection);  // what it had not taken is waited for no more
    const auto known = ids_.find(&connection);
    const auto entry = peers_.find(known->second);
    if (waits_for_redial(*entry->second, why)) return;
    // Taken out before the handler hears of it: from here on the peer does not exist for anybody.
    const std::unique_ptr<Peer> peer = std::move(entry->second);
    peers_.erase(entry);
    ids_.erase(known);
    loop_.cancel(peer->handshake_timer);
    loop_.cancel(peer->outage_timer);
    sessions_.erase(peer->session);
    store_.disconnect_all(peer->id);
    stranger_left(peer->id);
    if (peer->torch) {
        torch_store_.disconnect(peer->id);
        --torch_clients_;
    }
    if (peer->joined) {
        --joined_agents_;
        return handler_.on_agent_lost(peer->id, why);
    }
    // A worker or tool that closes its connection has simply finished.
    // Nor is one that an agent does not need, for another was faster.
    const bool is_spare = peer->handshake.peer().job_id == options_.credentials.job_id && why.code == Errc::Closed;
    const bool is_news = (peer->stage == Peer::Stage::Handshake && !is_spare) ||
                         (peer->stage == Peer::Stage::Serving && why.code != Errc::Closed) ||
                         (peer->stage == Peer::Stage::Torch && why.code != Errc::Closed && why.code != Errc::StaleGeneration);
    if (is_news) handler_.on_log(fmt::format("closed {}: {}", describe(*peer), why.what));
}

/// A session whose connection is lost is not: another one may come in time.
bool Server::waits_for_redial(Peer& peer, const Error& why) {
    if (!peer.connection->keeps_messages() || peer.stage == Peer::Stage::Leaving) return false;
    const Duration wait = wait_for_redial(outage_of(why), options_.heartbeats);
    peer.outage_timer = loop_.call_after(wait, [raw = peer.connection.get()] { raw->give_up(); });
    return true;
}

// ---- store

Status Server::serve_store(Peer& peer, Frame frame) {
    const std::uint32_t number = frame.request;
    Result<StoreRequest> request = decode_store_request(std::move(frame));
    if (!request) return request.error();
    if (request->client != 0 && peer.session.empty()) return Error{Errc::Protocol, "'client' in a request of no agent", 0};
    ask({peer.id, request->client}, number, *std::move(request));
    return {};
}

Status Server::forget_client(Peer& peer, Frame frame) {
    const Result<ClientGone> gone = decode_client_gone(std::move(frame));
    if (!gone) return gone.error();
    if (peer.session.empty()) return Error{Errc::Protocol, "ClientGone from no agent", 0};
    store_.disconnect({peer.id, gone->client});
    peer.held.forget(gone->client);
    return {};
}

void Server::on_local_request(std::uint64_t client, std::uint32_t number, StoreRequest request) { ask({kOwn, client}, number, std::move(request)); }

void Server::on_local_gone(std::uint64_t client) { store_.disconnect({kOwn, client}); }

void Server::ask(StoreClientId client, std::uint32_t number, StoreRequest request) {
    deliver(store_.apply(client, number, std::move(request), loop_.now()));
    arm_expiry();
}

void Server::deliver(StoreAnswers answers) {
    for (StoreAnswer& answer : answers) {
        if (answer.client.connection == kOwn) {
            if (local_) local_->answer(answer.client.number, answer.request, std::move(answer.reply));
            continue;
        }
        const auto found = peers_.find(answer.client.connection);
        if (found == peers_.end()) continue;
        Peer& peer = *found->second;
        const bool waits = answer.client.number != 0 && (!peer.held.empty() || peer.connection->kept_bytes() >= kRelayWindow);
        if (waits) peer.held.push(std::move(answer), options_.limits.output_bytes);
        else peer.connection->send(encode_message(std::move(answer.reply), answer.request));
    }
}

void Server::say_held(Peer& peer) {
    while (!peer.held.empty() && peer.connection->kept_bytes() < kRelayWindow) {
        StoreAnswer answer = peer.held.pop();
        peer.connection->send(encode_message(std::move(answer.reply), answer.request));
    }
}

/// Keeps a timer for the earliest waiter. A timer that is too early costs one wake-up; moving it at every
/// request would cost more.
void Server::arm_expiry() {
    const TimePoint next = store_.next_deadline();
    if (next >= expiry_at_) return;
    loop_.cancel(expiry_timer_);
    expiry_at_ = next;
    expiry_timer_ = loop_.call_at(next, [this] {
        expiry_at_ = kNever;
        deliver(store_.expire(loop_.now()));
        arm_expiry();
    });
}

void Server::begin_generation(std::uint64_t generation) {
    end_torch_clients();
    deliver(store_.begin_generation(generation));
}

StoreReply Server::ask_store(StoreOp op) {
    StoreRequest request{store_.generation(), Duration::zero(), std::move(op)};
    StoreAnswers answers = store_.apply(kOwn, 0, std::move(request), loop_.now());
    for (StoreAnswer& late : store_.expire(loop_.now())) answers.push_back(std::move(late));
    StoreReply own = Failure{Errc::Timeout, "the store did not answer"};
    const auto mine = std::find_if(answers.begin(), answers.end(),
                                   [](const StoreAnswer& a) { return a.client == StoreClientId(kOwn); });
    if (mine != answers.end()) own = mine->reply;
    deliver(std::move(answers));
    return own;
}

// ---- how they speak

bool Server::on_first_byte(Connection& connection, char byte) {
    Peer& peer = *peers_.at(ids_.at(&connection));
    if (peer.stage != Peer::Stage::Handshake) return false;
    if (!may_be_torch(byte)) {
        if (const Status admitted = admits_speech(connection, byte); !admitted) refuse(peer, 0, admitted.error());
        return false;
    }
    if (const Status admitted = admits_torch(connection); !admitted) {
        connection.fail(admitted.error().with("a client of PyTorch's TCPStore"));
        return true;
    }
    peer.stage = Peer::Stage::Torch;
    peer.torch = std::make_unique<TorchParser>(options_.torch_limits);
    connection.limit_output(options_.torch_limits.output_bytes);
    stranger_left(peer.id);
    loop_.cancel(std::exchange(peer.handshake_timer, 0));
    ++torch_clients_;
    return true;
}

Status Server::admits_speech(const Connection& connection, char first_byte) const {
    const auto differs = [](std::string_view how) {
        return Error{Errc::Refused, fmt::format("{}: give --tls to every node, or to none", how), 0};
    };
    if (!options_.tls && first_byte == kTlsFirstByte) return differs("this connection is TLS, and the job was started without --tls");
    const bool may_be_plain = !options_.tls || is_of_this_host(connection);
    if (!connection.is_sealed() && !may_be_plain) return differs("this connection is plain, and the job was started with --tls");
    return {};
}

// ---- PyTorch's clients

/// They prove nothing: where they come from has to do.
Status Server::admits_torch(const Connection& connection) const {
    if (!options_.serves_torch) return Error{Errc::Refused, "its store is not served here", 0};
    if (store_.generation() == 0) return Error{Errc::Refused, "no generation has begun", 0};
    if (torch_clients_ >= options_.torch_limits.clients) {
        return Error{Errc::Limit, fmt::format("there are {} of them", torch_clients_), 0};
    }
    const bool is_of_job = is_of_this_host(connection) || node_addresses_.contains(connection.remote_host());
    return is_of_job ? Status() : Error{Errc::Refused, "it comes from no node of the job", 0};
}

void Server::on_bytes(Connection& connection, std::string_view bytes) {
    Peer& peer = *peers_.at(ids_.at(&connection));
    peer.torch->feed(bytes);
    while (connection.is_open()) {
        Result<std::optional<TorchRequest>> request = peer.torch->next();
        if (!request) return connection.fail(request.error().with(connection.peer()));
        if (!*request) return;
        TorchStore::Outcome outcome = torch_store_.apply(peer.id, **std::move(request));
        for (TorchStore::Answer& answer : outcome.answers) {
            const auto to = peers_.find(answer.client);
            if (to != peers_.end()) to->second->connection->send(EncodedMessage{std::move(answer.bytes), {}});
        }
        if (outcome.refused) connection.fail(outcome.refused->with(connection.peer()));
    }
}

/// What a world has written is not for the next one, nor are its clients.
void Server::end_torch_clients() {
    torch_store_.clear();
    for (const auto& [id, peer] : peers_) {
        if (peer->torch) peer->connection->fail({Errc::StaleGeneration, "its generation is over", 0});
    }
}

// ---- agents

Server::Peer* Server::joined_agent(AgentId agent) {
    const auto found = peers_.find(agent);
    const bool is_here =
        found != peers_.end() && found->second->joined && found->second->stage == Peer::Stage::Serving;
    return is_here && found->second->connection->takes_messages() ? found->second.get() : nullptr;
}

bool Server::send(AgentId agent, ToAgent message) {
    Peer* const peer = joined_agent(agent);
    if (peer == nullptr) return false;
    peer->connection->send(encode_message(std::move(message)));
    return peer->connection->takes_messages();
}

void Server::broadcast(ToAgent message) { send_to_all(encode_message(std::move(message))); }

void Server::send_to_all(const Result<EncodedMessage>& message) {
    if (!message) return handler_.on_log(message.error().with("broadcast").what);
    for (const auto& [id, peer] : peers_) {
        if (joined_agent(id) != nullptr) peer->connection->send(message);
    }
}

void Server::refuse_agent(AgentId agent, const Error& why) {
    if (Peer* const peer = joined_agent(agent)) refuse(*peer, 0, why);
}

std::size_t Server::queued_bytes() const {
    std::size_t sum = 0;
    for (const auto& [id, peer] : peers_) {
        if (peer->joined) sum += peer->connection->kept_bytes();
    }
    return sum;
}

/// One timer for all agents: says that we live, and what has come.
void Server::beat() {
    heartbeat_timer_ = 0;
    if (joined_agents_ == 0) return;
    for (const auto& [id, peer] : peers_) {
        if (peer->joined) peer->connection->beat(peer->inbox.word());
    }
    heartbeat_timer_ = loop_.call_after(options_.heartbeats.interval, [this] { beat(); });
}

/// Another one, as exact as the limit is.
void Server::look_for_silence() {
    silence_timer_ = 0;
    if (joined_agents_ == 0) return;
    std::vector<Peer*> agents;
    for (const auto& [id, peer] : peers_) {
        if (joined_agent(id) != nullptr) agents.push_back(peer.get());
    }
    TimePoint heard = kNever;
    for (const Peer* agent : agents) heard = std::min(heard, agent->connection->last_heard());
    const SilenceWatch::Verdict verdict = silence_.look(loop_.now(), heard);
    for (Peer* agent : agents) {
        if (!verdict.are_lost || agent->connection->last_heard() + options_.heartbeats.timeout > loop_.now()) continue;
        agent->connection->fail({Errc::Timeout, fmt::format("no heartbeat for {}", format_duration(options_.heartbeats.timeout)), 0});
    }
    silence_timer_ = loop_.call_at(verdict.next, [this] { look_for_silence(); });
}

}  // namespace ddprun::rdzv
