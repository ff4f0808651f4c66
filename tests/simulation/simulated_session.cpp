#include "tests/simulation/simulated_session.h"

#include <sys/uio.h>

#include <algorithm>
#include <utility>

#include "rendezvous/wire/message.h"

namespace ddprun::test {

using namespace std::chrono_literals;
using rdzv::Outage;

SimulatedSession::SimulatedSession(Parts parts)
    : parts_(std::move(parts)), head_watch_(parts_.limits, parts_.now()), link_(parts_.limits, parts_.now()) {
    (void)step(link_, rdzv::link_event::Connected{}, parts_.now());
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
    if (rdzv::kind_of(frame.type) == rdzv::MessageKind::Heartbeat) {
        check(to.out.acknowledge(rdzv::decode_heartbeat(std::move(frame))->received));
        return write(back(way));  // what waited for a first count
    }
    to.in.take(frame.json.size() + frame.blob.size());
    if (to.in.is_due()) beat(way);
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
    side.out.push_heartbeat(*rdzv::encode_message(side.in.acknowledgement()));
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
                         !head().looks_for_silence && !agent().looks_for_silence;
    may_end_ = may_end_ || !is_calm;  // two outages can add up to a longer one
    silence_ = span;
    silent_until_ = parts_.now() + span;
    for (const Way way : {kToHead, kToAgent}) {
        Side& side = sides_[way];
        side.heard = parts_.now() - parts_.dice.span(0s, parts_.limits.interval);
        beat(way);
        if (std::exchange(side.looks_for_silence, true)) continue;
        (way == kToHead ? head_watch_ : link_.silence) = rdzv::SilenceWatch(parts_.limits, parts_.now());
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
    parts_.after(wait_for_redial(outage, parts_.limits), [this, number = ++head_outage_] {
        if (number == head_outage_) give_up(kToHead, Errc::Closed);
    });
}

void SimulatedSession::move_to(Side& side, const WirePtr& wire, TimePoint now) {
    rdzv::Outbox next;
    next.resume(std::move(side.out));
    side.out = std::move(next);
    side.wire = wire;
    side.decoder = rdzv::FrameDecoder(rdzv::kPeerLimits);
    side.heard = now;
}

/// The agent has proved who it is and wants to go on with the session.
void SimulatedSession::prove(std::uint64_t attempt, const WirePtr& wire) {
    if (agent().is_over || attempt != attempt_ || wire->is_broken || is_silent() || !parts_.is_whole())
        return;
    Side& side = head();
    if (side.is_over)
        return parts_.after(leg(), [this, attempt] { dial_failed(attempt, Errc::StaleGeneration); });
    ++head_outage_;
    const WirePtr earlier = std::exchange(side.wire, nullptr);
    move_to(side, wire, parts_.now());
    // The wire holds this step until it arrives, so the step must not hold the wire.
    const std::weak_ptr<Wire> on = wire;
    send(kToAgent, wire, {"", [this, attempt, on] { welcome(attempt, on.lock()); }});
    beat(kToHead);
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
    feed(rdzv::link_event::Closed{outage});
}

/// Watches for silence, on both sides, while they may not hear each other.
void SimulatedSession::look(Way way) {
    Side& side = sides_[way];
    side.looks_for_silence = !side.is_over && side.heard <= silent_until_;
    if (!side.looks_for_silence) return;
    TimePoint next;
    if (way == kToAgent) {
        feed(rdzv::link_event::SilenceChecked{side.heard});
        next = link_.check_at;
    } else {
        const rdzv::SilenceWatch::Verdict verdict = head_watch_.look(parts_.now(), side.heard);
        if (verdict.are_lost) return give_up(kToHead, Errc::Timeout);
        next = verdict.next;
    }
    parts_.after(next - parts_.now(), [this, way] { look(way); });
}

void SimulatedSession::feed(const rdzv::LinkEvent& event) {
    using rdzv::LinkAction;
    if (agent().is_over) return;
    const LinkAction action = step(link_, event, parts_.now());
    if (link_.timer() != std::exchange(dial_timer_, link_.timer()) && dial_timer_ != kNever)
        parts_.after(dial_timer_ - parts_.now(), [this] { feed(rdzv::link_event::TimePassed{}); });
    switch (action) {
        case LinkAction::None: return;
        case LinkAction::Dial: return dial();
        case LinkAction::EndAsLost: return give_up(kToAgent, Errc::Closed);
        case LinkAction::EndAsAbsent:
        case LinkAction::EndAsSilent: return give_up(kToAgent, Errc::Timeout);
        case LinkAction::EndAsRefused: return give_up(kToAgent, Errc::StaleGeneration);
    }
}

void SimulatedSession::dial() {
    dialled_ = nullptr;
    const std::uint64_t attempt = ++attempt_;
    if (!parts_.is_whole() || is_silent())
        return parts_.after(redial_pause(parts_.limits),
                            [this, attempt] { dial_failed(attempt, Errc::Timeout); });
    parts_.after(leg(), [this, attempt] { meet(attempt); });
}

void SimulatedSession::meet(std::uint64_t attempt) {
    if (attempt != attempt_) return;
    feed(rdzv::link_event::Accepted{});
    dialled_ = std::make_shared<Wire>();
    parts_.after(redial_after(parts_.limits), [this, attempt] { dial_failed(attempt, Errc::Timeout); });
    parts_.after(leg() + leg() + leg(), [this, attempt, wire = dialled_] { prove(attempt, wire); });
}

void SimulatedSession::welcome(std::uint64_t attempt, const WirePtr& wire) {
    if (attempt != attempt_) return;
    ++attempt_;
    dialled_ = nullptr;
    move_to(agent(), wire, parts_.now());
    feed(rdzv::link_event::Connected{});
    beat(kToAgent);
}

void SimulatedSession::dial_failed(std::uint64_t attempt, Errc why) {
    if (attempt != attempt_) return;
    ++attempt_;
    dialled_ = nullptr;
    feed(rdzv::link_event::DialFailed{{why, "", 0}});
}

}  // namespace ddprun::test
