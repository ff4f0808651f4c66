#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/wire/frame.h"
#include "rendezvous/wire/message.h"
#include "rendezvous/wire/session.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {

class Connection;

/// Whoever owns a Connection hears from it. Called on the loop's thread.
class ConnectionOwner {
  public:
    virtual ~ConnectionOwner() = default;
    /// The owner must not destroy the connection in here; fail() and finish() are fine.
    virtual void on_frame(Connection& connection, Frame frame) = 0;
    /// The first byte that the peer said, by TLS or not. True: it speaks something else than frames, and what
    /// it sends, this byte too, comes by on_bytes.
    virtual bool on_first_byte(Connection&, char) { return false; }
    virtual void on_bytes(Connection&, std::string_view) {}
    /// Never from inside a call of the owner; nothing follows, unless the connection still keeps messages:
    /// then once more when these are given up. The owner may destroy the connection now.
    virtual void on_closed(Connection& connection, const Error& why) = 0;
    /// All that was to be sent has gone to the kernel. The owner must not destroy the connection in here.
    virtual void on_written(Connection&) {}
};

/// One connection, of TCP or a Unix socket, on the event loop: frames in, messages out, nothing blocks.
///
/// What the peer does not take is queued up to a limit, beyond which the connection fails (Limit). Owns the
/// socket; destroying it hands what is queued to the kernel as far as it takes it, and closes at once. TLS is
/// spoken where a context is given: by a client at once, by a server with those who begin so.
class Connection {
  public:
    struct Options {
        std::string peer;  ///< for logs and errors: "10.0.0.5:41234"
        FrameLimits limits = kStrangerLimits;
        std::size_t output_bytes = ServerLimits{}.output_bytes;
        std::shared_ptr<const TlsContext> client_tls = nullptr;
        std::shared_ptr<const TlsContext> server_tls = nullptr;
        std::uint64_t id = 0;  ///< the owner's, by which it finds what belongs to the connection
    };
    /// Starts reading. Error: System (epoll, memory).
    static Result<std::unique_ptr<Connection>> adopt(os::EventLoop& loop, UniqueFd fd, Options options,
                                                     ConnectionOwner& owner);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    /// Sends after the current batch of events, together with what else the batch says to this peer, or as
    /// soon as the peer takes it. A message that could not be encoded fails the connection.
    void send(Result<EncodedMessage> message);
    /// A message that another connection need not repeat.
    void beat(const Heartbeat& heartbeat);
    /// The same at once, by a Keepalive's thread (env/os/keepalive.h). Uses nothing of the loop; what fails
    /// is noticed by the loop's thread later.
    void keep_alive(const Heartbeat& heartbeat);
    /// Sends what is queued and a last Failure, lets the peer read it, then closes with `why`; nothing more
    /// is received. Waits for the peer `goodbye` at most.
    void refuse(const Failure& last_words, Error why, Duration goodbye);
    /// Says a last Failure as far as the kernel takes it now, and closes: for peers that must not be waited
    /// for.
    void dismiss(const Failure& last_words, Error why);
    /// Closes at once.
    void fail(Error why);
    /// Takes nothing more from the peer until it is resumed, so that the peer has to wait. One that goes
    /// meanwhile is not waited for: what it had sent may be lost.
    void pause_reading();
    void resume_reading();

    // An agent's session (session.h) is carried by one connection after the other. From keep_messages() on
    // what is sent is kept until it is acknowledged, also when this connection was lost, until another one
    // goes on from it or it is given up.
    void keep_messages() { outbox_.keep(); }
    [[nodiscard]] bool keeps_messages() const { return outbox_.keeps(); }
    [[nodiscard]] std::uint64_t acknowledged() const { return outbox_.acknowledged(); }
    /// Error: Protocol.
    Status acknowledge(std::uint64_t received) { return outbox_.acknowledge(received); }
    /// Takes over from the one that carried the session before; what that one's peer has not acknowledged is
    /// said again.
    void go_on_from(Connection& earlier);
    /// No other connection comes: on_closed follows, with the reason for which this one was lost.
    void give_up();
    /// The owner of the next message.
    void hand_to(ConnectionOwner& owner) { owner_ = &owner; }

    void set_limits(FrameLimits limits) { decoder_.set_limits(limits); }
    void limit_output(std::size_t bytes) { options_.output_bytes = bytes; }
    [[nodiscard]] const std::string& peer() const { return options_.peer; }
    [[nodiscard]] std::uint64_t id() const { return options_.id; }
    void set_id(std::uint64_t id) { options_.id = id; }
    /// This side's numeric address, without the port; "" when the kernel cannot tell.
    [[nodiscard]] std::string local_host() const;
    /// The other side's, likewise.
    [[nodiscard]] Endpoint remote() const;
    [[nodiscard]] std::string remote_host() const { return remote().host; }
    /// What is said here is sealed; then its binding (tls.h), else "".
    [[nodiscard]] bool is_sealed() const { return tls_ != nullptr; }
    [[nodiscard]] std::string tls_binding() const { return tls_ ? tls_->binding() : ""; }
    [[nodiscard]] bool is_open() const { return state_ == State::Open; }
    /// What is sent reaches the peer, by this connection or by another one.
    [[nodiscard]] bool takes_messages() const {
        return is_open() || (state_ == State::Closed && outbox_.keeps());
    }
    /// Not written yet or, of a session, not acknowledged.
    [[nodiscard]] std::size_t kept_bytes() const { return outbox_.bytes(); }
    /// When bytes came last, whatever they were.
    [[nodiscard]] TimePoint last_heard() const { return last_heard_; }

  private:
    enum class State { Open, SayingGoodbye, Closed };
    enum class Speech { Unknown, Frames, Bytes };

    Connection(os::EventLoop& loop, UniqueFd fd, Options options, ConnectionOwner& owner);
    void on_events(std::uint32_t events);
    void read();
    Result<std::string_view> unseal(std::string_view bytes);
    void hear(std::string_view bytes);
    void deliver();
    void write_soon();
    void write();
    std::optional<int> write_some();
    std::optional<int> write_parts();
    std::optional<int> write_sealed();
    [[nodiscard]] bool can_write() const;
    void after_write();
    void update_watch();
    void tell_of_end();
    void write_when_worth_it();

    os::EventLoop& loop_;
    UniqueFd fd_;
    Options options_;
    ConnectionOwner* owner_;
    FrameDecoder decoder_;
    Speech speech_ = Speech::Unknown;
    Outbox outbox_;
    std::unique_ptr<TlsSession> tls_;  ///< null: nothing is sealed
    State state_ = State::Open;
    bool said_all_ = false;  ///< saying goodbye, and our side is shut down
    std::uint32_t watched_ = 0;
    bool write_posted_ = false;
    bool is_paused_ = false;
    std::optional<Error> why_;
    os::EventLoop::TimerId goodbye_timer_ = 0;
    TimePoint last_heard_;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< for what was posted when we are gone
};

/// The other end's numeric address, "unknown peer" when the kernel cannot tell.
std::string peer_name(int fd);
/// Small messages at once, and a network that is gone is noticed within kUserTimeout.
void tune_connection(int fd);

}  // namespace ddprun::rdzv
