#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "env/clock.h"
#include "rendezvous/wire/protocol_limits.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {

/// The number of a connection of the server.
using ClientId = std::uint64_t;

/// A client of the store: a connection, or one of the workers behind an agent's connection.
struct StoreClientId {
    StoreClientId(ClientId by, std::uint64_t client = 0) : connection(by), number(client) {}
    ClientId connection;
    std::uint64_t number;  ///< 0: the connection itself
    auto operator<=>(const StoreClientId&) const = default;
};

/// The answer to one request of a client.
struct StoreAnswer {
    StoreClientId client;
    std::uint32_t request;
    StoreReply reply;
};
using StoreAnswers = std::vector<StoreAnswer>;

/// The job's key-value store, without connections, clocks or threads.
///
/// Every request is answered exactly once: at once, or, for Get, Wait and Barrier, by a later call (another
/// client's apply, expire, begin_generation). A disconnected client gets no answer any more. All keys belong
/// to one generation, and requests of other generations are refused. Keys that begin with "start/" belong to
/// the whole job: Set and Get of them are answered in any generation.
class Store {
  public:
    explicit Store(StoreLimits limits = {}) : limits_(limits) {}

    StoreAnswers apply(StoreClientId client, std::uint32_t request, StoreRequest what, TimePoint now);
    /// Answers Timeout to each request whose deadline has passed at `now`, and names what it waited for.
    StoreAnswers expire(TimePoint now);
    /// The time of the next expire(); kNever when no request has a deadline.
    [[nodiscard]] TimePoint next_deadline() const {
        return deadlines_.empty() ? kNever : deadlines_.begin()->first;
    }
    /// Drops the client's waiting requests, also from barriers, which then wait for one more participant.
    void disconnect(StoreClientId client);
    /// The same for a connection and all workers behind it.
    void disconnect_all(ClientId connection);
    /// Drops all keys except "start/..." and answers StaleGeneration to all waiting requests. A number that
    /// is not larger than the present one changes nothing.
    StoreAnswers begin_generation(std::uint64_t generation);

    [[nodiscard]] std::uint64_t generation() const { return generation_; }
    [[nodiscard]] std::size_t keys() const { return values_.size(); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] std::size_t waiters() const { return waiters_.size(); }
    /// The memory of the waiting requests, as it counts for the limits.
    [[nodiscard]] std::size_t waiting_bytes() const { return waiting_bytes_; }

  private:
    using WaiterId = std::uint64_t;
    /// The keys of one Wait in one string, because thousands of small strings would fragment the heap.
    class KeyList {
      public:
        KeyList() = default;
        explicit KeyList(const std::vector<std::string>& keys);
        [[nodiscard]] std::size_t size() const { return ends_.size(); }
        [[nodiscard]] bool empty() const { return ends_.empty(); }
        [[nodiscard]] std::string operator[](std::size_t at) const;
        [[nodiscard]] std::size_t bytes() const { return text_.size() + ends_.size() * sizeof ends_[0]; }

      private:
        std::string text_;
        std::vector<std::uint32_t> ends_;
    };
    /// A request that waits for keys (one for Get), or inside a barrier (no keys).
    struct Waiter {
        StoreClientId client{0};
        std::uint32_t request;
        TimePoint deadline;
        TimePoint since;
        KeyList keys;
        std::size_t at = 0;  ///< keys[at] is missing; the waiter is listed under it
        bool wants_value = false;
        std::string barrier;
    };
    /// The waiting requests of one client.
    struct Waits {
        std::set<WaiterId> ids;
        std::size_t bytes = 0;
    };
    struct BarrierState {
        int participants;
        std::vector<WaiterId> inside;
    };
    struct Asker {
        StoreClientId client;
        std::uint32_t request;
        std::optional<Duration> timeout;
        TimePoint now;
        TimePoint since;
    };

    StoreReply refuse_generation(std::uint64_t asked) const;
    std::optional<StoreReply> perform(const Asker& asker, store_op::Set&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::Get&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::TryGet&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::Add&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::CompareSet&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::Erase&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::Wait&& op);
    std::optional<StoreReply> perform(const Asker& asker, store_op::Barrier&& op);

    std::optional<Failure> put(const std::string& key, Blob value);
    std::optional<StoreReply> wait_for(const Asker& asker, std::vector<std::string> keys, bool wants_value);
    std::optional<Failure> cannot_wait(StoreClientId client, const Waiter& waiter) const;
    static std::size_t cost_of(const Waiter& waiter);
    WaiterId add_waiter(const Asker& asker, Waiter waiter);
    bool find_missing(Waiter& waiter) const;
    void wake(const std::string& key);
    StoreReply timeout_of(const Waiter& waiter, TimePoint now) const;
    bool is_inside(const std::string& barrier, StoreClientId client) const;
    void release(const BarrierState& barrier, const std::string& name);
    Waiter remove_waiter(WaiterId id);
    void leave(WaiterId id);
    void answer(StoreClientId client, std::uint32_t request, StoreReply reply);

    StoreLimits limits_;
    std::uint64_t generation_ = 0;
    std::unordered_map<std::string, Blob> values_;
    std::size_t bytes_ = 0;
    std::unordered_map<WaiterId, Waiter> waiters_;
    std::unordered_map<std::string, std::set<WaiterId>>
        waiting_for_;  ///< by the missing key, in order of arrival
    std::unordered_map<std::string, BarrierState> barriers_;
    std::map<StoreClientId, Waits> by_client_;
    std::size_t waiting_bytes_ = 0;  ///< of all waiters
    std::set<std::pair<TimePoint, WaiterId>> deadlines_;
    WaiterId next_waiter_ = 1;
    StoreAnswers answers_;  ///< of the call in progress
};

/// The answers to an agent's workers that wait for room in the agent's session, so that they do not delay the
/// agent's own messages. Pure.
class HeldAnswers {
  public:
    /// `most`: bytes that may wait for one client. An answer beyond that is replaced by the error Limit.
    explicit HeldAnswers(std::size_t most) : most_(most) {}

    /// Returns the answer when it can be sent now, given the session's unacknowledged bytes; nullopt: the
    /// answer waits here.
    std::optional<StoreAnswer> pass(StoreAnswer answer, std::size_t unacknowledged);
    /// The next waiting answer, if there is room for it now.
    std::optional<StoreAnswer> next(std::size_t unacknowledged);
    /// Drops the answers to a client that is gone.
    void forget(std::uint64_t client);

  private:
    struct Held {
        StoreAnswer answer;
        std::size_t bytes;
    };
    void push(StoreAnswer answer);

    std::size_t most_;
    std::deque<Held> answers_;
    std::unordered_map<std::uint64_t, std::size_t> bytes_;  ///< by client
};

}  // namespace ddprun::rdzv
