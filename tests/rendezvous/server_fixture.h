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
#include "rendezvous/client.h"
#include "rendezvous/server.h"
#include "tests/rendezvous/any_message.h"

namespace ddprun::rdzv {

inline const Credentials kTestJob{"test job", "the token"};

/// An event loop on a thread of its own.
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

/// What happened, for a test on another thread to wait for.
class EventLog {
  public:
    void add(std::string line);
    /// True once a line contains `text`; false when none did within ten seconds.
    bool saw(const std::string& text);
    [[nodiscard]] std::vector<std::string> lines();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::string> lines_;
};

/// A server on loopback whose handler writes everything it hears into `events`:
/// "joined HOST", "message NAME", "lost WHY", "log LINE".
class RunningServer : private ServerHandler {
  public:
    explicit RunningServer(ServerLimits limits = {}, Heartbeats heartbeats = {}, bool serves_torch = false);
    ~RunningServer() override;

    /// Runs `work` with the server on its thread.
    void with(const std::function<void(Server&)>& work);
    /// Ends the server while its clients are connected.
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

    LoopThread thread_;
    std::unique_ptr<Server> server_;
    std::uint16_t port_ = 0;
    AgentId last_agent_ = 0;
};

/// A point in time no test reaches when all is well.
inline TimePoint soon() { return MonotonicClock::now() + std::chrono::seconds(20); }

/// The frame a peer would send.
std::string bytes_of(const Message& message, std::uint32_t request);

/// A peer that speaks bytes. Every call gives up after twenty seconds.
class RawPeer {
  public:
    explicit RawPeer(const Endpoint& server);
    bool send(std::string_view bytes);
    /// The next message; nullopt: the connection was closed.
    std::optional<Message> receive();
    /// True when the server closed the connection; reads and drops what comes before.
    bool is_closed();
    /// Goes through the handshake with these; the last message received.
    Message shake_hands(const Credentials& credentials, Role role);
    void close() { fd_.reset(); }
    [[nodiscard]] int fd() const { return fd_.get(); }

  private:
    UniqueFd fd_;
    FrameDecoder decoder_{kPeerLimits};
};

}  // namespace ddprun::rdzv
