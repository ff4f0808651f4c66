#include "tests/simulation/simulated_session.h"

#include <sys/uio.h>

#include <algorithm>
#include <utility>

#include "rendezvous/wire/message.h"

namespace ddprun::test {

using namespace std::chrono_literals;
using rdzv::Outage;

SimulatedSession::SimulatedSession(Parts parts) : parts_(std::move(parts)) {
    const auto wire = std::make_shared<Wire>();
    for (Side& side : sides_) {
        side.out.keep();
        side.wire = wire;
    }
}

void SimulatedSession::check(const Status& status) {
    if (!status) parts_.wrong("a session's counts: " + status.error().what);
}

// ---- messages

void SimulatedSession::say(Way way, rdzv::EncodedMessage message) {
    Side& from = sides_[back(way)];
    if (from.is_over) return;
    sides_[way].unheard.push_back(message.head + std::string(message.blob.view()));
    from.out.push(std::move(message));
    write(way);
}

/// Writes as the kernel does: sometimes all of a message, sometimes only its beginning.
void SimulatedSession::write(Way way) {
    Side& from = sides_[back(way)];
    while (from.wire && !from.out.is_written()) {
        std::array<iovec, 8> parts;
        std::string bytes;
        for (std::size_t i = 0, count = from.out.fill(parts); i < count; ++i)
            bytes.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
        if (parts_.dice.chance(20))
            bytes.resize(static_cast<std::size_t>(parts_.dice.between(1, static_cast<int>(bytes.size()))));
        from.out.consume(bytes.size());
        send(way, from.wire, {std::move(bytes), nullptr});
    }
}

void SimulatedSession::send(Way way, const WirePtr& wire, Piece piece) {
    if (wire->is_broken) return;
    TimePoint& last = wire->last_arrival[way];
    last = std::max(last, parts_.now() + (piece.handshake ? leg() : parts_.delay()));
    wire->under_way[way].push_back(std::move(piece));
    parts_.after(last - parts_.now(), [this, way, wire] { arrive(way, wire); });
}

/// Delivers the first piece under way. Called once for each piece.
void SimulatedSession::arrive(Way way, const WirePtr& wire) {
    if (wire->is_broken || wire->under_way[way].empty() || !parts_.can_arrive()) return;
    if (is_silent()) {  // TCP sends it again after longer and longer pauses
        const Duration again =
            silent_until_ - parts_.now() + parts_.dice.span(0s, std::min<Duration>(silence_, 1500ms));
        return parts_.after(again, [this, way, wire] { arrive(way, wire); });
    }
    const Piece piece = std::move(wire->under_way[way].front());
    wire->under_way[way].pop_front();
    Side& to = sides_[way];
    if (to.is_over) return;
    if (piece.handshake) return piece.handshake();
    if (to.wire != wire) return;
    to.heard = parts_.now();
    to.decoder.feed(piece.bytes);
    while (!to.is_over && to.wire == wire) {
        Result<std::optional<rdzv::Frame>> frame = to.decoder.next();
        if (!frame) return parts_.wrong("a torn message: " + frame.error().what);
        if (!*frame) return;
        hear(way, *std::move(*frame));
    }
}

void SimulatedSession::hear(Way way, rdzv::Frame frame) {
    Side& to = sides_[way];
    if (rdzv::kind_of(frame.type) == rdzv::MessageKind::Heartbeat)
        return check(to.out.acknowledge(rdzv::decode_heartbeat(std::move(frame))->received));
    if (!to.in.take(frame.json.size() + frame.blob.size()) && way == kToAgent) return;
    if (to.in.owes_a_word()) beat(way);
    if (!std::exchange(to.owes_beat, true)) {
        parts_.after(parts_.limits.interval, [this, way] {
            sides_[way].owes_beat = false;
            beat(way);
        });
    }
    const bool is_next = !to.unheard.empty() && to.unheard.front() == rdzv::encode(frame);
    if (!is_next) return parts_.wrong("a message of a session is heard twice, or never");
    to.unheard.pop_front();
    way == kToHead ? parts_.head_hears(std::move(frame)) : parts_.agent_hears(std::move(frame));
}

/// Sends a heartbeat against `way`: about what has arrived that way.
void SimulatedSession::beat(Way way) {
    Side& side = sides_[way];
    if (side.is_over || !side.wire) return;
    side.out.push_heartbeat(*rdzv::encode_message(side.in.word()));
    write(back(way));
}

void SimulatedSession::give_up(Way way, Errc code) {
    Side& side = sides_[way];
    if (std::exchange(side.is_over, true)) return;
    if (!may_end_ && parts_.is_whole())
        parts_.wrong("a session is over after an outage shorter than the time-out");
    may_end_ = true;  // the session ends for the other side, too
    side.out.clear();
    for (const WirePtr& wire : {side.wire, way == kToAgent ? dialled_ : nullptr}) {
        if (!wire) continue;
        const Duration until_it_passes = std::max<Duration>(silent_until_ - parts_.now(), 0s);
        parts_.after(until_it_passes + leg(), [this, way, wire] {
            way == kToAgent ? head_closed(wire, Outage::Broken) : agent_closed(wire, Outage::Broken);
        });
    }
    way == kToHead ? parts_.head_loses(code) : parts_.agent_loses(code);
}

// ---- faults

void SimulatedSession::reset() {
    resets_ = parts_.now() - last_reset_ < wait_for_redial(Outage::Broken, parts_.limits) ? resets_ + 1 : 1;
    last_reset_ = parts_.now();
    may_end_ = may_end_ || is_silent() || resets_ > 3;  // a dead process is not waited for so long
    const bool is_late_to_see = parts_.dice.chance(30);
    for (const WirePtr& wire : {head().wire, agent().wire, dialled_}) {
        if (!wire || wire->is_broken) continue;
        close(wire);
        parts_.after(leg(), [this, wire] { agent_closed(wire, Outage::Broken); });
        parts_.after(is_late_to_see ? parts_.dice.span(0s, 1s) : leg(),
                     [this, wire] { head_closed(wire, Outage::Broken); });
    }
    if (dialled_) parts_.after(leg(), [this, attempt = attempt_] { dial_failed(attempt, Errc::Closed); });
}

void SimulatedSession::fall_silent(Duration span, bool is_noticed) {
    const bool is_calm = head().wire && head().wire == agent().wire && !head().wire->is_broken &&
                         !head().watch && !agent().watch;
    may_end_ = may_end_ || !is_calm;  // two outages can add up to a longer one
    silence_ = span;
    silent_until_ = parts_.now() + span;
    for (const Way way : {kToHead, kToAgent}) {
        Side& side = sides_[way];
        side.heard = parts_.now() - parts_.dice.span(0s, parts_.limits.interval);
        beat(way);
        if (side.watch) continue;
        side.watch.emplace(parts_.limits, parts_.now());
        parts_.after(0s, [this, way] { look(way); });
    }
    if (!is_noticed) return;
    parts_.after(parts_.dice.span(0s, span),
                 [this, wire = agent().wire] { agent_closed(wire, Outage::Unreachable); });
    parts_.after(parts_.dice.span(0s, span),
                 [this, wire = head().wire] { head_closed(wire, Outage::Unreachable); });
}

/// Breaks the connection. Pieces on the way are lost.
void SimulatedSession::close(const WirePtr& wire) {
    wire->is_broken = true;
    for (auto& pieces : wire->under_way) pieces.clear();
}

// ---- the server's part

void SimulatedSession::head_closed(const WirePtr& wire, Outage outage) {
    Side& side = head();
    if (side.is_over || !wire || side.wire != wire) return;
    side.wire = nullptr;
    close(wire);
    parts_.after(wait_for_redial(outage, parts_.limits), [this, number = ++side.outage] {
        if (number == head().outage) give_up(kToHead, Errc::Closed);
    });
}

void SimulatedSession::move_to(Side& side, const WirePtr& wire, TimePoint now) {
    rdzv::Outbox next;
    next.go_on(std::move(side.out));
    side.out = std::move(next);
    side.wire = wire;
    side.decoder = rdzv::FrameDecoder(rdzv::kPeerLimits);
    side.heard = now;
    ++side.outage;
}

/// The agent has proved who it is and wants to go on with the session, after `received` bytes.
void SimulatedSession::prove(std::uint64_t attempt, const WirePtr& wire, std::uint64_t received) {
    if (agent().is_over || attempt != attempt_ || wire->is_broken || is_silent() || !parts_.is_whole())
        return;
    Side& side = head();
    if (side.is_over) {
        return parts_.after(leg(), [this] { give_up(kToAgent, Errc::Refused); });
    }
    const std::uint64_t begins = std::max(side.out.acknowledged(), received);
    if (received > side.out.acknowledged()) check(side.out.acknowledge(received));
    const WirePtr earlier = std::exchange(side.wire, nullptr);
    move_to(side, wire, parts_.now());
    // The wire holds this step until it arrives, so the step must not hold the wire.
    const std::weak_ptr<Wire> on = wire;
    send(kToAgent, wire, {"", [this, attempt, on, has = side.in.received(), begins] {
                              welcome(attempt, on.lock(), has, begins);
                          }});
    write(kToAgent);
    if (!earlier) return;
    earlier->under_way[kToHead].clear();
    if (parts_.dice.chance(50))
        earlier->under_way[kToAgent].clear();  // closing with unread bytes resets a connection
    parts_.after(leg(), [this, earlier] { agent_closed(earlier, Outage::Broken); });
}

// ---- the agent link's part

void SimulatedSession::agent_closed(const WirePtr& wire, Outage outage) {
    Side& side = agent();
    if (side.is_over || !wire || side.wire != wire) return;
    side.wire = nullptr;
    close(wire);
    outage_ = outage;
    has_grace_ = true;
    parts_.after(wait_for_redial(outage, parts_.limits), [this, number = ++side.outage] {
        if (number == agent().outage) outage_is_over();
    });
    ++redials_;
    redial_is_due_ = false;
    if (!has_met_somebody_) is_dialling_ = false;
    redial();
}

void SimulatedSession::outage_is_over() {
    has_grace_ = false;
    if (!is_dialling_ || !has_met_somebody_) give_up(kToAgent, Errc::Closed);
}

/// Watches for silence, on both sides, while they may not hear each other.
void SimulatedSession::look(Way way) {
    Side& side = sides_[way];
    if (side.is_over) return;
    if (side.heard > silent_until_) return side.watch.reset();
    const TimePoint now = parts_.now();
    const rdzv::SilenceWatch::Verdict verdict = side.watch->look(now, side.heard);
    if (verdict.are_lost) return give_up(way, Errc::Timeout);
    TimePoint next = verdict.next;
    if (way == kToAgent) {
        const TimePoint suspect = side.heard + redial_after(parts_.limits);
        if (suspect <= now) redial();
        else next = std::min(suspect, next);
    }
    parts_.after(next - now, [this, way] { look(way); });
}

void SimulatedSession::redial() {
    if (agent().is_over || is_dialling_ || redial_is_due_) return;
    is_dialling_ = true;
    has_met_somebody_ = false;
    dialled_ = nullptr;
    const std::uint64_t attempt = ++attempt_;
    if (!parts_.is_whole() || is_silent())
        return parts_.after(redial_pause(parts_.limits),
                            [this, attempt] { dial_failed(attempt, Errc::Timeout); });
    parts_.after(leg(), [this, attempt, received = agent().in.received()] { meet(attempt, received); });
}

void SimulatedSession::meet(std::uint64_t attempt, std::uint64_t received) {
    if (agent().is_over || attempt != attempt_) return;
    has_met_somebody_ = true;
    dialled_ = std::make_shared<Wire>();
    parts_.after(redial_after(parts_.limits), [this, attempt] { dial_failed(attempt, Errc::Timeout); });
    parts_.after(leg() + leg() + leg(),
                 [this, attempt, wire = dialled_, received] { prove(attempt, wire, received); });
}

void SimulatedSession::welcome(std::uint64_t attempt, const WirePtr& wire, std::uint64_t received,
                               std::uint64_t begins) {
    if (attempt != attempt_ || !is_dialling_) return;
    is_dialling_ = false;
    dialled_ = nullptr;
    ++resumed_;
    check(agent().in.go_on(begins));
    check(agent().out.acknowledge(received));
    move_to(agent(), wire, parts_.now());
    outage_.reset();
    has_grace_ = false;
    ++redials_;
    redial_is_due_ = false;
    write(kToHead);
}

void SimulatedSession::dial_failed(std::uint64_t attempt, Errc why) {
    if (agent().is_over || attempt != attempt_ || !std::exchange(is_dialling_, false)) return;
    dialled_ = nullptr;
    const bool has_grace = outage_ == Outage::Broken && has_grace_;
    if (outage_ == Outage::Broken && !has_grace && why != Errc::Timeout)
        return give_up(kToAgent, Errc::Closed);
    redial_is_due_ = true;
    const Duration pause = has_grace ? wait_for_redial(Outage::Broken, parts_.limits) / 5
                                     : pause_behind({why, "", 0}, parts_.limits);
    parts_.after(pause, [this, number = ++redials_] {
        if (number != redials_) return;
        redial_is_due_ = false;
        redial();
    });
}

}  // namespace ddprun::test
