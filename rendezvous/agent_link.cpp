#include "rendezvous/agent_link.h"

#include <fmt/core.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "env/hmac.h"
#include "env/text.h"

namespace ddprun::rdzv {
namespace {

constexpr Duration kFirstBackoff = std::chrono::milliseconds(20);
constexpr Duration kLongestBackoff = std::chrono::seconds(1);
/// For one address to answer; a name can have several, and the first may be a dead one.
constexpr Duration kAddressTimeout = std::chrono::seconds(5);

/// A connect to a free port of this host can meet itself; there is no controller on it then.
bool is_connected_to_itself(int fd) {
    sockaddr_storage local{};
    sockaddr_storage peer{};
    socklen_t local_length = sizeof local;
    socklen_t peer_length = sizeof peer;
    return ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_length) == 0 &&
           ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
           local_length == peer_length && std::memcmp(&local, &peer, local_length) == 0;
}

int connect_outcome(int fd) {
    int failure = 0;
    socklen_t length = sizeof failure;
    if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length) != 0) return errno;
    return failure == 0 && is_connected_to_itself(fd) ? ECONNREFUSED : failure;
}

bool is_order(const Message& message) {
    return std::holds_alternative<StartGeneration>(message) ||
           std::holds_alternative<StopGeneration>(message) || std::holds_alternative<Shutdown>(message) ||
           std::holds_alternative<Notice>(message) || std::holds_alternative<Question>(message) ||
           std::holds_alternative<Answer>(message);
}

}  // namespace

AgentLink::AgentLink(os::EventLoop& loop, AgentLinkOptions options, AgentLinkHandler& handler)
    : loop_(loop), options_(std::move(options)), handler_(handler), resolver_(loop), backoff_(kFirstBackoff) {
    attempt_timer_ = loop_.call_after(Duration::zero(), [this] { attempt(); });
    if (options_.connect_by == kNever) return;
    deadline_timer_ = loop_.call_at(options_.connect_by, [this] {
        end({Errc::Timeout,
             fmt::format("no controller at {}: {}", to_string(options_.controller),
                         last_cause_.empty() ? "no answer" : last_cause_),
             0});
    });
}

AgentLink::~AgentLink() {
    for (const os::EventLoop::TimerId timer : {attempt_timer_, deadline_timer_, heartbeat_timer_})
        loop_.cancel(timer);
    if (connecting_) loop_.unwatch(connecting_.get());
}

// ---- until there is a connection

void AgentLink::attempt() {
    resolver_.look_up(options_.controller, [this](Result<SocketAddresses> found) {
        if (!found) return try_later(found.error());
        addresses_ = *std::move(found);
        next_address_ = 0;
        connect_next();
    });
}

void AgentLink::connect_next() {
    drop_attempt();
    const SocketAddress& address = addresses_[next_address_++];
    connecting_ =
        UniqueFd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!connecting_) return try_later(Error::system("socket"));
    const int outcome =
        ::connect(connecting_.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length);
    if (outcome != 0 && errno != EINPROGRESS) return try_later(Error::system("connect"));
    const Status watched =
        loop_.watch(connecting_.get(), EPOLLOUT, [this](std::uint32_t) { on_connect_result(); });
    if (!watched) return try_later(watched.error());
    attempt_timer_ = loop_.call_after(kAddressTimeout, [this] {
        try_later({Errc::Timeout, "connect timed out", 0});
    });
}

void AgentLink::on_connect_result() {
    if (const int failure = connect_outcome(connecting_.get()))
        return try_later(Error::system("connect", failure));
    adopt();
}

void AgentLink::adopt() {
    loop_.cancel(attempt_timer_);
    loop_.unwatch(connecting_.get());
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return end(nonce.error());
    Connection::Options options{to_string(options_.controller), kStrangerLimits, ServerLimits{}.output_bytes};
    Result<std::unique_ptr<Connection>> connection =
        Connection::adopt(loop_, std::move(connecting_), std::move(options), *this);
    if (!connection) return try_later(connection.error());
    connection_ = *std::move(connection);
    state_ = State::Handshake;
    handshake_.emplace(options_.credentials, Hello{Role::Agent, options_.name, "", ""}, *std::move(nonce));
    attempt_timer_ = loop_.call_after(ServerLimits{}.handshake, [this] {
        connection_->fail({Errc::Timeout, "no answer in the handshake", 0});
    });
    connection_->send(handshake_->hello());
}

void AgentLink::drop_attempt() {
    loop_.cancel(attempt_timer_);
    if (connecting_) loop_.unwatch(connecting_.get());
    connecting_.reset();
}

/// The next address at once, or all of them again after a pause. Each new cause is told once.
void AgentLink::try_later(const Error& why) {
    drop_attempt();
    if (state_ == State::Connecting && next_address_ < addresses_.size()) return connect_next();
    state_ = State::Connecting;
    addresses_.clear();
    next_address_ = 0;
    if (why.what != last_cause_) {
        handler_.on_log(
            fmt::format("waiting for the controller at {}: {}", to_string(options_.controller), why.what));
        last_cause_ = why.what;
    }
    attempt_timer_ = loop_.call_after(backoff_, [this] { attempt(); });
    backoff_ = std::min(backoff_ * 2, kLongestBackoff);
}

// ---- with a connection

void AgentLink::on_frame(Connection& connection, Frame frame) {
    Result<Message> message = decode(std::move(frame));
    if (!message) {
        const Error& error = message.error();
        return connection.refuse({error.code, error.what}, error, ServerLimits{}.goodbye);
    }
    if (state_ == State::Handshake) return shake_hands(*message);
    receive(*message);
}

void AgentLink::shake_hands(const Message& message) {
    Result<std::optional<Message>> answer = handshake_->receive(message);
    if (!answer) {
        refusal_ = answer.error();
        return connection_->fail(answer.error());
    }
    if (*answer) connection_->send(**answer);
    if (handshake_->authenticated()) join();
}

void AgentLink::join() {
    for (os::EventLoop::TimerId* timer : {&attempt_timer_, &deadline_timer_})
        loop_.cancel(std::exchange(*timer, 0));
    state_ = State::Joined;
    connection_->set_limits(kPeerLimits);
    if (options_.hello.addresses.empty()) options_.hello.addresses.push_back(connection_->local_host());
    connection_->send(options_.hello);
    last_beat_ = loop_.now();
    heartbeat_timer_ = loop_.call_after(options_.heartbeat_interval, [this] { beat(); });
    handler_.on_connected();
}

void AgentLink::receive(const Message& message) {
    if (std::holds_alternative<Heartbeat>(message) || std::holds_alternative<Unknown>(message)) return;
    if (is_order(message)) return handler_.on_message(message);
    if (const auto* const failure = std::get_if<Failure>(&message)) {
        // A controller that has no word for one of our messages is older than we are, not hostile.
        if (failure->code == Errc::NotFound) return handler_.on_log("the controller: " + failure->what);
        refusal_ = Error{failure->code, failure->what, 0};
        return connection_->fail(*refusal_);
    }
    connection_->fail({Errc::Protocol, fmt::format("{} from the controller", message_name(message)), 0});
}

bool AgentLink::send(const Message& message) {
    if (state_ != State::Joined || !connection_->is_open()) return false;
    connection_->send(message);
    return connection_->is_open();
}

void AgentLink::beat() {
    // When it is we who were away (stopped, a frozen machine), what the controller said meanwhile is unread.
    const bool was_away = loop_.now() - last_beat_ > 2 * options_.heartbeat_interval;
    last_beat_ = loop_.now();
    if (!was_away && loop_.now() - connection_->last_heard() > options_.heartbeat_timeout) {
        const std::string span = format_duration(options_.heartbeat_timeout);
        return connection_->fail(
            {Errc::Timeout, fmt::format("no heartbeat from the controller for {}", span), 0});
    }
    connection_->send(Heartbeat{});
    heartbeat_timer_ = loop_.call_after(options_.heartbeat_interval, [this] { beat(); });
}

// ---- the end

void AgentLink::on_closed(Connection&, const Error& closed) {
    const Error why = closed;
    connection_.reset();
    if (state_ == State::Over) return;
    if (refusal_) return end(*refusal_);
    // Dropped before it was our turn to speak (a crowd of connections, a restart): worth another try.
    if (state_ == State::Handshake && (why.code == Errc::Closed || why.code == Errc::Timeout))
        return try_later(why);
    end(why);
}

void AgentLink::end(const Error& why) {
    if (state_ == State::Over) return;
    state_ = State::Over;
    for (const os::EventLoop::TimerId timer : {attempt_timer_, deadline_timer_, heartbeat_timer_})
        loop_.cancel(timer);
    drop_attempt();
    resolver_.forget();
    if (connection_) connection_->fail(why);
    handler_.on_lost(why);
}

}  // namespace ddprun::rdzv
