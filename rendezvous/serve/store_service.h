#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/serve/peers.h"
#include "rendezvous/serve/store.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/protocol_limits.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {

/// The owner of StorePeers, which answers their requests. Called on the loop's thread.
class StorePeersHandler {
  public:
    virtual ~StorePeersHandler() = default;
    /// A request, to be answered once with StorePeers::answer(), at any time.
    virtual void on_store_request(ClientId client, std::uint32_t number, StoreRequest request) = 0;
    /// A peer that had proved that it knows the token is gone. This is the last call about it.
    virtual void on_store_peer_gone(ClientId client) = 0;
    /// One line for the operator, about peers that broke the rules.
    virtual void on_store_log(const std::string& line) = 0;
};

/// Peers that use the store only. On a Unix socket they are workers of this host: processes of this user, no
/// agents. Runs on the event loop; never blocks.
class StorePeers final : private PeersOwner {
  public:
    /// `listener` is a listening, non-blocking socket; `loop` and `handler` are borrowed. Error: System.
    static Result<std::unique_ptr<StorePeers>> serve(os::EventLoop& loop, UniqueFd listener,
                                                     Credentials credentials, ServerLimits limits,
                                                     StorePeersHandler& handler);

    /// Sends an answer; does nothing when the client is gone.
    void answer(ClientId client, std::uint32_t number, StoreReply reply);
    /// Stops reading from all peers until resume().
    void pause();
    void resume();
    /// True while a peer with another name is served, or a peer has not taken all its answers.
    [[nodiscard]] bool is_busy_but_for(const std::string& name) const;

  private:
    StorePeers(os::EventLoop& loop, bool is_local, Credentials credentials, ServerLimits limits,
               StorePeersHandler& handler);
    Result<std::string> identify(int fd) override;
    Result<bool> on_hello(const Hello& hello) override;
    Status on_entered(Peer& peer) override;
    Status on_frame(Peer& peer, Frame frame) override;
    void on_gone(Peer& peer, const Error& why) override;
    void on_log(const std::string& line) override { handler_.on_store_log(line); }

    bool is_local_;  ///< the listener is a Unix socket
    std::size_t most_unanswered_;
    StorePeersHandler& handler_;
    bool is_paused_ = false;
    Peers peers_;
};

/// Runs the job's store for the controller, for store-only peers (this host's workers, by a Unix socket) and
/// for the clients behind the server's connections. Times out waiting requests. Runs on the loop's thread;
/// never blocks.
class StoreService final : private StorePeersHandler {
  public:
    struct Parts {
        os::EventLoop& loop;
        std::function<void(StoreAnswer)> answer;  ///< sends to a server's connection, which may be gone
        std::function<void(const std::string&)> log;
    };
    StoreService(Parts parts, StoreLimits limits) : parts_(std::move(parts)), store_(limits) {}
    StoreService(const StoreService&) = delete;
    StoreService& operator=(const StoreService&) = delete;

    /// Serves store-only peers that connect to `listener`. Call it at most once. Error: System.
    Status serve(UniqueFd listener, const Credentials& credentials, ServerLimits limits);
    /// The store-only peers; null unless serve() was called.
    [[nodiscard]] const StorePeers* peers() const { return peers_.get(); }
    /// Passes a request to the store, which answers it once, now or later.
    void ask(StoreClientId client, std::uint32_t number, StoreRequest request);
    /// Answers a request of the controller at once; Timeout when it would have to wait.
    StoreReply ask_own(StoreOp op);
    void disconnect(StoreClientId client) { store_.disconnect(client); }
    void disconnect_all(ClientId connection) { store_.disconnect_all(connection); }
    void begin_generation(std::uint64_t generation) { deliver(store_.begin_generation(generation)); }
    [[nodiscard]] const Store& store() const { return store_; }

  private:
    void on_store_request(ClientId client, std::uint32_t number, StoreRequest request) override;
    void on_store_peer_gone(ClientId client) override { store_.disconnect({kOwn, client}); }
    void on_store_log(const std::string& line) override { parts_.log(line); }
    void deliver(StoreAnswers answers);
    void expire();

    /// The connection number of the controller and of store-only peers: no connection of the server has it.
    static constexpr ClientId kOwn = 0;

    Parts parts_;
    Store store_;
    std::unique_ptr<StorePeers> peers_;
    os::DeadlineTimer expiry_{parts_.loop, [this] { expire(); }};
};

struct StoreHostOptions {
    Credentials credentials;  ///< an empty token is refused
    ServerLimits limits;
    StoreLimits store_limits;
    std::string own_name = "";  ///< the name under which this process itself is a client
    Duration farewell = std::chrono::seconds(3);
};

/// The job's store for programs that ddprun did not start: a thread of rank 0 serves it.
///
/// The thread runs a StoreService on its own event loop and takes none of the program's signals. It logs
/// nothing; a refused peer is told why.
class StoreHost {
  public:
    /// Serves from now on. `listener` is a listening, non-blocking socket. Error: InvalidArgument (no token),
    /// System.
    static Result<std::unique_ptr<StoreHost>> start(UniqueFd listener, StoreHostOptions options);
    /// Serves until all clients but those called `own_name` have gone, for `farewell` at most, because other
    /// ranks may still need the store. Then closes all connections. In a forked child: does nothing.
    ~StoreHost();
    StoreHost(const StoreHost&) = delete;
    StoreHost& operator=(const StoreHost&) = delete;

  private:
    struct Impl;
    explicit StoreHost(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddprun::rdzv
