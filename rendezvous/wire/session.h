#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/wire/message.h"
#include "rendezvous/wire/protocol_limits.h"

/// The session between an agent and the controller, which outlives its connections. Pure.
///
/// All messages of a session except heartbeats are counted, in each direction. The sender keeps a message
/// until a heartbeat of the other side acknowledges it. When a connection is lost, the agent makes another
/// one. There each side begins with a heartbeat, and goes on after the messages that the other's heartbeat
/// counts. So no message is lost or processed twice.
///
/// Messages are repeated, because most of them are no state that could be told anew: lines of output, a
/// notice, an answer of the store, an order that follows another. Each kind would need a way of its own to be
/// asked again and answered once. What is state (the generation, the place, workers that wait) is told by an
/// AgentHello to a head that does not have it: at the first connection, and after a fail-over.
namespace ddprun::rdzv {

/// How a connection ended, for the session that it carried.
enum class Outage {
    Broken,       ///< closed or reset: usually a dead process, sometimes a network device
    Unreachable,  ///< a network error: the peer may still live
    Final,        ///< ended for a stated reason: the session cannot be resumed
};
Outage outage_of(const Error& why);

/// How long a session without a connection waits for another one. It is short for Broken, which usually
/// means a dead process.
Duration wait_for_redial(Outage outage, const Heartbeats& limits);

/// The messages to a peer that have not been written yet and, of a session, those that have not been
/// acknowledged.
class Outbox {
  public:
    /// Counts and keeps messages from now on, for a session.
    void keep() { keeps_ = true; }
    [[nodiscard]] bool keeps() const { return keeps_; }
    /// Drops all messages and stops keeping them.
    void clear();

    void push(EncodedMessage message);
    /// Pushes the last message of a session, also while the session is resumed.
    void push_last(EncodedMessage message) { add({std::move(message), 0, keeps_}); }
    void push_heartbeat(EncodedMessage message) { add({std::move(message), 0, false}); }

    [[nodiscard]] bool is_written() const { return waiting_.empty(); }
    [[nodiscard]] std::size_t unwritten_bytes() const { return unwritten_bytes_; }
    [[nodiscard]] std::size_t bytes() const { return unwritten_bytes_ + kept_bytes_; }
    /// Fills in the bytes to be written next and returns the number of parts.
    std::size_t fill(std::span<iovec> parts) const;
    /// Removes bytes that have been written.
    void consume(std::size_t bytes);

    /// The peer has received this many messages of the session. Error: Protocol, when that is impossible.
    Status acknowledge(std::uint64_t received);
    /// Takes the session over from the outbox of its earlier connection. Its messages wait for the first
    /// acknowledgement on the new connection, which says where to resume.
    void resume(Outbox&& earlier);

  private:
    struct Item {
        EncodedMessage message;
        std::size_t written = 0;
        bool is_counted = false;
        [[nodiscard]] std::size_t size() const { return message.head.size() + message.blob.size(); }
    };
    void add(Item item);
    void hold(Item item);

    bool keeps_ = false;
    bool is_resuming_ = false;        ///< until the first acknowledgement on this connection
    std::uint64_t acknowledged_ = 0;  ///< messages of the session before those in kept_
    std::deque<Item> kept_;           ///< written and not acknowledged, or held back while resuming
    std::size_t held_ = 0;            ///< of kept_, at its end: never written
    std::deque<Item> waiting_;
    std::size_t kept_bytes_ = 0, unwritten_bytes_ = 0;
};

/// Counts the received messages of a session.
class Inbox {
  public:
    /// Counts a message that is no heartbeat.
    void take(std::size_t bytes);
    /// True when so much has come that it should be acknowledged before the next regular heartbeat.
    [[nodiscard]] bool is_due() const;
    /// The heartbeat that acknowledges all received messages.
    Heartbeat acknowledgement();

  private:
    std::uint64_t received_ = 0, acknowledged_ = 0;
    std::size_t unacknowledged_bytes_ = 0;
};

/// Decides when to look for silent peers, and whether they are lost.
///
/// No peer is lost at a first look: messages that came while we could not read (a long batch of events, a
/// stopped process) are read before the second look. When we have stood still ourselves, the peers may have
/// too (a machine that slept, a debugger that stops all): they get a third of the timeout to speak.
class SilenceWatch {
  public:
    SilenceWatch(Heartbeats limits, TimePoint now) : limits_(limits), due_(now + limits.interval) {}

    struct Verdict {
        bool are_lost = false;  ///< the peers last heard `timeout` ago or earlier
        TimePoint next;         ///< the time of the next look
    };
    /// `heard`: the earliest of the times at which each peer was heard last; kNever: there are no peers.
    Verdict look(TimePoint now, TimePoint heard);

  private:
    Verdict wait_until(TimePoint next, bool is_second);

    Heartbeats limits_;
    TimePoint due_;
    bool is_second_ = false;
};

}  // namespace ddprun::rdzv
