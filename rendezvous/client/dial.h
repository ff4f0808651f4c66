#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "rendezvous/client/resolver.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"

namespace ddprun::rdzv {

struct DialOptions {
    std::vector<Endpoint> controllers;  ///< where one controller may be reached
    Credentials credentials;
    Hello hello;                          ///< of the agent; its session, where one goes on
    Duration connecting;                  ///< for one address to answer; the first may be a dead one
    Duration handshake;                   ///< from there to the proof
    std::string when_token_differs = {};  ///< said behind the refusal of our token
    std::shared_ptr<const TlsContext> tls = nullptr;  ///< a client's; null: nothing is sealed
};

/// A connection on which both sides have proved that they know the token.
struct Dialled {
    std::unique_ptr<Connection> connection;  ///< hears from whoever dialled; to be handed to its owner
    std::string nonce;                       ///< of the Hello that it began with
    SessionCounts session;                   ///< where it goes on, by the controller
    std::vector<Endpoint>
        found;  ///< numeric addresses of the controllers that were known by then, this one's first
};

/// One look for a connection to the controller, on the event loop; never blocks. All names are looked up at
/// once, their addresses tried in turn, the next one after 50 ms or when the last one failed; the first that
/// proves itself is taken.
class Dial final : private ConnectionOwner {
  public:
    /// Once, from the loop; may destroy the Dial. Errors: is_worth_coming_again(), or the last word of who
    /// answered.
    using Handler = std::function<void(Result<Dialled>)>;

    /// `loop` is borrowed for the Dial's life.
    Dial(os::EventLoop& loop, DialOptions options, Handler handler);
    /// Closes what has not been taken; tells the handler nothing.
    ~Dial() override;
    Dial(const Dial&) = delete;
    Dial& operator=(const Dial&) = delete;

    [[nodiscard]] bool is_over() const { return handler_ == nullptr; }
    /// Somebody listens at one of the addresses: it does not look like an end of the controller.
    [[nodiscard]] bool has_met_somebody() const { return has_met_somebody_; }

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
    bool has_met_somebody_ = false;
};

/// The controller had no time or no room for us, or is not there (yet): a crowd of connections, a restart.
bool is_worth_coming_again(const Error& why);

}  // namespace ddprun::rdzv
