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

/// What the workers of one node ask the store through their agent's one session, and whose the answers are.
/// Pure.
///
/// Equal reads (Get, TryGet, Wait) share: while one is under way, those that come behind it are asked
/// together when it has been answered. So nobody hears what was true before he asked, and no value is kept.
/// The requests of one client reach the store in its order: when it asks something else, what it has held
/// back is asked first.
class RelayState {
  public:
    /// What the controller is asked.
    struct Forward {
        std::uint32_t number;  ///< for its answer; never 0
        StoreRequest request;
    };
    /// What a client is told.
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
    /// The controller's answer. One that nobody waits for any more is none.
    Actions answer(std::uint32_t number, const StoreReply& reply, TimePoint now);
    /// The client is gone, and the controller has been told: it forgets what the client itself has asked.
    Actions leave(std::uint64_t client, TimePoint now);
    /// Whoever waits behind others until `now` asks alone: whether it is in time the store says.
    Actions expire(TimePoint now);
    /// When expire() has something to do next; kNever: nobody's time is running here.
    [[nodiscard]] TimePoint next_deadline() const {
        return deadlines_.empty() ? kNever : deadlines_.begin()->first;
    }
    /// The session is over: everybody is told so.
    Actions lose(const Failure& why);

    /// Questions that are under way.
    [[nodiscard]] std::size_t under_way() const { return flights_.size(); }

  private:
    using AskerId = std::uint64_t;
    /// A client's request that has not been answered.
    struct Asker {
        std::uint64_t client;
        std::uint32_t request;
        TimePoint since, deadline;
        std::string shared;        ///< the read that it waits for behind another one; "" it is under way
        std::uint32_t flight = 0;  ///< in which it is
    };
    struct Flight {
        std::uint64_t owner;  ///< as whom it was asked
        std::string shared;   ///< "" nobody waits behind it
        std::vector<AskerId> askers;
    };
    /// Equal reads, of which one is under way.
    struct Sharing {
        StoreRequest request;
        std::vector<AskerId> next;  ///< for whom it is asked again then
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
        held_back_;  ///< by client: the one that waits behind another's
    std::unordered_map<std::uint32_t, Flight> flights_;
    std::unordered_map<std::string, Sharing> sharings_;
    std::set<std::pair<TimePoint, AskerId>> deadlines_;  ///< that the store does not know
    AskerId last_asker_ = 0;
    std::uint32_t last_number_ = 0;
    Actions actions_;  ///< of the call in progress
};

}  // namespace ddprun::rdzv
