#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <unordered_map>

#include "rendezvous/serve/store.h"

namespace ddprun::rdzv {

/// The answers to an agent's workers that wait for room in its session: they take turns with the agent's own
/// messages. Pure.
class HeldAnswers {
  public:
    /// `most`: bytes that may wait for one client. Beyond them it is told so instead.
    explicit HeldAnswers(std::size_t most) : most_(most) {}

    /// What can be said now, when the agent has not acknowledged so many bytes; nullopt: it waits here.
    std::optional<StoreAnswer> pass(StoreAnswer answer, std::size_t unacknowledged);
    /// The next one for which there is room by now.
    std::optional<StoreAnswer> next(std::size_t unacknowledged);
    /// The client is gone.
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
