#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>

#include "ddp/net/link.h"

namespace ddp::net {

/// A rank whose group failed abandons its connections, for nobody may write to its buffers any more. With its
/// last words the others learn of it, and why. They go beside all other messages, under a tag of their own.
class LastWords {
  public:
    /// The link is borrowed. This must outlive it, or its connections: peers may speak at any time.
    LastWords(Link& link, std::uint64_t tag) : link_(link), tag_(tag) {}
    LastWords(const LastWords&) = delete;
    LastWords& operator=(const LastWords&) = delete;

    /// From now on this peer's are heard, and it hears ours. A second time: nothing.
    void expect(std::uint32_t peer);
    /// Once, to all peers. Back when they have left, or after a moment; the link is abandoned then.
    void say(const std::exception_ptr& failure);
    struct Heard {
        std::uint32_t peer = 0;
        std::string words;  ///< as told() gives them
    };
    /// Of whoever has come first by rank.
    [[nodiscard]] std::optional<Heard> heard() const;

  private:
    using Words = std::array<char, 1024>;  ///< ended by a 0, and sent whole
    struct Ear {
        Words words{};
        Transfer heard, sent;
    };
    Link& link_;
    const std::uint64_t tag_;
    std::map<std::uint32_t, Ear> ears_;  ///< by peer
    Words own_{};
    bool said_ = false;
};

}  // namespace ddp::net
