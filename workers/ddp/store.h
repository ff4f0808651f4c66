#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/context.h"

namespace ddp {

/// The job's key-value store, in which ranks exchange values that need no collective (an address, a path, the
/// result of an election).
///
///     ddp::Store store(context);
///     if (context.rank() == 0) store.set("port", std::to_string(port));
///     const std::string port = store.get("port");     // waits until it is there
///     store.barrier("loaded");
///
/// The store lives in ddprun, outlives every worker, and is empty at the start of each generation (a
/// restarted world never sees values of the last one). Keys are UTF-8, 1 to 1000 bytes, and separate from
/// libddp's own. Values are any bytes, up to 64 MiB; the store is not for bulk data. Each call is one round
/// trip and blocks. One thread at a time; other threads need their own Store.
///
/// Besides the errors below, all calls throw PeerLostError when the store or this worker's generation has
/// ended, InvalidInput for an invalid key, Error when a limit is exceeded. After PeerLostError every call
/// throws it.
class Store {
  public:
    using Timeout = std::chrono::nanoseconds;
    static constexpr Timeout kTimeout = std::chrono::minutes(5);

    /// Connects; `timeout` applies to calls without their own. Throws InvalidInput where there is no launcher
    /// with a store (neither ddprun nor MPI on several hosts), TimeoutError, Error (the token is refused).
    explicit Store(const Context& context, Timeout timeout = kTimeout);
    ~Store();
    Store(Store&&) noexcept;
    Store& operator=(Store&&) noexcept;

    void set(std::string_view key, std::string_view value);
    /// Waits until the key exists. Throws TimeoutError naming it.
    [[nodiscard]] std::string get(std::string_view key);
    [[nodiscard]] std::string get(std::string_view key, Timeout timeout);
    /// nullopt when the key does not exist now.
    [[nodiscard]] std::optional<std::string> try_get(std::string_view key);
    /// Adds to a value in decimal text and returns the sum; an absent key counts as 0. Throws InvalidInput
    /// when the value is not a number.
    std::int64_t add(std::string_view key, std::int64_t delta);
    struct Exchange {
        bool swapped = false;
        std::string value;  ///< the value after the call; "" when there is none
    };
    /// Sets `desired` if the value is `expected`, or if the key is absent for nullopt. When several ranks
    /// try, the first wins.
    Exchange compare_set(std::string_view key, std::optional<std::string_view> expected,
                         std::string_view desired);
    /// False when the key did not exist.
    bool erase(std::string_view key);
    /// Waits until all keys exist at the same time. Throws TimeoutError naming the first missing ones.
    void wait(const std::vector<std::string>& keys);
    void wait(const std::vector<std::string>& keys, Timeout timeout);
    /// Waits until all ranks of the world, or `participants`, have arrived. A name can be used again once all
    /// have left. Throws TimeoutError with the number of arrivals, MismatchError when callers give different
    /// numbers.
    void barrier(std::string_view name);
    void barrier(std::string_view name, int participants, Timeout timeout);

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
