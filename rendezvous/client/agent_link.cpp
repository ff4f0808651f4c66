#include "rendezvous/client/agent_link.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

/// The time for one address to answer; a name can have several, and the first may be dead.
constexpr Duration kAddressTimeout = std::chrono::seconds(5);

/// Behind these the head ends, or is stopped, when it hears that they have come.
bool is_waited_for(std::uint8_t type) {
    return type == Shutdown::kType.number || type == ForwardSignal::kType.number ||
           type == Preempt::kType.number;
}

}  // namespace

AgentLink::AgentLink(os::EventLoop& loop, AgentLinkOptions options, AgentLinkHandler& handler)
    : loop_(loop), options_(std::move(options)), handler_(handler), link_(options_.heartbeats, loop.now()) {
    link_.connect_by = options_.connect_by;
    link_.is_ours = options_.is_ours;
    dial_timer_ = loop_.call_at(link_.timer(), [this] { feed(link_event::TimePassed{}); });
}

AgentLink::~AgentLink() { cancel_timers(); }

void AgentLink::cancel_timers() {
    for (const os::EventLoop::TimerId timer : {heartbeat_timer_, silence_timer_, dial_timer_})
        loop_.cancel(timer);
}

// ---- dials

void AgentLink::feed(const LinkEvent& event) {
    const LinkAction action = step(link_, event, loop_.now());
    loop_.cancel(std::exchange(dial_timer_, 0));
    if (link_.timer() != kNever)
        dial_timer_ = loop_.call_at(link_.timer(), [this] { feed(link_event::TimePassed{}); });
    switch (action) {
        case LinkAction::None: return;
        case LinkAction::Dial: return dial();
        case LinkAction::EndAsAbsent:
            return end(nobody_there(std::holds_alternative<link_event::TimePassed>(event)));
        case LinkAction::EndAsLost: return connection_->give_up();
        case LinkAction::EndAsRefused: return end(last_cause_);
        case LinkAction::EndAsSilent: break;
    }
    const std::string span = format_duration(options_.heartbeats.timeout);
    connection_->fail({Errc::Timeout, fmt::format("no heartbeat from the controller for {}", span), 0});
}

/// Dials also beside a silent connection. TCP repeats its attempts to connect ever more slowly: after a
/// partition a fresh attempt is faster.
void AgentLink::dial() {
    dial_ = std::make_unique<Dial>(loop_, dial_options(), [this](Result<Dialled> outcome) {
        was_refused_ = !outcome && outcome.error().sys == ECONNREFUSED;
        if (!outcome) return dial_failed(outcome.error());
        link_.is_joined ? resume(*std::move(outcome)) : join(*std::move(outcome));
    });
}

DialOptions AgentLink::dial_options() {
    DialOptions options;
    options.credentials = options_.credentials;
    options.hello.role = Role::Agent;
    options.hello.name = options_.name;
    options.hello.session = session_;
    options.when_token_differs = options_.when_token_differs;
    options.tls = options_.tls;
    options.controllers = link_.is_joined ? found_ : options_.controllers;
    options.connecting = link_.is_joined ? redial_pause(options_.heartbeats) : kAddressTimeout;
    options.handshake = link_.is_joined ? redial_after(options_.heartbeats) : options_.handshake_timeout;
    options.met = [this] { feed(link_event::Accepted{}); };
    return options;
}

/// Logs each new cause once while there is no controller.
void AgentLink::dial_failed(const Error& why) {
    const bool is_news = why.what != last_cause_.what;
    last_cause_ = why;
    feed(link_event::DialFailed{why});
    if (is_news && !is_over_ && !link_.is_joined)
        handler_.on_log(fmt::format("waiting for the controller at {}: {}",
                                    to_string(options_.controllers.front()), why.what));
}

Error AgentLink::nobody_there(bool is_late) const {
    const std::string what =
        fmt::format("no controller at {}: {}", to_string(options_.controllers.front()), last_cause_.what);
    return is_late ? Error{Errc::Timeout, what, 0} : Error{last_cause_.code, what, last_cause_.sys};
}

// ---- with a connection

void AgentLink::join(Dialled dialled) {
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
    feed(link_event::Connected{});
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
    if (!is_connected() || !connection_->takes_messages()) return false;
    connection_->send(std::move(message));
    return connection_->takes_messages();
}

void AgentLink::beat() {
    connection_->beat(inbox_.acknowledgement());
    feed(link_event::Beat{});
    heartbeat_timer_ = loop_.call_after(options_.heartbeats.interval, [this] { beat(); });
}

void AgentLink::keep_alive() {
    if (is_connected()) connection_->keep_alive(inbox_.acknowledgement());
}

void AgentLink::check_silence() {
    feed(link_event::SilenceChecked{connection_->last_heard()});
    if (!is_over_) silence_timer_ = loop_.call_at(link_.check_at, [this] { check_silence(); });
}

void AgentLink::resume(Dialled dialled) {
    const Duration silent_for = loop_.now() - connection_->last_heard();
    dialled.connection->hand_to(*this);
    dialled.connection->set_limits(kPeerLimits);
    dialled.connection->resume(*connection_, inbox_.acknowledgement());
    connection_ = std::move(dialled.connection);
    feed(link_event::Connected{});
    handler_.on_detail(fmt::format("another connection to the controller at {}, nothing was heard for {}",
                                   connection_->peer(), format_duration(silent_for)));
}

// ---- the end

void AgentLink::on_closed(Connection& connection, const Error& closed) {
    if (is_over_ || &connection != connection_.get()) return;
    const Error why = refusal_.value_or(closed);
    if (!connection.keeps_messages()) return end(why);
    feed(link_event::Closed{outage_of(why)});
}

void AgentLink::end(const Error& why) {
    if (std::exchange(is_over_, true)) return;
    cancel_timers();
    dial_.reset();
    if (connection_) connection_->fail(why);
    handler_.on_lost(why);
}

}  // namespace ddprun::rdzv
