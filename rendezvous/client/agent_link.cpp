#include "rendezvous/client/agent_link.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

constexpr Duration kFirstBackoff = std::chrono::milliseconds(20);
constexpr Duration kLongestBackoff = std::chrono::seconds(1);
/// The time for one address to answer; a name can have several, and the first may be dead.
constexpr Duration kAddressTimeout = std::chrono::seconds(5);

/// Behind these the head ends, or is stopped, when it hears that they have come.
bool is_waited_for(std::uint8_t type) {
    return type == static_cast<std::uint8_t>(MessageType::Shutdown) ||
           type == static_cast<std::uint8_t>(MessageType::Notice);
}

Error nobody_there(const Endpoint& controller, const Error& why) {
    return {why.code, fmt::format("no controller at {}: {}", to_string(controller), why.what), why.sys};
}

}  // namespace

AgentLink::AgentLink(os::EventLoop& loop, AgentLinkOptions options, AgentLinkHandler& handler)
    : loop_(loop),
      options_(std::move(options)),
      handler_(handler),
      redial_(options_.heartbeats, loop.now()),
      backoff_(kFirstBackoff) {
    attempt_timer_ = loop_.call_after(Duration::zero(), [this] { attempt(); });
    if (options_.connect_by == kNever) return;
    deadline_timer_ = loop_.call_at(options_.connect_by, [this] {
        end(nobody_there(options_.controllers.front(),
                         {Errc::Timeout, last_cause_.empty() ? "no answer" : last_cause_, 0}));
    });
}

AgentLink::~AgentLink() {
    for (const os::EventLoop::TimerId timer :
         {attempt_timer_, deadline_timer_, heartbeat_timer_, silence_timer_, redial_timer_})
        loop_.cancel(timer);
}

// ---- the first connection

void AgentLink::attempt() {
    DialOptions options = to_dial();
    options.connecting = kAddressTimeout;
    options.handshake = options_.handshake_timeout;
    dial_ = std::make_unique<Dial>(loop_, std::move(options), [this](Result<Dialled> outcome) {
        if (outcome) return join(*std::move(outcome));
        if (!is_worth_coming_again(outcome.error())) return end(outcome.error());
        try_later(outcome.error());
    });
}

DialOptions AgentLink::to_dial() const {
    DialOptions options;
    options.controllers = options_.controllers;
    options.credentials = options_.credentials;
    options.hello.role = Role::Agent;
    options.hello.name = options_.name;
    options.when_token_differs = options_.when_token_differs;
    options.tls = options_.tls;
    return options;
}

/// Tries again after a pause; logs each new cause once.
void AgentLink::try_later(const Error& why) {
    if (is_hopeless(why)) return end(nobody_there(options_.controllers.front(), why));
    if (why.what != last_cause_) {
        handler_.on_log(fmt::format("waiting for the controller at {}: {}",
                                    to_string(options_.controllers.front()), why.what));
        last_cause_ = why.what;
    }
    attempt_timer_ = loop_.call_after(backoff_, [this] { attempt(); });
    backoff_ = std::min(backoff_ * 2, kLongestBackoff);
}

/// Strangers can keep a controller of ours from answering once; a process that was stopped has let a time
/// pass itself. A system call that is refused (EPERM of sendmsg in a sandbox) stays refused.
bool AgentLink::is_hopeless(const Error& why) {
    constexpr int kTimeouts = 2;
    if (!options_.is_ours) return false;
    if (why.code == Errc::Closed && outage_of(why) == Outage::Unreachable) return true;
    return why.code == Errc::System || (why.code == Errc::Timeout && ++timeouts_ == kTimeouts);
}

// ---- with a connection

void AgentLink::join(Dialled dialled) {
    for (os::EventLoop::TimerId* timer : {&attempt_timer_, &deadline_timer_})
        loop_.cancel(std::exchange(*timer, 0));
    state_ = State::Joined;
    connection_ = std::move(dialled.connection);
    connection_->hand_to(*this);
    connection_->set_limits(kPeerLimits);
    connection_->keep_messages();
    session_ = std::move(dialled.nonce);
    found_ = std::move(dialled.found);
    std::vector<std::string>& addresses = options_.hello.addresses;
    if (addresses.empty()) addresses.push_back(connection_->local_host());
    for (const std::string& other : options_.other_addresses) {
        if (std::count(addresses.begin(), addresses.end(), other) == 0) addresses.push_back(other);
    }
    connection_->send(encode_message(options_.hello));
    redial_ = RedialState(options_.heartbeats, loop_.now());
    check_silence();
    heartbeat_timer_ = loop_.call_after(options_.heartbeats.interval, [this] { beat(); });
    handler_.on_connected();
}

void AgentLink::on_frame(Connection& connection, Frame frame) {
    const Status read = receive(std::move(frame));
    if (read) return;
    const Error& error = read.error();
    connection.refuse(failure_of(error), error, ServerLimits{}.goodbye);
}

/// Error: the frame makes no sense. What else is wrong ends the link here.
Status AgentLink::receive(Frame frame) {
    if (kind_of(frame.type) == MessageKind::Heartbeat) {
        const Result<Heartbeat> heartbeat = decode_heartbeat(std::move(frame));
        if (!heartbeat) return heartbeat.error();
        const Status known = connection_->acknowledge(heartbeat->received);
        if (known) handler_.on_acknowledged();
        return known;
    }
    inbox_.take(frame.json.size() + frame.blob.size());
    if (inbox_.is_due() || is_waited_for(frame.type)) connection_->beat(inbox_.acknowledgement());
    return understand(std::move(frame));
}

Status AgentLink::understand(Frame frame) {
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Unknown) return {};
    if (kind == MessageKind::ToAgent || kind == MessageKind::EitherWay) {
        const Result<ToAgent> message = decode_to_agent(std::move(frame));
        if (!message) return message.error();
        handler_.on_message(*message);
        return {};
    }
    if (kind == MessageKind::StoreReply || (kind == MessageKind::Failure && frame.request != 0)) {
        const std::uint32_t number = frame.request;
        const Result<StoreReply> reply = decode_store_reply(std::move(frame));
        if (!reply) return reply.error();
        handler_.on_store_reply(number, *reply);
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
    // A controller that does not know one of our messages is an older version.
    if (failure.code == Errc::NotFound) return handler_.on_log("the controller: " + failure.what);
    refusal_ = Error{failure.code, failure.what, 0};
    connection_->fail(*refusal_);
}

bool AgentLink::send(FromAgent message) { return say(encode_message(std::move(message))); }
bool AgentLink::tell_gone(ClientGone gone) { return say(encode_message(gone)); }

Status AgentLink::ask_store(StoreRequest request, std::uint32_t number) {
    Result<EncodedMessage> message = encode_message(std::move(request), number);
    if (!message) return message.error();
    say(std::move(message));
    return {};
}

bool AgentLink::say(Result<EncodedMessage> message) {
    if (state_ != State::Joined || !connection_->takes_messages()) return false;
    connection_->send(std::move(message));
    return connection_->takes_messages();
}

void AgentLink::beat() {
    connection_->beat(inbox_.acknowledgement());
    feed(redial_event::Beat{});
    heartbeat_timer_ = loop_.call_after(options_.heartbeats.interval, [this] { beat(); });
}

void AgentLink::keep_alive() {
    if (state_ == State::Joined) connection_->keep_alive(inbox_.acknowledgement());
}

void AgentLink::check_silence() {
    feed(redial_event::SilenceChecked{connection_->last_heard()});
    if (state_ == State::Joined)
        silence_timer_ = loop_.call_at(redial_.check_at, [this] { check_silence(); });
}

// ---- another connection for the session

void AgentLink::feed(const RedialEvent& event) {
    const RedialAction action = step(redial_, event, loop_.now());
    loop_.cancel(std::exchange(redial_timer_, 0));
    if (redial_.timer() != kNever)
        redial_timer_ = loop_.call_at(redial_.timer(), [this] { feed(redial_event::TimePassed{}); });
    switch (action) {
        case RedialAction::None: return;
        case RedialAction::Dial: return redial();
        case RedialAction::EndAsLost: return connection_->give_up();
        case RedialAction::EndAsRefused: return end(std::get<redial_event::DialFailed>(event).why);
        case RedialAction::EndAsSilent: break;
    }
    const std::string span = format_duration(options_.heartbeats.timeout);
    connection_->fail({Errc::Timeout, fmt::format("no heartbeat from the controller for {}", span), 0});
}

/// Dials another connection. TCP repeats its attempts to connect ever more slowly: after a partition a fresh
/// attempt is faster.
void AgentLink::redial() {
    DialOptions options = to_dial();
    options.controllers = found_;
    options.hello.session = session_;
    options.connecting = redial_pause(options_.heartbeats);
    options.handshake = redial_after(options_.heartbeats);
    options.met = [this] { feed(redial_event::Accepted{}); };
    dial_ = std::make_unique<Dial>(loop_, std::move(options), [this](Result<Dialled> outcome) {
        if (!outcome) {
            was_refused_ = outcome.error().sys == ECONNREFUSED;
            return feed(redial_event::DialFailed{outcome.error()});
        }
        resume(*std::move(outcome));
    });
}

void AgentLink::resume(Dialled dialled) {
    const Duration silent_for = loop_.now() - connection_->last_heard();
    dialled.connection->hand_to(*this);
    dialled.connection->set_limits(kPeerLimits);
    dialled.connection->resume(*connection_, inbox_.acknowledgement());
    connection_ = std::move(dialled.connection);
    feed(redial_event::Resumed{});
    handler_.on_detail(fmt::format("another connection to the controller at {}, nothing was heard for {}",
                                   connection_->peer(), format_duration(silent_for)));
}

// ---- the end

void AgentLink::on_closed(Connection& connection, const Error& closed) {
    if (state_ == State::Over || &connection != connection_.get()) return;
    const Error why = refusal_.value_or(closed);
    if (!connection.keeps_messages()) return end(why);
    feed(redial_event::Closed{outage_of(why)});
}

void AgentLink::end(const Error& why) {
    if (state_ == State::Over) return;
    state_ = State::Over;
    for (const os::EventLoop::TimerId timer :
         {attempt_timer_, deadline_timer_, heartbeat_timer_, silence_timer_, redial_timer_})
        loop_.cancel(timer);
    dial_.reset();
    if (connection_) connection_->fail(why);
    handler_.on_lost(why);
}

}  // namespace ddprun::rdzv
