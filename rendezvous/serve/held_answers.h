#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <unordered_map>

#include "rendezvous/serve/store.h"

namespace ddprun::rdzv {

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
