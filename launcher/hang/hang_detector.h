#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/segment.h"

namespace ddprun {

/// What can be seen of one rank from outside, at one moment.
struct HangSample {
    int rank = 0;
    std::string host = {};  ///< shown with the rank; "" of a job of one node
    bool alive = true;
    bool stopped = false;          ///< by SIGSTOP or a debugger (state T)
    Duration cpu{};                ///< used so far by the worker and its descendants
    std::uint64_t io_bytes = 0;    ///< read and written by them, log lines too; any change counts
    std::int64_t progress_ns = 0;  ///< last report of progress; 0: it gives none
    std::uint64_t step = 0;        ///< steps done, as it reports them; 0: not known
    bool joined = false;           ///< it speaks through the segment; the rest is meaningful then only
    std::uint64_t started_seq = 0;
    std::uint64_t finished_seq = 0;
    SegmentOp operation = SegmentOp::None;
    std::uint64_t bytes = 0;
    bool awaited = false;  ///< the others wait for it with good reason, and it has said how long
    bool operator==(const HangSample&) const = default;
};

struct HangVerdict {
    int culprit = -1;  ///< the rank to look at first; -1: none stands out
    std::string what;  ///< "rank 2 has not called all_reduce #812; ranks 0-1, 3 wait in it for 31 s"
};

/// Says when the workers of a job hang, and who keeps whom waiting. Pure: sees samples and times, nothing
/// else.
///
/// From the most telling to the least:
///  - ranks have been inside one collective for the timeout: whoever is not in it is named, with what it
///  does;
///  - a rank has been stopped for the timeout;
///  - a rank that used to report progress has reported none for the timeout, and no collective of it has
///  moved;
///  - no rank has used processor time (less than 1 %), read or written anything for the timeout.
/// While ranks wait with good reason for one that is not stopped, only a stopped rank is a hang.
/// Processor time is progress in the last respect only: whoever waits for others may well spin.
class HangDetector {
  public:
    explicit HangDetector(Duration timeout) : timeout_(timeout) {}

    /// How often to look.
    [[nodiscard]] Duration interval() const;
    /// A new generation: forget everything.
    void reset();
    /// One look at all ranks, in order of rank, always the same ones. Time in which nobody looked (we
    /// were suspended) counts for nobody.
    std::optional<HangVerdict> feed(const std::vector<HangSample>& samples, TimePoint now);

  private:
    /// Since when a rank looks the same, in each respect.
    struct Watch {
        HangSample last;
        TimePoint collective_since, stopped_since, heartbeat_since, idle_since;
        Duration idle_cpu{};  ///< used when idle_since began
    };

    void begin(const std::vector<HangSample>& samples, TimePoint now);
    void update(Watch& watch, const HangSample& sample, TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> stuck_collective(TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> stopped_rank(TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> lost_heartbeat(TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> nobody_moves(TimePoint now) const;
    [[nodiscard]] std::string doing(const Watch& watch, TimePoint now) const;

    Duration timeout_;
    std::vector<Watch> watches_;
    TimePoint last_look_{};
};

}  // namespace ddprun
