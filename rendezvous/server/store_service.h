#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "env/os/deadline_timer.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/local_clients.h"
#include "rendezvous/store.h"

namespace ddprun::rdzv {

/// Runs the job's store: for the controller, for the workers of this host, who come by a Unix socket, and for
/// those who speak by one of the server's connections. Keeps the time of those who wait. On the loop's
/// thread; never blocks.
class StoreService final : private LocalClientsHandler {
  public:
    struct Parts {
        os::EventLoop& loop;
        std::function<void(StoreAnswer)> answer;  ///< to one of the server's connections, which may be gone
        std::function<void(const std::string&)> log;
    };
    StoreService(Parts parts, StoreLimits limits) : parts_(std::move(parts)), store_(limits) {}
    StoreService(const StoreService&) = delete;
    StoreService& operator=(const StoreService&) = delete;

    /// This host's workers come by `listener` from now on. Error: System.
    Status serve_local(UniqueFd listener, const Credentials& credentials, ServerLimits limits);
    /// It is answered once, now or later.
    void ask(StoreClientId client, std::uint32_t number, StoreRequest request);
    /// The controller's own request; what would have to wait is answered Timeout.
    StoreReply ask_own(StoreOp op);
    void disconnect(StoreClientId client) { store_.disconnect(client); }
    void disconnect_all(ClientId connection) { store_.disconnect_all(connection); }
    void begin_generation(std::uint64_t generation) { deliver(store_.begin_generation(generation)); }
    [[nodiscard]] const Store& store() const { return store_; }

  private:
    void on_local_request(std::uint64_t client, std::uint32_t number, StoreRequest request) override;
    void on_local_gone(std::uint64_t client) override;
    void on_local_log(const std::string& line) override { parts_.log(line); }
    void deliver(StoreAnswers answers);
    void expire();

    Parts parts_;
    Store store_;
    std::unique_ptr<LocalClients> local_;  ///< null: this host's workers come by other ways
    os::DeadlineTimer expiry_{parts_.loop, [this] { expire(); }};
};

}  // namespace ddprun::rdzv
