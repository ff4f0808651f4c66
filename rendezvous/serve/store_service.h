#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/serve/store.h"
#include "rendezvous/serve/store_peers.h"

namespace ddprun::rdzv {

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

}  // namespace ddprun::rdzv
