#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <span>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/wire/message.h"
#include "rendezvous/wire/protocol_limits.h"

/// What an agent and the controller decide about the session between them, which outlives its connections.
/// Pure.
///
/// All messages of a session but heartbeats are counted, in each direction. Whoever sent one keeps it until
/// the other side has said that it came; when a connection is lost the agent makes another one, on which both
/// say how much they have received, and go on from there: nothing is lost, and nothing is heard twice.
namespace ddprun::rdzv {

/// How a connection ended, for the session that it carried.
enum class Outage {
    Broken,  ///< closed or reset: as a process that has ended leaves it, but also what a device on the way
             ///< does
    Unreachable,  ///< the network is gone: as silent as silence
    Final,        ///< somebody said why: there is nothing to go on with
};
Outage outage_of(const Error& why);

/// How long a session without a connection waits for another one. A node whose process has died is lost by
/// it, so it is short where that is what it looks like.
Duration wait_for_redial(Outage outage, const Heartbeats& limits);

/// An agent looks for another connection beside a silent one from the first of these on, and gives an address
/// the second to answer.
inline Duration redial_after(const Heartbeats& limits) { return limits.timeout / 3; }
inline Duration redial_pause(const Heartbeats& limits) { return limits.timeout / 12; }
/// Before it looks again. Who did not answer has taken so long already: a network that comes back is found
/// within one pause.
inline Duration pause_behind(const Error& why, const Heartbeats& limits) {
    return why.code == Errc::Timeout ? Duration::zero() : redial_pause(limits);
}

/// The messages to a peer that have not been written yet and, of a session, those that have not been
/// acknowledged.
class Outbox {
  public:
    /// From here on it is a session's: messages are counted and kept.
    void keep() { keeps_ = true; }
    [[nodiscard]] bool keeps() const { return keeps_; }
    /// Forgets all; it is no session's any more.
    void clear();

    void push(EncodedMessage message) { add({std::move(message), 0, keeps_}); }
    void push_heartbeat(EncodedMessage message) { add({std::move(message), 0, false}); }

    [[nodiscard]] bool is_written() const { return waiting_.empty(); }
    [[nodiscard]] std::size_t unwritten_bytes() const { return unwritten_bytes_; }
    [[nodiscard]] std::size_t bytes() const { return unwritten_bytes_ + kept_bytes_; }
    /// So many messages of the session the peer is known to have.
    [[nodiscard]] std::uint64_t acknowledged() const { return acknowledged_; }
    /// What is to be written next, as far as there is room; the number of parts.
    std::size_t fill(std::span<iovec> parts) const;
    /// So much of it has been written.
    void consume(std::size_t bytes);

    /// The peer has so many messages of the session. Error: Protocol, when that cannot be.
    Status acknowledge(std::uint64_t received);
    /// Behind what is to be written here comes all of the session that `earlier` carried and that is not
    /// acknowledged.
    void go_on(Outbox&& earlier);

  private:
    struct Item {
        EncodedMessage message;
        std::size_t written = 0;
        bool is_counted = false;
        [[nodiscard]] std::size_t size() const { return message.head.size() + message.blob.size(); }
    };
    void add(Item item);

    bool keeps_ = false;
    std::uint64_t acknowledged_ = 0;  ///< messages of the session before those in kept_
    std::deque<Item> kept_;           ///< written
    std::deque<Item> waiting_;
    std::size_t kept_bytes_ = 0, unwritten_bytes_ = 0;
};

/// Counts what has come of a session.
class Inbox {
  public:
    /// A message has come, but no heartbeat. False: it had come by an earlier connection, too.
    bool take(std::size_t bytes);
    /// The peer goes on behind so many of its messages: those that came already are passed over. Error:
    /// Protocol, when some would be missing.
    Status go_on(std::uint64_t begins);
    [[nodiscard]] std::uint64_t received() const { return received_; }

    /// So much has come that the peer should hear of it before the next heartbeat, for it keeps all of that.
    [[nodiscard]] bool owes_a_word() const;
    /// What a heartbeat says.
    Heartbeat word();

  private:
    std::uint64_t received_ = 0;
    std::uint64_t passed_over_ = 0;
    std::uint64_t told_ = 0;
    std::size_t untold_bytes_ = 0;
};

/// When to look who has been silent for too long, and whether those who have are lost.
///
/// Nobody is lost at a first look. What others said while we could not read (a long batch of events, a
/// stopped process) is read before the second one; and when we were away ourselves for long, others may have
/// been away with us (a machine that slept, a debugger that stops all): they get a third of the time-out to
/// speak.
class SilenceWatch {
  public:
    SilenceWatch(Heartbeats limits, TimePoint now) : limits_(limits), due_(now + limits.interval) {}

    struct Verdict {
        bool are_lost = false;  ///< those who were heard `timeout` ago or earlier
        TimePoint next;         ///< the time of the next look
    };
    /// `heard`: when whoever has been silent for longest was heard last; kNever: there is nobody.
    Verdict look(TimePoint now, TimePoint heard);

  private:
    Verdict wait_until(TimePoint next, bool is_second);

    Heartbeats limits_;
    TimePoint due_;
    bool is_second_ = false;
};

}  // namespace ddprun::rdzv
