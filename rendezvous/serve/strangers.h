#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "env/clock.h"
#include "rendezvous/serve/store.h"

namespace ddprun::rdzv {

/// The connections that have not proved that they know the token, and who of them makes room for others.
/// Pure; every call takes logarithmic time, for all of a large job's nodes knock at once.
///
/// Who was refused and has not gone yet goes first, then whoever has been silent for longest. While all have
/// said something a moment ago nobody goes: whoever comes waits in the kernel's queue and loses nothing by
/// it.
class Strangers {
  public:
    /// An honest peer answers sooner than this.
    static constexpr Duration kPatience = std::chrono::milliseconds(100);

    explicit Strangers(std::size_t most) : most_(most) {}

    void arrived(ClientId id, TimePoint now);
    /// It has sent a message; one who is no stranger is ignored.
    void spoke(ClientId id, TimePoint now);
    /// It is being told why it may not come in. One who is no stranger is ignored.
    void refused(ClientId id);
    /// It has proved itself, or is gone. False: it was no stranger.
    bool left(ClientId id);

    [[nodiscard]] std::size_t in_handshake() const { return last_words_.size(); }
    [[nodiscard]] bool is_crowded() const { return last_words_.size() + refused_.size() >= most_; }
    /// From when on another one can be taken; long ago: now.
    [[nodiscard]] TimePoint room_at() const;
    /// Who makes room; nullopt: there are none.
    [[nodiscard]] std::optional<ClientId> next_to_go() const;

  private:
    std::size_t most_;
    std::unordered_map<ClientId, TimePoint> last_words_;     ///< of those in their handshake; arriving is one
    std::set<std::pair<TimePoint, ClientId>> by_last_word_;  ///< the same
    std::set<ClientId> refused_;
};

}  // namespace ddprun::rdzv
