#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "rendezvous/wire/frame.h"
#include "rendezvous/wire/session.h"
#include "tests/simulation/dice.h"

namespace ddprun::test {

/// What is between one agent and one head in simulated time. Both ends of the session are those of
/// rendezvous/wire/session, and what travels are the bytes of the wire, in pieces; what
/// rendezvous/client/agent_link and rendezvous/serve/server do when a connection is reset or silent is done
/// here after them, with their time-outs.
///
/// Checked: every message is heard once and in order, and an outage that should be survived ends no session.
/// What was said before the session's end may be lost with it.
class SimulatedSession {
  public:
    struct Parts {
        Dice& dice;
        rdzv::Heartbeats limits;
        std::function<TimePoint()> now = {};
        std::function<void(Duration, std::function<void()>)> after = {};
        std::function<Duration()> delay = {};  ///< of a piece on its way
        /// Both processes live, and the network between them: but for what is done here.
        std::function<bool()> is_whole = {};
        /// What is under way: whoever is to hear it lives, and no cable is cut.
        std::function<bool()> can_arrive = {};
        std::function<void(rdzv::Frame)> head_hears = {}, agent_hears = {};
        /// The session is over for that side. Timeout, Closed; Refused: for the head it was over before.
        std::function<void(Errc)> head_loses = {}, agent_loses = {};
        std::function<void(const std::string&)> wrong = {};
    };
    explicit SimulatedSession(Parts parts);
    SimulatedSession(const SimulatedSession&) = delete;

    void say_to_head(Result<rdzv::EncodedMessage> message) { say(kToHead, *std::move(message)); }
    void say_to_agent(Result<rdzv::EncodedMessage> message) { say(kToAgent, *std::move(message)); }

    // What goes wrong.
    /// All connections that there are, also one that was just made to go on with; what is under way by them
    /// is lost.
    void reset();
    /// Nothing passes for a while. `is_noticed`: the kernels say so before the heartbeats do.
    void fall_silent(Duration span, bool is_noticed);
    /// From here on who finds the session over may be right.
    void may_end() { may_end_ = true; }
    /// Others are slow to shake hands from here on.
    void answer_slowly() { slowest_leg_ = std::chrono::milliseconds(30); }

    /// The process on that side is gone: it decides nothing any more.
    void agent_ends() { agent().is_over = true; }
    void head_ends() { head().is_over = true; }
    [[nodiscard]] std::uint64_t resumed() const { return resumed_; }

  private:
    enum Way : std::size_t { kToHead, kToAgent };  ///< and whoever hears what goes there
    /// What arrives at once: bytes, or a word of the handshake.
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
        std::deque<std::string> unheard;  ///< what it is still to hear
        WirePtr wire;                     ///< null: it knows that the connection is lost
        rdzv::FrameDecoder decoder{rdzv::kPeerLimits};
        TimePoint heard{};
        std::optional<rdzv::SilenceWatch> watch;
        std::uint64_t outage = 0;  ///< the timer of another one has been cancelled
        bool owes_beat = false, is_over = false;
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
    void outage_is_over();
    void look(Way side);
    void redial();
    void meet(std::uint64_t attempt, std::uint64_t received);
    void prove(std::uint64_t attempt, const WirePtr& wire, std::uint64_t received);
    void welcome(std::uint64_t attempt, const WirePtr& wire, std::uint64_t received, std::uint64_t begins);
    void dial_failed(std::uint64_t attempt, Errc why);
    [[nodiscard]] Duration leg() { return parts_.dice.span(std::chrono::microseconds(50), slowest_leg_); }
    static void move_to(Side& side, const WirePtr& wire, TimePoint now);

    Parts parts_;
    std::array<Side, 2> sides_;
    TimePoint silent_until_{};
    Duration silence_{};
    TimePoint last_reset_{};
    int resets_ = 0;  ///< one right behind the other
    Duration slowest_leg_ = std::chrono::microseconds(400);
    bool may_end_ = false;
    std::uint64_t resumed_ = 0;
    // The agent's look for another connection.
    std::uint64_t attempt_ = 0;
    bool is_dialling_ = false, has_met_somebody_ = false;
    WirePtr dialled_;
    bool redial_is_due_ = false;
    std::uint64_t redials_ = 0;  ///< the timer of another one has been cancelled
    std::optional<rdzv::Outage> outage_;
    bool has_grace_ = false;
};

}  // namespace ddprun::test
