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

/// The controller had no time or no room for us: a crowd of connections, a restart.
bool is_worth_coming_again(const Error& why) {
    return why.code == Errc::Closed || why.code == Errc::Timeout || why.code == Errc::Limit;
}

Error nobody_there(const Endpoint& controller, const Error& why) {
    return {why.code, fmt::format("no controller at {}: {}", to_string(controller), why.what), why.sys};
}

}  // namespace

AgentLink::AgentLink(os::EventLoop& loop, AgentLinkOptions options, AgentLinkHandler& handler)
    : loop_(loop), options_(std::move(options)), handler_(handler), resolver_(loop), backoff_(kFirstBackoff),
      silence_(options_.heartbeats, loop.now()) {
    attempt_timer_ = loop_.call_after(Duration::zero(), [this] { attempt(); });
    if (options_.connect_by == kNever) return;
    deadline_timer_ = loop_.call_at(options_.connect_by, [this] {
        end(nobody_there(options_.controller, {Errc::Timeout, last_cause_.empty() ? "no answer" : last_cause_, 0}));
    });
}

AgentLink::~AgentLink() {
    for (const os::EventLoop::TimerId timer : {attempt_timer_, deadline_timer_, heartbeat_timer_, silence_timer_})
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
    attempt_timer_ = loop_.call_after(options_.handshake_timeout, [this] {
        connection_->fail({Errc::Timeout, "no answer in the handshake", 0});
    });
    connection_->send(encode_message(handshake_->hello(), 0));
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
    if (is_hopeless(why)) return end(nobody_there(options_.controller, why));
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

/// Strangers can keep a controller of ours from answering once; a process that was stopped has let a time pass itself.
bool AgentLink::is_hopeless(const Error& why) {
    constexpr int kTimeouts = 2;
    if (!options_.is_ours) return false;
    return why.code == Errc::System || (why.code == Errc::Timeout && ++timeouts_ == kTimeouts);
}

// ---- with a connection

void AgentLink::on_frame(Connection& connection, Frame frame) {
    const Status read = state_ == State::Handshake ? shake_hands(std::move(frame)) : receive(std::move(frame));
    if (read) return;
    const Error& error = read.error();
    connection.refuse({error.code, error.what}, error, ServerLimits{}.goodbye);
}

/// Error, as of receive(): the frame makes no sense. What else is wrong ends the link here.
Status AgentLink::shake_hands(Frame frame) {
    const bool has_proved = handshake_->has_proved();
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    Result<std::optional<HandshakeMessage>> answer = handshake_->receive(*message);
    if (!answer) {
        Error why = answer.error();
        const bool is_token = has_proved && why.code == Errc::Refused && !options_.when_token_differs.empty();
        if (is_token) why.what += "; " + options_.when_token_differs;
        if (!is_worth_coming_again(why)) refusal_ = why;
        connection_->fail(std::move(why));
        return {};
    }
    if (*answer) connection_->send(encode_message(**std::move(answer), 0));
    if (handshake_->authenticated()) join();
    return {};
}

void AgentLink::join() {
    for (os::EventLoop::TimerId* timer : {&attempt_timer_, &deadline_timer_})
        loop_.cancel(std::exchange(*timer, 0));
    state_ = State::Joined;
    connection_->set_limits(kPeerLimits);
    if (options_.hello.addresses.empty()) options_.hello.addresses.push_back(connection_->local_host());
    connection_->send(encode_message(options_.hello));
    silence_ = SilenceWatch(options_.heartbeats, loop_.now());
    look_for_silence();
    heartbeat_timer_ = loop_.call_after(options_.heartbeats.interval, [this] { beat(); });
    handler_.on_connected();
}

Status AgentLink::receive(Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Heartbeat || kind == MessageKind::Unknown) return {};
    if (kind == MessageKind::ToAgent || kind == MessageKind::EitherWay) {
        const Result<ToAgent> message = decode_to_agent(std::move(frame));
        if (!message) return message.error();
        handler_.on_message(*message);
        return {};
    }
    if (kind == MessageKind::Failure) {
        const Result<Failure> failure = decode_failure(std::move(frame));
        if (!failure) return failure.error();
        take_failure(*failure);
        return {};
    }
    connection_->fail({Errc::Protocol, fmt::format("{} from the controller", message_name(type)), 0});
    return {};
}

void AgentLink::take_failure(const Failure& failure) {
    // A controller that has no word for one of our messages is older than we are, not hostile.
    if (failure.code == Errc::NotFound) return handler_.on_log("the controller: " + failure.what);
    refusal_ = Error{failure.code, failure.what, 0};
    connection_->fail(*refusal_);
}

bool AgentLink::send(FromAgent message) {
    if (state_ != State::Joined || !connection_->is_open()) return false;
    connection_->send(encode_message(std::move(message)));
    return connection_->is_open();
}

void AgentLink::beat() {
    connection_->send(encode_heartbeat());
    heartbeat_timer_ = loop_.call_after(options_.heartbeats.interval, [this] { beat(); });
}

void AgentLink::look_for_silence() {
    const SilenceWatch::Verdict verdict = silence_.look(loop_.now(), connection_->last_heard());
    if (verdict.are_lost) {
        const std::string span = format_duration(options_.heartbeats.timeout);
        return connection_->fail({Errc::Timeout, fmt::format("no heartbeat from the controller for {}", span), 0});
    }
    silence_timer_ = loop_.call_at(verdict.next, [this] { look_for_silence(); });
}

// ---- the end

void AgentLink::on_closed(Connection&, const Error& closed) {
    const Error why = closed;
    connection_.reset();
    if (state_ == State::Over) return;
    if (refusal_) return end(*refusal_);
    if (state_ == State::Handshake && is_worth_coming_again(why)) return try_later(why);
    end(why);
}

void AgentLink::end(const Error& why) {
    if (state_ == State::Over) return;
    state_ = State::Over;
    for (const os::EventLoop::TimerId timer : {attempt_timer_, deadline_timer_, heartbeat_timer_, silence_timer_})
        loop_.cancel(timer);
    drop_attempt();
    resolver_.forget();
    if (connection_) connection_->fail(why);
    handler_.on_lost(why);
}

}  // namespace ddprun::rdzv
