#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {

/// The store requests of one node's workers, which share their agent's session, and the answers to them.
/// Pure.
///
/// Equal reads (Get, TryGet, Wait) are combined: while one is under way, later ones wait and are sent as one
/// request when it has been answered. So no client gets a value older than its request, and no value is
/// cached. Requests of one client reach the store in order: before its next request, a read that waits is
/// sent.
class RelayState {
  public:
    /// A request to the controller.
    struct Forward {
        std::uint32_t number;  ///< for its answer; never 0
        StoreRequest request;
    };
    /// An answer to a client.
    struct Told {
        std::uint64_t client;
        std::uint32_t request;
        StoreReply reply;
    };
    struct Actions {
        std::vector<Forward> forward;
        std::vector<Told> told;
    };

    /// `client` is not 0.
    Actions ask(std::uint64_t client, std::uint32_t request, StoreRequest what, TimePoint now);
    /// Processes the controller's answer; ignored when no client waits for it any more.
    Actions answer(std::uint32_t number, const StoreReply& reply, TimePoint now);
    /// Removes a client that is gone. The controller has been told, and drops the client's own requests.
    Actions leave(std::uint64_t client, TimePoint now);
    /// Sends reads that wait behind others and whose deadline has come alone; the store then times them out.
    Actions expire(TimePoint now);
    /// The time of the next expire(); kNever when no waiting read has a deadline.
    [[nodiscard]] TimePoint next_deadline() const {
        return deadlines_.empty() ? kNever : deadlines_.begin()->first;
    }
    /// The session is over: answers all requests with `why`.
    Actions lose(const Failure& why);

    /// The number of requests under way to the controller.
    [[nodiscard]] std::size_t under_way() const { return flights_.size(); }

  private:
    using AskerId = std::uint64_t;
    /// A client's request that has not been answered.
    struct Asker {
        std::uint64_t client;
        std::uint32_t request;
        TimePoint since, deadline;
        std::string shared;        ///< the read that waits behind an equal one; "" it is under way
        std::uint32_t flight = 0;  ///< the number of its Flight
    };
    struct Flight {
        std::uint64_t owner;  ///< the client named in the request
        std::string shared;   ///< the read that others may share; "" none
        std::vector<AskerId> askers;
    };
    /// Equal reads, of which one is under way.
    struct Sharing {
        StoreRequest request;
        std::vector<AskerId> next;  ///< waiting for the next equal read
    };

    AskerId add(Asker asker);
    Asker remove(AskerId id);
    void launch(std::vector<AskerId> askers, StoreRequest request, TimePoint now, std::string shared);
    void launch_alone(AskerId id, TimePoint now);
    void ask_next(const std::string& shared, TimePoint now);
    void hurry(std::uint64_t client, TimePoint now);

    std::unordered_map<AskerId, Asker> askers_;
    std::unordered_map<std::uint64_t, std::set<AskerId>> by_client_;
    std::unordered_map<std::uint64_t, AskerId>
        held_back_;  ///< by client: its read that waits behind another client's
    std::unordered_map<std::uint32_t, Flight> flights_;
    std::unordered_map<std::string, Sharing> sharings_;
    std::set<std::pair<TimePoint, AskerId>> deadlines_;  ///< those that the store does not know
    AskerId last_asker_ = 0;
    std::uint32_t last_number_ = 0;
    Actions actions_;  ///< of the call in progress
};

}  // namespace ddprun::rdzv
