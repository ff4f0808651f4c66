#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "rendezvous/client/link_state.h"
#include "rendezvous/wire/frame.h"
#include "rendezvous/wire/session.h"
#include "tests/simulation/dice.h"

namespace ddprun::test {

/// A session between one agent and one head in simulated time. Both ends are those of
/// rendezvous/wire/session, and they exchange the bytes of the wire in pieces. When the agent dials again,
/// and when its session is over, is decided by rendezvous/client/link_state; the network between is
/// simulated.
///
/// It checks that every message arrives once and in order, and that an outage that should be survived ends no
/// session. Messages on the way may be lost when the session ends.
class SimulatedSession {
  public:
    struct Parts {
        Dice& dice;
        rdzv::Heartbeats limits;
        std::function<TimePoint()> now = {};
        std::function<void(Duration, std::function<void()>)> after = {};
        std::function<Duration()> delay = {};  ///< of a piece on its way
        /// True when both processes and the network between them work, apart from this session's own faults.
        std::function<bool()> is_whole = {};
        /// True when a piece on its way can arrive: the receiver lives, and no cable is cut.
        std::function<bool()> can_arrive = {};
        std::function<void(rdzv::Frame)> head_hears = {}, agent_hears = {};
        /// Called when the session is over for that side: Timeout, Closed, or StaleGeneration from the head,
        /// for which it was over before.
        std::function<void(Errc)> head_loses = {}, agent_loses = {};
        std::function<void(const std::string&)> wrong = {};
    };
    explicit SimulatedSession(Parts parts);
    SimulatedSession(const SimulatedSession&) = delete;

    void say_to_head(Result<rdzv::EncodedMessage> message) { say(kToHead, *std::move(message)); }
    void say_to_agent(Result<rdzv::EncodedMessage> message) { say(kToAgent, *std::move(message)); }

    // Faults.
    /// Breaks all connections, also a new one that shall go on with the session. Pieces on the way are lost.
    void reset();
    /// Lets nothing pass for a while. `is_noticed`: the kernels report it before the heartbeats do.
    void fall_silent(Duration span, bool is_noticed);
    /// From now on a side may take the session for over.
    void may_end() { may_end_ = true; }
    /// From now on handshakes are slow.
    void answer_slowly() { slowest_leg_ = std::chrono::milliseconds(30); }

    /// The process on that side has ended.
    void agent_ends() { agent().is_over = true; }
    void head_ends() { head().is_over = true; }

  private:
    enum Way : std::size_t { kToHead, kToAgent };  ///< a direction, and the side that receives
    /// What arrives at once: bytes, or a step of the handshake.
    struct Piece {
        std::string bytes;
        std::function<void()> handshake;
    };
    struct Wire {
        std::array<std::deque<Piece>, 2> under_way;
        std::array<TimePoint, 2> last_arrival{};
        bool is_broken = false;
    };
    using WirePtr = std::shared_ptr<Wire>;
    struct Side {
        rdzv::Outbox out;
        rdzv::Inbox in;
        std::deque<std::string> unheard;  ///< messages that it has still to hear
        WirePtr wire;                     ///< null: this side knows that the connection is lost
        rdzv::FrameDecoder decoder{rdzv::kPeerLimits};
        TimePoint heard{};
        bool looks_for_silence = false, owes_beat = false, is_over = false;
    };

    Side& head() { return sides_[kToHead]; }
    Side& agent() { return sides_[kToAgent]; }
    static Way back(Way way) { return way == kToHead ? kToAgent : kToHead; }
    void say(Way way, rdzv::EncodedMessage message);
    void write(Way way);
    void send(Way way, const WirePtr& wire, Piece piece);
    void arrive(Way way, const WirePtr& wire);
    void hear(Way way, rdzv::Frame frame);
    void beat(Way way);
    void give_up(Way side, Errc code);
    void check(const Status& status);
    [[nodiscard]] bool is_silent() const { return parts_.now() < silent_until_; }

    void head_closed(const WirePtr& wire, rdzv::Outage outage);
    void agent_closed(const WirePtr& wire, rdzv::Outage outage);
    static void close(const WirePtr& wire);
    void look(Way side);
    void feed(const rdzv::LinkEvent& event);
    void dial();
    void meet(std::uint64_t attempt);
    void prove(std::uint64_t attempt, const WirePtr& wire);
    void welcome(std::uint64_t attempt, const WirePtr& wire);
    void dial_failed(std::uint64_t attempt, Errc why);
    [[nodiscard]] Duration leg() { return parts_.dice.span(std::chrono::microseconds(50), slowest_leg_); }
    static void move_to(Side& side, const WirePtr& wire, TimePoint now);

    Parts parts_;
    std::array<Side, 2> sides_;
    TimePoint silent_until_{};
    Duration silence_{};
    TimePoint last_reset_{};
    int resets_ = 0;  ///< the number of resets shortly after one another
    Duration slowest_leg_ = std::chrono::microseconds(400);
    bool may_end_ = false;
    rdzv::SilenceWatch head_watch_;
    std::uint64_t head_outage_ = 0;  ///< the number of the outage; timers of earlier ones do nothing
    rdzv::LinkState link_;           ///< the agent's
    TimePoint dial_timer_ = kNever;
    std::uint64_t attempt_ =
        0;             ///< the number of the agent's dial; what belongs to earlier ones does nothing
    WirePtr dialled_;  ///< null until the dial has met the head
};

}  // namespace ddprun::test
