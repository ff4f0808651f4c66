#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "rendezvous/client/dial.h"
#include "rendezvous/client/link_state.h"
#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {

/// What the link tells the agent. Called on the loop's thread; the handler may call the link, not destroy it.
class AgentLinkHandler {
  public:
    virtual ~AgentLinkHandler() = default;
    /// Authenticated both ways; the AgentHello is on its way.
    virtual void on_connected() = 0;
    virtual void on_message(const ToAgent& message) = 0;
    /// The link is over, or was never made. Called once, as the last call. Errors: Timeout (no controller
    /// until the deadline, or no heartbeat), Refused (token, job, membership), Closed, Protocol,
    /// StaleGeneration (the controller lives and has counted this node as lost: another link can join).
    virtual void on_lost(const Error& why) = 0;
    /// One line for the operator: what the link waits for.
    virtual void on_log(const std::string& line) = 0;
    /// One line of detail: the session has moved to another connection.
    virtual void on_detail(const std::string&) {}
    /// The answer to ask_store() of this number.
    virtual void on_store_reply(std::uint32_t, const StoreReply&) {}
    /// The controller has acknowledged messages: kept_bytes() may be less.
    virtual void on_acknowledged() {}
};

struct AgentLinkOptions {
    std::vector<Endpoint> controllers;  ///< addresses of the one controller, the likeliest first; never empty
    Credentials credentials;
    std::string name;  ///< for the controller's log: "agent on node02"
    AgentHello hello;  ///< empty addresses are replaced by this connection's own address
    std::vector<std::string> other_addresses = {};  ///< further addresses of this node, sent after that one
    TimePoint connect_by = kNever;
    Heartbeats heartbeats;
    /// Appended to the error when our token is refused, because only this side knows where the token is from.
    std::string when_token_differs = {};
    /// True when the controller is in this process and listens already: waiting cannot cure a system error.
    bool is_ours = false;
    Duration handshake_timeout = ServerLimits{}.handshake;
    std::shared_ptr<const TlsContext> tls = nullptr;  ///< a client's context; null without `--tls`
};

/// The agent's connection to the controller, on the event loop. Never blocks, not for host names either.
///
/// Until connect_by the link tries again after errors (a controller that starts later, a name that is not
/// known yet). Then it has one session, whose end is final. A connection that is lost, or silent for a third
/// of the timeout, is replaced by another one if possible before the session is over (session.h), without a
/// call to the handler except on_detail.
class AgentLink final : private ConnectionOwner {
  public:
    /// `loop` and `handler` must outlive the link. The first attempt starts in the loop.
    AgentLink(os::EventLoop& loop, AgentLinkOptions options, AgentLinkHandler& handler);
    /// Closes at once without calling the handler.
    ~AgentLink() override;
    AgentLink(const AgentLink&) = delete;
    AgentLink& operator=(const AgentLink&) = delete;

    /// Sends a message. False: there is no session (yet, or any more), and nothing is sent.
    bool send(FromAgent message);
    /// Sends a request to the store; `number` is not 0. on_store_reply gets the answer, unless the session
    /// ends first. Error: Limit, when it is larger than a message may be; nothing is sent.
    Status ask_store(StoreRequest request, std::uint32_t number);
    bool tell_gone(ClientGone gone);
    /// Sends a heartbeat. Call it on a Keepalive's thread, while the loop's thread is in a BlockingCall.
    void keep_alive();
    /// Sent bytes that the controller has not acknowledged.
    [[nodiscard]] std::size_t kept_bytes() const { return connection_ ? connection_->kept_bytes() : 0; }
    [[nodiscard]] bool is_connected() const { return link_.is_joined && !is_over_; }
    /// True when the last dial was refused: the controller's process has ended, and its host lives.
    [[nodiscard]] bool was_refused() const { return was_refused_; }
    /// The controller's address on this connection. Call it only while connected.
    [[nodiscard]] Endpoint controller() const { return connection_->remote(); }

    /// This host's address on this connection. Call it only while connected.
    [[nodiscard]] std::string own_address() const { return connection_->local_host(); }

  private:
    void on_frame(Connection& connection, Frame frame) override;
    void on_closed(Connection& connection, const Error& closed) override;

    void feed(const LinkEvent& event);
    void dial();
    [[nodiscard]] DialOptions dial_options();
    void dial_failed(const Error& why);
    void join(Dialled dialled);
    void resume(Dialled dialled);
    [[nodiscard]] Error nobody_there(bool is_late) const;
    void cancel_timers();
    Status receive(Frame frame);
    Status understand(Frame frame);
    bool say(Result<EncodedMessage> message);
    void take_failure(const Failure& failure);
    void beat();
    void check_silence();
    void end(const Error& why);

    os::EventLoop& loop_;
    AgentLinkOptions options_;
    AgentLinkHandler& handler_;
    bool is_over_ = false;
    std::unique_ptr<Dial> dial_;
    std::unique_ptr<Connection>
        connection_;  ///< the session's, also after its loss, until the next one is there
    std::string session_;
    std::vector<Endpoint> found_;  ///< numeric addresses, so that a session needs no name server
    Inbox inbox_;
    LinkState link_;
    std::optional<Error> refusal_;                     ///< the controller's last words
    Error last_cause_{Errc::Timeout, "no answer", 0};  ///< of the last dial that failed
    bool was_refused_ = false;
    os::EventLoop::TimerId heartbeat_timer_ = 0;
    os::EventLoop::TimerId silence_timer_ = 0;
    os::EventLoop::TimerId dial_timer_ = 0;  ///< of link_
};

}  // namespace ddprun::rdzv
