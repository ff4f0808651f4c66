#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/shm/arena.h"
#include "ddp/shm/kernels.h"
#include "ddp/shm/roster.h"
#include "ddp/shm/waiting.h"

namespace ddp::cpu {

/// Messages between two ranks of a node, through the arena's channels: only these two take part. What does
/// not fit a channel waits for its receiver. Of several messages at once, each moves as soon as it can. One
/// thread at a time.
class PointToPoint {
  public:
    PointToPoint(Arena& arena, const Roster& roster, std::chrono::nanoseconds timeout,
                 const Kernels& kernels);

    /// Throw MismatchError with both sides (the sender where it still waits for this message or for anything
    /// later in the group), PeerLostError, TimeoutError. A channel that failed once is unusable.
    void send(const Buffer& buffer, std::uint32_t to);
    void recv(const Buffer& buffer, std::uint32_t from);
    /// `meanwhile` moves something else of this rank's; true: it has.
    void move(std::span<const Message> messages, const std::function<bool()>& meanwhile = {});

    /// Of the messages that follow.
    void set_timeout(std::chrono::nanoseconds timeout) { timeout_ = timeout; }

  private:
    /// One end of a channel, in a message.
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
    void ring(std::uint32_t peer);
    void throw_if_hopeless(const std::vector<End*>& heads) const;
    void throw_if_gone(const End& end) const;
    void compare(const End& end, const Call& sent);
    [[nodiscard]] std::string refusal(const End& end) const;
    [[nodiscard]] std::string deadlock(const End& end) const;

    Arena& arena_;
    const Roster roster_;
    std::chrono::nanoseconds timeout_;
    const Kernels& kernels_;
    Attention attention_;
    std::vector<std::uint64_t> sent_, received_;  ///< messages, by peer
};

}  // namespace ddp::cpu
