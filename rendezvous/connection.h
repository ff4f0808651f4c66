#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/frame.h"
#include "rendezvous/message.h"

namespace ddprun::rdzv {

class Connection;

/// Whoever owns a Connection hears from it. Called on the loop's thread.
class ConnectionOwner {
  public:
    virtual ~ConnectionOwner() = default;
    /// The owner must not destroy the connection in here; fail() and finish() are fine.
    virtual void on_frame(Connection& connection, Frame frame) = 0;
    /// The first byte that the peer sent. True: it speaks something else than frames, and what it sends, this byte too,
    /// comes by on_bytes.
    virtual bool on_first_byte(Connection&, char) { return false; }
    virtual void on_bytes(Connection&, std::string_view) {}
    /// Once, never from inside a call of the owner; nothing follows. The owner may destroy the connection
    /// now.
    virtual void on_closed(Connection& connection, const Error& why) = 0;
    /// All that was to be sent has gone to the kernel. The owner must not destroy the connection in here.
    virtual void on_written(Connection&) {}
};

/// One TCP connection on the event loop: frames in, messages out, nothing blocks.
///
/// What the peer does not take is queued up to a limit, beyond which the connection fails (Limit). Owns the
/// socket; destroying it hands what is queued to the kernel as far as it takes it, and closes at once.
class Connection {
  public:
    struct Options {
        std::string peer;  ///< for logs and errors: "10.0.0.5:41234"
        FrameLimits limits = kStrangerLimits;
        std::size_t output_bytes = ServerLimits{}.output_bytes;
    };
    /// Starts reading. Error: System (epoll).
    static Result<std::unique_ptr<Connection>> adopt(os::EventLoop& loop, UniqueFd fd, Options options,
                                                     ConnectionOwner& owner);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    /// Sends after the current batch of events, together with what else the batch says to this peer, or as soon
    /// as the peer takes it. A message that could not be encoded fails the connection.
    void send(Result<EncodedMessage> message);
    /// Sends what is queued and a last Failure, lets the peer read it, then closes with `why`; nothing more
    /// is received. Waits for the peer `goodbye` at most.
    void refuse(const Failure& last_words, Error why, Duration goodbye);
    /// Says a last Failure as far as the kernel takes it now, and closes: for peers that must not be waited for.
    void dismiss(const Failure& last_words, Error why);
    /// Closes at once.
    void fail(Error why);

    void set_limits(FrameLimits limits) { decoder_.set_limits(limits); }
    [[nodiscard]] const std::string& peer() const { return options_.peer; }
    /// This side's numeric address, without the port; "" when the kernel cannot tell.
    [[nodiscard]] std::string local_host() const;
    /// The other side's, likewise.
    [[nodiscard]] std::string remote_host() const;
    [[nodiscard]] bool is_open() const { return state_ == State::Open; }
    [[nodiscard]] std::size_t queued_bytes() const { return queued_bytes_; }
    /// When bytes came last, whatever they were.
    [[nodiscard]] TimePoint last_heard() const { return last_heard_; }

  private:
    enum class State { Open, SayingGoodbye, Closed };
    enum class Speech { Unknown, Frames, Bytes };
    /// Bytes on their way: a head of its own, then a value that others may share.
    struct Chunk {
        EncodedMessage bytes;
        std::size_t sent = 0;
        [[nodiscard]] std::size_t left() const { return bytes.head.size() + bytes.blob.size() - sent; }
    };

    Connection(os::EventLoop& loop, UniqueFd fd, Options options, ConnectionOwner& owner);
    void on_events(std::uint32_t events);
    void read();
    void deliver();
    void write_soon();
    void write();
    std::optional<int> write_some();
    void consume(std::size_t bytes);
    void after_write();
    void update_watch();

    os::EventLoop& loop_;
    UniqueFd fd_;
    Options options_;
    ConnectionOwner& owner_;
    FrameDecoder decoder_;
    Speech speech_ = Speech::Unknown;
    std::deque<Chunk> output_;
    std::size_t queued_bytes_ = 0;
    State state_ = State::Open;
    bool said_all_ = false;  ///< saying goodbye, and our side is shut down
    std::uint32_t watched_ = 0;
    bool write_posted_ = false;
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
