#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "env/os/event_loop.h"
#include "rendezvous/client/agent_link.h"
#include "rendezvous/client/store_client.h"
#include "rendezvous/serve/server.h"
#include "tests/rendezvous/any_message.h"

namespace ddprun::rdzv {

/// Limits that no test reaches.
inline constexpr Heartbeats kPatient{std::chrono::seconds(60)};

inline const Credentials kTestJob{"test job", "the token"};

/// A deadline that a working test never reaches.
inline TimePoint soon() { return MonotonicClock::now() + std::chrono::seconds(20); }

/// An event loop with its own thread.
class LoopThread {
  public:
    LoopThread();
    ~LoopThread();
    /// Runs `work` on the loop's thread and waits for it.
    void run(const std::function<void()>& work);
    [[nodiscard]] os::EventLoop& loop() { return *loop_; }

  private:
    std::unique_ptr<os::EventLoop> loop_;
    UniqueFd wake_;
    std::mutex mutex_;
    std::vector<std::packaged_task<void()>> work_;
    bool stop_ = false;
    std::thread thread_;
};

/// A list of events, for which a test on another thread can wait.
class EventLog {
  public:
    void add(std::string line);
    /// Waits until a line contains `text`; false after ten seconds.
    bool saw(const std::string& text);
    [[nodiscard]] std::vector<std::string> lines();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::string> lines_;
};

/// "Question 17", "Shutdown".
template <class Family>
std::string name_and_text(const Family& message) {
    const auto* question = std::get_if<Question>(&message);
    return std::string(message_name(message)) + (question != nullptr ? " " + question->request : "");
}

/// A handler for tests that use only the server's store.
struct SilentHandler final : ServerHandler {
    void on_agent_joined(AgentId, const AgentHello&) override {}
    void on_agent_message(AgentId, const FromAgent&) override {}
    void on_agent_lost(AgentId, const Error&) override {}
    void on_log(const std::string&) override {}
};

/// A server on loopback whose handler writes every call into `events`:
/// "joined HOST", "message NAME", "lost WHY", "log LINE", "detail LINE".
class RunningServer : private ServerHandler {
  public:
    explicit RunningServer(ServerLimits limits = {}, Heartbeats heartbeats = {}, bool serves_torch = false,
                           std::shared_ptr<const TlsContext> tls = nullptr);
    ~RunningServer() override;

    /// Runs `work` with the server on its thread.
    void with(const std::function<void(Server&)>& work);
    /// Destroys the server while its clients are connected.
    void stop();
    [[nodiscard]] Endpoint endpoint() const { return {"127.0.0.1", port_}; }
    [[nodiscard]] std::unique_ptr<StoreClient> client(std::uint64_t generation = 0,
                                                      const std::string& name = "a test");
    [[nodiscard]] AgentId last_agent();
    EventLog events;

  private:
    void on_agent_joined(AgentId agent, const AgentHello& hello) override;
    void on_agent_message(AgentId agent, const FromAgent& message) override;
    void on_agent_lost(AgentId agent, const Error& why) override;
    void on_log(const std::string& line) override;
    void on_detail(const std::string& line) override { events.add("detail " + line); }

    LoopThread thread_;
    std::unique_ptr<Server> server_;
    std::uint16_t port_ = 0;
    AgentId last_agent_ = 0;
};

inline AgentHello hello_of(const std::string& host) {
    return {host, std::nullopt, 4, 4171, "0.1.0", {}, {}, "default"};
}

/// A link on its own loop, whose handler writes into `events`: "connected", "message NAME" (of a Question
/// with its text), "lost CODE WHY", "log LINE", "detail LINE".
class RunningLink : private AgentLinkHandler {
  public:
    explicit RunningLink(const Endpoint& controller, TimePoint connect_by = soon(),
                         Credentials credentials = kTestJob, Heartbeats heartbeats = {}, bool is_ours = false,
                         Duration handshake_timeout = ServerLimits{}.handshake,
                         std::shared_ptr<const TlsContext> tls = nullptr) {
        thread_.run([&] {
            AgentLinkOptions options{{controller},
                                     std::move(credentials),
                                     "agent on node02",
                                     hello_of("node02"),
                                     {"10.9.0.2", "127.0.0.1"},
                                     connect_by,
                                     heartbeats,
                                     "copy the file",
                                     is_ours,
                                     handshake_timeout,
                                     std::move(tls)};
            AgentLinkHandler& self = *this;
            link_ = std::make_unique<AgentLink>(thread_.loop(), std::move(options), self);
        });
    }
    ~RunningLink() override { close(); }

    void close() {
        thread_.run([this] { link_.reset(); });
    }
    bool send(const FromAgent& message) {
        bool sent = false;
        thread_.run([&] { sent = link_->send(message); });
        return sent;
    }
    bool was_refused() {
        bool was = false;
        thread_.run([&] { was = link_->was_refused(); });
        return was;
    }
    EventLog events;

  private:
    void on_connected() override { events.add("connected"); }
    void on_message(const ToAgent& message) override { events.add("message " + name_and_text(message)); }
    void on_lost(const Error& why) override {
        events.add("lost " + std::to_string(static_cast<int>(why.code)) + " " + why.what);
    }
    void on_log(const std::string& line) override { events.add("log " + line); }
    void on_detail(const std::string& line) override { events.add("detail " + line); }

    LoopThread thread_;
    std::unique_ptr<AgentLink> link_;
};

/// The frame that a peer would send.
std::string bytes_of(const Message& message, std::uint32_t request);

/// A peer that sends and receives bytes. Every call gives up after twenty seconds.
class RawPeer {
  public:
    explicit RawPeer(const StoreAddress& server);
    bool send(std::string_view bytes);
    /// The next message; nullopt: the connection was closed.
    std::optional<Message> receive();
    /// True when the server has closed the connection; reads and drops earlier messages.
    bool is_closed();
    /// Performs the handshake with these and returns the last received message.
    Message shake_hands(const Credentials& credentials, Role role);
    void close() { fd_.reset(); }
    [[nodiscard]] int fd() const { return fd_.get(); }

  private:
    UniqueFd fd_;
    FrameDecoder decoder_{kPeerLimits};
};

}  // namespace ddprun::rdzv
