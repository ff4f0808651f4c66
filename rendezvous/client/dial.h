#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/io/background_call.h"
#include "env/io/resolve.h"
#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"

namespace ddprun::rdzv {

/// Looks host names up without blocking the loop.
class Resolver {
  public:
    using Handler = std::function<void(Result<SocketAddresses>)>;

    explicit Resolver(os::EventLoop& loop) : loop_(loop) {}
    ~Resolver() { forget(); }
    Resolver(const Resolver&) = delete;
    Resolver& operator=(const Resolver&) = delete;

    /// Calls `handler` later, once, on the loop's thread. A look-up in progress is dropped.
    /// The handler's errors: NotFound (with the resolver's own text), System.
    void look_up(const Endpoint& endpoint, Handler handler);
    void forget();

  private:
    os::EventLoop& loop_;
    std::optional<BackgroundCall<Result<SocketAddresses>>> call_;
    os::EventLoop::TimerId soon_ = 0;  ///< calls the handler when the answer needs no thread
};

struct DialOptions {
    std::vector<Endpoint> controllers;  ///< addresses of the one controller
    Credentials credentials;
    Hello hello;                                      ///< the agent's, with the session to resume, if any
    Duration connecting;                              ///< time for one address to answer
    Duration handshake;                               ///< time from there to the proof
    std::string when_token_differs = {};              ///< appended to the error when our token is refused
    std::shared_ptr<const TlsContext> tls = nullptr;  ///< a client's context; null without `--tls`
    /// Called when an address has accepted a connection: the controller's process probably lives.
    std::function<void()> met = [] {};
};

/// A connection on which both sides have proved that they know the token.
struct Dialled {
    std::unique_ptr<Connection> connection;  ///< hand_to() its owner
    std::string nonce;                       ///< the nonce of its Hello
    std::vector<Endpoint>
        found;  ///< the controller's numeric addresses known so far, this connection's first
};

/// One attempt to connect to the controller, on the event loop; never blocks. All names are looked up at
/// once. Their addresses are tried in turn, the next one after 50 ms or when the last one has failed. The
/// first connection whose handshake succeeds is taken.
class Dial final : private ConnectionOwner {
  public:
    /// Called once, from the loop; may destroy the Dial. Errors: is_worth_coming_again(), or the last error
    /// from an address that answered.
    using Handler = std::function<void(Result<Dialled>)>;

    /// `loop` must outlive the Dial.
    Dial(os::EventLoop& loop, DialOptions options, Handler handler);
    /// Closes connections that were not taken, without calling the handler.
    ~Dial() override;
    Dial(const Dial&) = delete;
    Dial& operator=(const Dial&) = delete;

  private:
    struct Attempt {
        UniqueFd socket;
        std::unique_ptr<Connection> connection;
        std::optional<ClientHandshake> handshake;
        os::EventLoop::TimerId timer = 0;
    };
    using Attempts = std::list<Attempt>;

    void on_frame(Connection& connection, Frame frame) override;
    void on_closed(Connection& connection, const Error& why) override;

    [[nodiscard]] bool is_over() const { return handler_ == nullptr; }
    void found(Result<SocketAddresses> addresses);
    void try_next();
    Status connect(Attempt& attempt, const SocketAddress& address);
    void on_connect_result(Attempt& attempt);
    Status begin_handshake(Attempt& attempt);
    Result<bool> shake_hands(Attempt& attempt, Frame frame);
    void take(Attempt& attempt);
    void drop(Attempt& attempt, const Error& why);
    void expect_others();
    void remember(const Error& why);
    void end_if_nothing_is_left();
    Attempts::iterator attempt_of(const Connection& connection);

    os::EventLoop& loop_;
    DialOptions options_;
    Handler handler_;
    std::vector<std::unique_ptr<Resolver>> look_ups_;
    std::size_t open_look_ups_ = 0;
    std::deque<SocketAddress> addresses_;  ///< not tried yet
    std::vector<Endpoint> found_;
    Attempts attempts_;
    os::EventLoop::TimerId next_timer_ = 0;
    std::optional<Error> why_not_;
};

}  // namespace ddprun::rdzv
