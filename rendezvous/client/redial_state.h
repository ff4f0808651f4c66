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

/// When an agent dials another connection for its session, and when the session is over, without acting.
///
/// The agent dials when the connection is lost or silent; a silent one stays, because it may recover. A dial
/// that fails is repeated after a pause. Without a new connection the session is over wait_for_redial() after
/// the loss. Only a dial that an address has accepted may take longer: a dead process accepts none.
struct RedialState {
    RedialState(Heartbeats of, TimePoint now) : limits(of), silence(of, now), last_beat(now) {}

    Heartbeats limits;
    SilenceWatch silence;
    TimePoint check_at{};           ///< when SilenceChecked is due
    std::optional<Outage> outage;   ///< set while the connection is lost
    TimePoint grace_ends = kNever;  ///< of the lost connection
    TimePoint dial_at = kNever;     ///< after a dial that failed
    bool is_dialling = false;
    bool is_accepted = false;            ///< an address has accepted the dial
    TimePoint last_beat, stood_still{};  ///< when this process had missed beats for a whole timeout

    /// When TimePassed is due.
    [[nodiscard]] TimePoint timer() const { return std::min(grace_ends, dial_at); }
};

namespace redial_event {
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
/// The session goes on by the dialled connection.
struct Resumed {};
}  // namespace redial_event

using RedialEvent = std::variant<redial_event::Beat, redial_event::SilenceChecked, redial_event::Closed,
                                 redial_event::TimePassed, redial_event::Accepted, redial_event::DialFailed,
                                 redial_event::Resumed>;

enum class RedialAction : std::uint8_t {
    None,
    Dial,          ///< drop an earlier dial
    EndAsLost,     ///< the session is over, for the reason of the connection's loss
    EndAsSilent,   ///< the session is over: nothing was heard for the timeout
    EndAsRefused,  ///< the session is over, for the reason of the dial's failure
};

/// Pure: changes `state`, returns what to do.
RedialAction step(RedialState& state, const RedialEvent& event, TimePoint now);

}  // namespace ddprun::rdzv
