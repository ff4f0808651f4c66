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

/// The owner of a Connection, which receives its events. Called on the loop's thread.
class ConnectionOwner {
  public:
    virtual ~ConnectionOwner() = default;
    /// The owner must not destroy the connection in here; fail() and finish() are fine.
    virtual void on_frame(Connection& connection, Frame frame) = 0;
    /// The first byte of the peer, with TLS or without. True: the peer does not send frames; all its bytes,
    /// this one too, are passed to on_bytes().
    virtual bool on_first_byte(Connection&, char) { return false; }
    virtual void on_bytes(Connection&, std::string_view) {}
    /// The connection is closed. Never called from inside a call of the owner. It is the last call, unless
    /// the connection keeps messages: then it is called again after give_up(). The owner may destroy the
    /// connection now.
    virtual void on_closed(Connection& connection, const Error& why) = 0;
    /// The kernel has taken all queued bytes. The owner must not destroy the connection in here.
    virtual void on_written(Connection&) {}
};

/// One connection, by TCP or a Unix socket, on the event loop: receives frames and sends messages without
/// blocking.
///
/// Messages that the peer does not take are queued up to a limit, beyond which the connection fails (Limit).
/// Owns the socket; the destructor writes what the kernel takes of the queue, and closes at once. A client
/// with a TLS context begins TLS at once; a server with one uses TLS with peers that begin it.
class Connection {
  public:
    struct Options {
        std::string peer;  ///< for logs and errors: "10.0.0.5:41234"
        FrameLimits limits = kStrangerLimits;
        std::size_t output_bytes = ServerLimits{}.output_bytes;
        std::shared_ptr<const TlsContext> client_tls = nullptr;
        std::shared_ptr<const TlsContext> server_tls = nullptr;
        std::uint64_t id = 0;  ///< for the owner's use
    };
    /// Starts reading. Error: System (epoll, memory).
    static Result<std::unique_ptr<Connection>> adopt(os::EventLoop& loop, UniqueFd fd, Options options,
                                                     ConnectionOwner& owner);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    /// Sends a message after the current batch of events, together with the batch's other messages to this
    /// peer, or as soon as the peer takes it. A message that could not be encoded fails the connection.
    void send(Result<EncodedMessage> message);
    /// Sends a heartbeat, which the session's next connection does not repeat.
    void beat(const Heartbeat& heartbeat);
    /// Sends a heartbeat at once, on a Keepalive's thread (env/os/keepalive.h), without using the loop. The
    /// loop's thread notices a failure later.
    void keep_alive(const Heartbeat& heartbeat);
    /// Sends the queued messages and a last Failure, lets the peer read them for `goodbye` at most, then
    /// closes with `why`. Nothing more is received.
    void refuse(const Failure& failure, Error why, Duration goodbye);
    /// Writes a last Failure as far as the kernel takes it now, and closes without waiting for the peer.
    void dismiss(const Failure& failure, Error why);
    /// Closes at once.
    void fail(Error why);
    /// Stops reading until resume_reading(), so that the peer has to wait. If the peer closes meanwhile, its
    /// unread messages may be lost.
    void pause_reading();
    void resume_reading();

    // An agent's session (session.h) uses one connection after the other. After keep_messages() sent messages
    // are kept until they are acknowledged. If the connection is lost, they are kept until another connection
    // takes them over (resume) or give_up().
    void keep_messages() { outbox_.keep(); }
    [[nodiscard]] bool keeps_messages() const { return outbox_.keeps(); }
    /// Processes a heartbeat of the session. Error: Protocol.
    Status acknowledge(std::uint64_t received);
    /// Takes the session over from its earlier connection. `received` tells the peer where to go on; the
    /// peer's own heartbeat tells us.
    void resume(Connection& earlier, const Heartbeat& received);
    /// Drops the kept messages of a lost connection; on_closed follows, with the reason of the loss.
    void give_up();
    /// Replaces the owner.
    void hand_to(ConnectionOwner& owner) { owner_ = &owner; }

    void set_limits(FrameLimits limits) { decoder_.set_limits(limits); }
    void limit_output(std::size_t bytes) { options_.output_bytes = bytes; }
    [[nodiscard]] const std::string& peer() const { return options_.peer; }
    [[nodiscard]] std::uint64_t id() const { return options_.id; }
    void set_id(std::uint64_t id) { options_.id = id; }
    /// This side's numeric address, without the port; "" when the kernel cannot tell.
    [[nodiscard]] std::string local_host() const;
    /// The peer's numeric address; empty when the kernel cannot tell.
    [[nodiscard]] Endpoint remote() const;
    [[nodiscard]] std::string remote_host() const { return remote().host; }
    /// True when the connection uses TLS; tls_binding() is then its binding (tls.h), else "".
    [[nodiscard]] bool is_sealed() const { return tls_ != nullptr; }
    [[nodiscard]] std::string tls_binding() const { return tls_ ? tls_->binding() : ""; }
    [[nodiscard]] bool is_open() const { return state_ == State::Open; }
    /// True while sent messages are delivered, by this connection or by the session's next one.
    [[nodiscard]] bool takes_messages() const {
        return is_open() || (state_ == State::Closed && outbox_.keeps());
    }
    /// Bytes that are not written yet or, in a session, not acknowledged.
    [[nodiscard]] std::size_t kept_bytes() const { return outbox_.bytes(); }
    /// The time at which the last bytes were received.
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
    std::unique_ptr<TlsSession> tls_;  ///< null without TLS
    State state_ = State::Open;
    bool said_all_ = false;  ///< everything is written, and our side is shut down
    std::uint32_t watched_ = 0;
    bool write_posted_ = false;
    bool is_paused_ = false;
    std::optional<Error> why_;
    os::EventLoop::TimerId goodbye_timer_ = 0;
    TimePoint last_heard_;
    std::shared_ptr<bool> alive_ =
        std::make_shared<bool>(true);  ///< false after our end, for posted handlers
};

/// The peer's numeric address, "unknown peer" when the kernel cannot tell.
std::string peer_name(int fd);
/// Sets a socket to send small messages at once and to notice a lost network within kUserTimeout.
void tune_connection(int fd);

}  // namespace ddprun::rdzv
