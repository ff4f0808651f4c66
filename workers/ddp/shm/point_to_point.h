#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/shm/arena.h"
#include "ddp/shm/joining.h"
#include "ddp/shm/kernels.h"
#include "ddp/shm/waiting.h"

namespace ddp::cpu {

/// Messages between two ranks of a node, through the arena's channels: only these two take part. A message
/// that does not fit a channel waits for its receiver. Of several messages at once, each moves as soon as it
/// can. One thread at a time.
class PointToPoint {
  public:
    PointToPoint(Arena& arena, const NodeCpus& node_cpus, std::chrono::nanoseconds timeout,
                 const Kernels& kernels);

    /// Throws MismatchError with both sides (on the sender when it still waits for this message or for a
    /// later call of the group), PeerLostError, TimeoutError. A failed channel stays unusable.
    /// `meanwhile` moves other data of this rank; true: it has moved some.
    void move(std::span<const Message> messages, const std::function<bool()>& meanwhile = {});

    /// Applies to later messages.
    void set_timeout(std::chrono::nanoseconds timeout) { timeout_ = timeout; }

  private:
    /// One end of a channel, for one message.
    struct End {
        Channel& channel;
        std::uint32_t peer;
        Call call;
        std::int64_t began_ns;
        std::byte* data;
        std::size_t done = 0;  ///< bytes
        bool is_open = true;
    };
    [[nodiscard]] End begin(const Message& message);
    [[nodiscard]] static bool can_move(const End& end);
    void put(End& end);
    void take(End& end);
    void wait_for_any(const std::vector<End*>& heads, const std::function<bool()>& meanwhile);
    void show(const End& end);
    void wake(std::uint32_t peer);
    void throw_if_failed(const std::vector<End*>& heads) const;
    void throw_if_gone(const End& end) const;
    void compare(const End& end, const Call& sent);
    [[nodiscard]] std::string refusal(const End& end) const;
    [[nodiscard]] std::string deadlock(const End& end) const;

    Arena& arena_;
    const NodeCpus node_cpus_;
    std::chrono::nanoseconds timeout_;
    const Kernels& kernels_;
    SpinBudget spin_budget_;
    std::vector<std::uint64_t> sent_, received_;  ///< number of messages, by peer
};

}  // namespace ddp::cpu
