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

/// The job's key-value store: how ranks tell each other what no collective is for (an address, a path, who is
/// first).
///
///     ddp::Store store(context);
///     if (context.rank() == 0) store.set("port", std::to_string(port));
///     const std::string port = store.get("port");     // waits until it is there
///     store.barrier("loaded");
///
/// It lives in ddprun, outlives every worker, and is empty at the start of each generation (a restarted world
/// never sees what the last one wrote). Keys are UTF-8, 1 to 1000 bytes, and the program's own: libddp's are
/// apart. Values are any bytes, up to 64 MiB; it is no way for bulk data. Each call is one round trip and
/// blocks. One thread at a time; other threads have a Store of their own.
///
/// All throw, besides what they say: PeerLostError when the store or this worker's generation is gone,
/// InvalidInput for a key that is none, Error when a limit is met. After PeerLostError every call throws it.
class Store {
  public:
    using Timeout = std::chrono::nanoseconds;
    static constexpr Timeout kTimeout = std::chrono::minutes(5);

    /// Connects; `timeout` is that of every call which is given none. Throws InvalidInput where there is no
    /// launcher with a store (not ddprun, nor MPI on several hosts), TimeoutError, Error (the token is
    /// refused).
    explicit Store(const Context& context, Timeout timeout = kTimeout);
    ~Store();
    Store(Store&&) noexcept;
    Store& operator=(Store&&) noexcept;

    void set(std::string_view key, std::string_view value);
    /// Waits until the key is there. Throws TimeoutError naming it.
    [[nodiscard]] std::string get(std::string_view key);
    [[nodiscard]] std::string get(std::string_view key, Timeout timeout);
    /// nullopt: it is not there now.
    [[nodiscard]] std::optional<std::string> try_get(std::string_view key);
    /// The sum; an absent key counts as 0. Values are decimal text. Throws InvalidInput where it holds
    /// something else.
    std::int64_t add(std::string_view key, std::int64_t delta);
    struct Exchange {
        bool swapped = false;
        std::string value;  ///< what is there now; "" when nothing is
    };
    /// Sets `desired` where `expected` stands; nullopt: where nothing does. The first of several who try
    /// wins.
    Exchange compare_set(std::string_view key, std::optional<std::string_view> expected,
                         std::string_view desired);
    /// False: it was not there.
    bool erase(std::string_view key);
    /// Waits until all are there at the same time. Throws TimeoutError naming the first that are not.
    void wait(const std::vector<std::string>& keys);
    void wait(const std::vector<std::string>& keys, Timeout timeout);
    /// Waits until all ranks of the world have come, or as many as are told. A name can be used again once
    /// all have left. Throws TimeoutError saying how many came, MismatchError where others told another
    /// number.
    void barrier(std::string_view name);
    void barrier(std::string_view name, int participants, Timeout timeout);

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
