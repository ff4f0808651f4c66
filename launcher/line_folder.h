#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "env/clock.h"

namespace ddprun {

/// One line and the ranks that said it, sorted.
struct FoldedLine {
    std::vector<int> ranks;
    std::string text;  ///< with its newline
    bool operator==(const FoldedLine&) const = default;
};

/// Holds lines back for a moment, so that the same line of many ranks is shown once.
///
/// Pure: time is an argument. The lines of one rank keep their order. At most kMaxHeld lines are held.
class LineFolder {
  public:
    static constexpr std::size_t kMaxHeld = 256;

    explicit LineFolder(Duration window) : window_(window) {}
    /// How many ranks there are: a line that all have said waits no longer.
    void set_world(std::size_t ranks) { world_ = ranks; }

    void offer(int rank, std::string_view line, TimePoint now);
    /// The lines that have waited long enough, in order.
    [[nodiscard]] std::vector<FoldedLine> due(TimePoint now);
    /// Everything held.
    [[nodiscard]] std::vector<FoldedLine> all();
    /// When due() has something to give at the latest; kNever when nothing is held.
    [[nodiscard]] TimePoint next_due() const;

  private:
    struct Held {
        FoldedLine line;
        std::size_t hash;
        TimePoint since;
    };
    FoldedLine pop();

    Duration window_;
    std::size_t world_ = 0;
    std::deque<Held> held_;
    std::uint64_t first_ = 0;  ///< number of held_.front(), counting all lines ever held
    std::unordered_map<int, std::uint64_t> next_of_rank_;  ///< first line this rank may still join
};

}  // namespace ddprun
