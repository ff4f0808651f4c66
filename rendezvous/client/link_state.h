#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <variant>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/wire/session.h"

namespace ddprun::rdzv {

/// True when another attempt may succeed: the controller was too busy or full, or does not listen (yet).
bool is_worth_coming_again(const Error& why);

/// An agent dials another connection when the present one has been silent for redial_after(), and waits
/// redial_pause() for an address to answer.
inline Duration redial_after(const Heartbeats& limits) { return limits.timeout / 3; }
inline Duration redial_pause(const Heartbeats& limits) { return limits.timeout / 12; }

/// When an agent dials the controller, and when it gives up, without acting.
///
/// Connecting: until `connect_by` a dial that fails is repeated after a pause, which doubles up to one
/// second. A controller in this process listens already: if it does not answer, waiting cannot help.
///
/// Joined: the agent dials when the connection is lost or silent; a silent one stays, because it may recover.
/// A dial that fails is repeated after a pause. Without a new connection the session is over
/// wait_for_redial() after the loss. Only a dial that an address has accepted may take longer: a dead process
/// accepts none.
struct LinkState {
    LinkState(Heartbeats of, TimePoint now) : limits(of), silence(of, now), dial_at(now) {}

    // Set at the beginning.
    Heartbeats limits;
    TimePoint connect_by = kNever;
    bool is_ours = false;  ///< the controller is in this process and listens already

    bool is_joined = false;
    Duration backoff = std::chrono::milliseconds(20);
    int timeouts = 0;  ///< of dials to a controller that is ours
    SilenceWatch silence;
    TimePoint check_at{};           ///< when SilenceChecked is due
    std::optional<Outage> outage;   ///< set while the connection is lost
    TimePoint grace_ends = kNever;  ///< of the lost connection
    TimePoint dial_at;              ///< the next dial; kNever: none waits
    bool is_dialling = false;
    bool is_accepted = false;              ///< an address has accepted the dial
    TimePoint last_beat{}, stood_still{};  ///< when this process had missed beats for a whole timeout

    /// When TimePassed is due.
    [[nodiscard]] TimePoint timer() const { return std::min({connect_by, grace_ends, dial_at}); }
};

namespace link_event {
/// A heartbeat was sent, as at each interval.
struct Beat {};
/// The last bytes came at `heard`.
struct SilenceChecked {
    TimePoint heard;
};
struct Closed {
    Outage outage;
};
struct TimePassed {};
/// An address has accepted the dial.
struct Accepted {};
struct DialFailed {
    Error why;
};
/// The dialled connection carries the session from now on, which begins or goes on.
struct Connected {};
}  // namespace link_event

using LinkEvent =
    std::variant<link_event::Beat, link_event::SilenceChecked, link_event::Closed, link_event::TimePassed,
                 link_event::Accepted, link_event::DialFailed, link_event::Connected>;

enum class LinkAction : std::uint8_t {
    None,
    Dial,          ///< drop an earlier dial
    EndAsAbsent,   ///< no controller was found
    EndAsLost,     ///< the session is over, for the reason of the connection's loss
    EndAsSilent,   ///< the session is over: nothing was heard for the timeout
    EndAsRefused,  ///< the controller has refused the dial, for the reason of its failure
};

/// Pure: changes `state`, returns what to do.
LinkAction step(LinkState& state, const LinkEvent& event, TimePoint now);

}  // namespace ddprun::rdzv
