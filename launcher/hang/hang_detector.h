#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/segment.h"

namespace ddprun {

/// The state of one rank at one moment, as seen from outside.
struct HangSample {
    int rank = 0;
    std::string host = {};  ///< shown with the rank; "" in a job of one node
    bool alive = true;
    bool stopped = false;          ///< by SIGSTOP or a debugger (state T)
    Duration cpu{};                ///< CPU time of the worker and its descendants so far
    std::uint64_t io_bytes = 0;    ///< bytes that they read and wrote; any change counts
    std::int64_t progress_ns = 0;  ///< time of the last progress report; 0: none
    std::uint64_t step = 0;        ///< steps done, by its reports; 0: not known
    bool joined = false;           ///< it uses the segment; the fields below are valid only then
    std::uint64_t started_seq = 0;
    std::uint64_t finished_seq = 0;
    SegmentOp operation = SegmentOp::None;
    std::uint64_t bytes = 0;
    bool awaited = false;     ///< the rank has announced that the others must wait for it
    Duration slowest_unit{};  ///< the longest time between two of its commits; zero: it has committed nothing
    bool operator==(const HangSample&) const = default;
};

struct HangVerdict {
    int culprit = -1;  ///< the rank to examine first; -1: none
    std::string what;  ///< "rank 2 has not called all_reduce #812; ranks 0-1, 3 wait in it for 31 s"
    /// Others wait for the culprit, which is stopped, does nothing, or has computed for kSlowestUnits times
    /// its slowest unit. False as well before its first commit, while it computes.
    bool is_overdue = false;
};

/// Decides whether the workers of a job hang, and which rank the others wait for. Pure.
///
/// The rules, most specific first:
///  - ranks have been inside one collective for the timeout: the verdict names the ranks that are not in it;
///  - a rank has been stopped for the timeout;
///  - a rank that used to report progress has reported none for the timeout, and its collectives stand still;
///  - no rank has used CPU time (less than 1 %), read or written anything for the timeout.
/// While ranks wait for an `awaited` one that is not stopped, only a stopped rank is a hang.
/// CPU time counts as progress in the last rule only, because a rank that waits for others may spin.
class HangDetector {
  public:
    explicit HangDetector(Duration timeout) : timeout_(timeout) {}

    /// The time between two samples.
    [[nodiscard]] Duration interval() const;
    /// Forgets everything: for a new generation.
    void reset();
    /// Takes one sample of each rank, in order of rank, always of the same ranks. Time without samples (we
    /// were suspended) does not count.
    std::optional<HangVerdict> feed(const std::vector<HangSample>& samples, TimePoint now);

  private:
    /// The times since which each part of a rank's state is unchanged.
    struct Watch {
        HangSample last;
        TimePoint collective_since, stopped_since, heartbeat_since, idle_since;
        Duration idle_cpu{};  ///< CPU time used at idle_since
    };

    void begin(const std::vector<HangSample>& samples, TimePoint now);
    void update(Watch& watch, const HangSample& sample, TimePoint now) const;
    [[nodiscard]] HangVerdict with_stopped_ranks(HangVerdict verdict) const;
    static HangVerdict blame(const Watch* stopped, std::string what);
    [[nodiscard]] std::optional<HangVerdict> stuck_collective(TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> stopped_rank(TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> lost_heartbeat(TimePoint now) const;
    [[nodiscard]] std::optional<HangVerdict> all_idle(TimePoint now) const;
    [[nodiscard]] std::string doing(const Watch& watch, TimePoint now) const;
    [[nodiscard]] bool computes(const Watch& watch, TimePoint now) const;
    [[nodiscard]] bool is_overdue(const Watch& watch, TimePoint since, TimePoint now) const;

    Duration timeout_;
    std::vector<Watch> watches_;
    TimePoint last_feed_{};
};

}  // namespace ddprun
