#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "env/result.h"
#include "rendezvous/serve/torch_message.h"

namespace ddprun::rdzv {

/// The store of PyTorch's TCPStore clients, without connections, clocks or threads.
///
/// It differs from Store: a key is any bytes, an absent key reads as empty, a value can be appended to, a key
/// can be a queue, and clients can count the keys. Every request has the effect and the answer that it has in
/// PyTorch's own libuv server.
class TorchStore {
  public:
    using Client = std::uint64_t;
    struct Answer {
        Client client;
        std::string bytes;
    };
    /// The result of a request: answers to its client and to clients that waited, and the error when it
    /// cannot be served. The protocol has no error answer, so the caller closes the connection then, as
    /// PyTorch's server does.
    struct Outcome {
        std::vector<Answer> answers;
        std::optional<Error> refused;
    };

    explicit TorchStore(TorchLimits limits = {}) : limits_(limits) {}

    Outcome apply(Client client, TorchRequest request);
    /// Drops the client's wait.
    void disconnect(Client client);
    /// Drops all keys, queues and waits, for a new generation.
    void clear();

    [[nodiscard]] std::size_t keys() const { return values_.size(); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] std::size_t waiters() const { return waits_.size(); }

  private:
    using WaitId = std::uint64_t;
    struct Wait {
        Client client;
        std::set<std::string> missing;
        std::size_t bytes = 0;
    };

    /// The answer to the client itself; "" when there is none, or none yet.
    Result<std::string> perform(Client client, TorchRequest& request);
    Status put(const std::string& key, std::string value);
    Status reserve(std::size_t freed, std::size_t taken, std::size_t entries) const;
    [[nodiscard]] std::string get(const std::string& key) const;
    [[nodiscard]] bool is_there(const std::string& key) const;
    Result<std::int64_t> add(const std::string& key, std::int64_t delta);
    Result<std::string> compare_set(const std::string& key, const std::string& expected, std::string desired);
    Result<std::string> multi_get(const std::vector<std::string>& keys) const;
    [[nodiscard]] Result<std::string> list_keys() const;
    Status append_within(std::string& answer, std::string_view value) const;
    Status multi_set(TorchRequest& request);
    Status push(const std::string& key, std::string value);
    std::string pop(const std::string& key);
    Result<std::string> wait(Client client, std::set<std::string> missing);
    Result<std::string> enter_barrier(Client client, const std::string& key, std::int64_t participants);
    void wake(const std::string& key);
    void wake_one(const std::string& key);
    void finish(WaitId id);
    void forget(WaitId id);

    TorchLimits limits_;
    std::unordered_map<std::string, std::string> values_;
    std::unordered_map<std::string, std::deque<std::string>> queues_;  ///< none is empty
    std::size_t queued_ = 0;                                           ///< values in queues
    std::size_t bytes_ = 0;
    std::map<WaitId, Wait> waits_;
    std::unordered_map<Client, WaitId> wait_of_;
    std::unordered_map<std::string, std::set<WaitId>> waiting_for_;  ///< in order of arrival
    std::size_t waiting_bytes_ = 0;
    WaitId next_wait_ = 1;
    std::vector<Answer> answers_;  ///< of the call in progress, to clients that waited
};

}  // namespace ddprun::rdzv
