#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/nodes/meeting_point.h"
#include "env/result.h"
#include "rendezvous/wire/message.h"

namespace ddprun::rdzv {

/// The address of a store: "tcp:HOST:PORT" or "unix:PATH", as in DDPRUN_STORE.
struct StoreAddress {
    StoreAddress(Endpoint endpoint) : tcp(std::move(endpoint)) {}
    explicit StoreAddress(std::string unix_path) : path(std::move(unix_path)) {}
    Endpoint tcp;
    std::string path;  ///< a Unix socket; "" the store is at `tcp`
    bool operator==(const StoreAddress&) const = default;
};
/// For messages: "node00:29500", "unix:/run/store".
std::string to_string(const StoreAddress& address);
/// Error: InvalidArgument.
Result<StoreAddress> parse_store_address(std::string_view text);

struct ClientOptions {
    Role role = Role::Worker;
    std::string job_id;            ///< must equal the server's
    std::string token;             ///< the job's secret; never sent
    std::uint64_t generation = 0;  ///< sent with every request; the store refuses other generations
    std::string name;              ///< for messages and logs: "rank 3 on node02"
    bool tls = false;              ///< use TLS
};

/// Blocking client of the job's key-value store. One round trip per operation.
///
/// Not thread-safe: one thread at a time. Every call returns by its deadline. Errors of every operation:
/// Timeout (names the key and the wait), Closed (the server went away), StaleGeneration (this worker's
/// generation is over), Limit, Protocol. After Closed or Protocol every call returns an error.
class StoreClient {
  public:
    /// Connects and authenticates. Retries refused connections until the deadline.
    /// Error: Timeout with the last cause, Refused (wrong token or job), Protocol, NotFound (TLS, and no
    /// libssl here).
    static Result<std::unique_ptr<StoreClient>> connect(const StoreAddress& server, ClientOptions options,
                                                        TimePoint deadline);
    ~StoreClient();
    StoreClient(const StoreClient&) = delete;
    StoreClient& operator=(const StoreClient&) = delete;

    /// Sets the timeout of operations that do not wait for other clients. Default 30 s.
    void set_operation_timeout(Duration timeout);

    Status set(std::string_view key, std::string_view value);
    /// Waits until the key exists.
    Result<std::string> get(std::string_view key, TimePoint deadline);
    /// nullopt when the key does not exist now.
    Result<std::optional<std::string>> try_get(std::string_view key);
    /// Adds to a decimal counter (an absent key is 0) and returns the sum.
    Result<std::int64_t> add(std::string_view key, std::int64_t delta);
    struct Exchange {
        bool swapped;
        std::string value;  ///< the value afterwards: `desired` when swapped, else the present one
    };
    /// Sets `desired` if the value equals `expected`; `expected` nullopt means "absent".
    Result<Exchange> compare_set(std::string_view key, std::optional<std::string_view> expected,
                                 std::string_view desired);
    /// True when the key existed.
    Result<bool> erase(std::string_view key);
    /// Waits until all keys exist.
    Status wait(const std::vector<std::string>& keys, TimePoint deadline);
    /// Returns when `participants` clients have entered the barrier of this name. A name can be used again
    /// once everyone has left. A Timeout tells how many of the participants arrived.
    Status barrier(std::string_view name, int participants, TimePoint deadline);

  private:
    struct Impl;
    explicit StoreClient(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

/// A server that answered and proved that it knows the token.
struct Reached {
    Endpoint endpoint;
    std::unique_ptr<StoreClient> client;
};

/// Tries the addresses in turn, first briefly and then for longer, and returns the first that answers and
/// proves that it knows the token: some addresses may be unreachable from here, or belong to another host.
/// Blocks. Error: Timeout naming all addresses and the last one's error; Refused or Protocol when all have
/// answered so, or when one has and no other was the server within ten seconds.
Result<Reached> reach(const std::vector<Endpoint>& candidates, const ClientOptions& options,
                      TimePoint deadline);

/// The same for the meeting point from an exchange. Asks the exchange again where its channel keeps values,
/// because an earlier job's value may still be there. `point` becomes the one that led to the server.
Result<Reached> reach(Exchange& exchange, MeetingPoint& point, ClientOptions options, TimePoint deadline);

}  // namespace ddprun::rdzv
