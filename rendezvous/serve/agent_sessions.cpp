#include "rendezvous/serve/agent_sessions.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun::rdzv {

AgentSessions::AgentSessions(os::EventLoop& loop, Limits limits)
    : loop_(loop), limits_(limits), silence_(limits.heartbeats, loop.now()) {}

AgentSessions::~AgentSessions() {
    for (const os::EventLoop::TimerId timer : {heartbeat_timer_, silence_timer_}) loop_.cancel(timer);
    for (const auto& [id, session] : sessions_) loop_.cancel(session.outage_timer);
    for (const auto& [key, end] : writing_ends_) loop_.cancel(end.timer);
}

// ---- sessions and their connections

AgentSession& AgentSessions::begin(ClientId id, const std::string& name, Connection& connection) {
    connection.keep_messages();
    by_name_.emplace(name, id);
    return sessions_.emplace(id, AgentSession{id, name, &connection, HeldAnswers(limits_.held_bytes)})
        .first->second;
}

AgentSession* AgentSessions::find(const Hello& hello) {
    const auto found = by_name_.find(hello.session);
    if (found == by_name_.end() || hello.role != Role::Agent) return nullptr;
    AgentSession& session = sessions_.at(found->second);
    return session.takes_messages() ? &session : nullptr;
}

void AgentSessions::resume(AgentSession& session, Connection& connection) {
    connection.resume(*session.connection, session.inbox.acknowledgement());
    session.connection = &connection;
    loop_.cancel(std::exchange(session.outage_timer, 0));
}

bool AgentSessions::waits_for_redial(AgentSession& session, const Error& why) {
    if (!session.connection->keeps_messages()) return false;
    const Duration wait = wait_for_redial(outage_of(why), limits_.heartbeats);
    session.outage_timer =
        loop_.call_after(wait, [connection = session.connection] { connection->give_up(); });
    return true;
}

void AgentSessions::end(AgentSession& session) {
    loop_.cancel(session.outage_timer);
    if (session.is_joined) --joined_;
    by_name_.erase(session.name);
    sessions_.erase(session.id);
}

// ---- messages

void AgentSessions::join(AgentSession& session, const AgentHello& hello) {
    session.is_joined = true;
    ++joined_;
    const std::string remote = session.connection->remote_host(), local = session.connection->local_host();
    node_addresses_.insert(remote);
    if (remote != local && !stays_on_host(local)) reached_at_ = local;
    node_addresses_.insert(hello.addresses.begin(), hello.addresses.end());
    if (heartbeat_timer_ == 0) beat();
    if (silence_timer_ == 0) look_for_silence();
}

AgentSession* AgentSessions::joined(AgentId agent) {
    const auto found = sessions_.find(agent);
    const bool is_here =
        found != sessions_.end() && found->second.is_joined && found->second.takes_messages();
    return is_here ? &found->second : nullptr;
}

Status AgentSessions::broadcast(ToAgent message) {
    const Result<EncodedMessage> encoded = encode_message(std::move(message));
    if (!encoded) return encoded.error();
    for (const auto& [id, session] : sessions_) {
        if (session.is_joined && session.takes_messages()) session.connection->send(encoded);
    }
    return {};
}

Status AgentSessions::take(AgentSession& session, const Heartbeat& heartbeat) {
    look_soon_whether_written();
    if (Status known = session.connection->acknowledge(heartbeat.received); !known) return known;
    while (std::optional<StoreAnswer> answer = session.held.next(session.connection->kept_bytes())) {
        session.connection->send(encode_message(std::move(answer->reply), answer->request));
    }
    return {};
}

void AgentSessions::count(AgentSession& session, const Frame& frame) {
    session.inbox.take(frame.json.size() + frame.blob.size());
    if (session.inbox.is_due()) session.connection->beat(session.inbox.acknowledgement());
}

void AgentSessions::answer(AgentSession& session, StoreAnswer answer) {
    std::optional<StoreAnswer> now = session.held.pass(std::move(answer), session.connection->kept_bytes());
    if (now) session.connection->send(encode_message(std::move(now->reply), now->request));
}

// ---- timers

/// Sends a heartbeat to all agents; one timer serves all.
void AgentSessions::beat() {
    heartbeat_timer_ = 0;
    if (joined_ == 0) return;
    for (auto& [id, session] : sessions_) {
        if (session.is_joined) session.connection->beat(session.inbox.acknowledgement());
    }
    heartbeat_timer_ = loop_.call_after(limits_.heartbeats.interval, [this] { beat(); });
}

void AgentSessions::keep_alive() {
    for (auto& [id, session] : sessions_) {
        if (session.is_joined) session.connection->keep_alive(session.inbox.acknowledgement());
    }
}

/// Fails connections that were silent for the whole timeout; one timer serves all agents.
void AgentSessions::look_for_silence() {
    silence_timer_ = 0;
    if (joined_ == 0) return;
    const Duration timeout = limits_.heartbeats.timeout;
    std::vector<Connection*> connections;
    for (const auto& [id, session] : sessions_) {
        if (session.is_joined && session.takes_messages()) connections.push_back(session.connection);
    }
    TimePoint heard = kNever;
    for (const Connection* one : connections) heard = std::min(heard, one->last_heard());
    const SilenceWatch::Verdict verdict = silence_.look(loop_.now(), heard);
    for (Connection* one : connections) {
        if (!verdict.are_lost || one->last_heard() + timeout > loop_.now()) continue;
        one->fail({Errc::Timeout, fmt::format("no heartbeat for {}", format_duration(timeout)), 0});
    }
    silence_timer_ = loop_.call_at(verdict.next, [this] { look_for_silence(); });
}

// ---- waiting for acknowledgement

void AgentSessions::when_written(Duration timeout, os::EventLoop::Handler handler) {
    const std::uint64_t key = ++last_writing_end_;
    const auto timer = loop_.call_after(timeout, [this, key] { release(key); });
    writing_ends_.emplace(key, WritingEnd{std::move(handler), timer});
    look_whether_written();
}

void AgentSessions::look_soon_whether_written() {
    if (writing_ends_.empty() || is_looking_) return;
    is_looking_ = true;  // once for each batch of events
    loop_.post([this, alive = std::weak_ptr<bool>(alive_)] {
        if (alive.expired()) return;
        is_looking_ = false;
        look_whether_written();
    });
}

void AgentSessions::look_whether_written() {
    if (queued_bytes() != 0) return;
    while (!writing_ends_.empty()) release(writing_ends_.begin()->first);
}

std::size_t AgentSessions::queued_bytes() const {
    std::size_t sum = 0;
    for (const auto& [id, session] : sessions_) {
        if (session.is_joined) sum += session.connection->kept_bytes();
    }
    return sum;
}

void AgentSessions::release(std::uint64_t key) {
    auto end = writing_ends_.extract(key);
    loop_.cancel(end.mapped().timer);
    loop_.post(std::move(end.mapped().handler));
}

}  // namespace ddprun::rdzv
