#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// What is remembered of each rank's output in one attempt: the end of its stderr for the report, and when it
/// last said anything. Of bounded size per rank.
class RankMemory {
  public:
    /// It lives, and has not said anything yet.
    void begins(int rank, TimePoint now) { ranks_[rank].last_output = now; }
    void heard(int rank, Streams stream, std::string_view chunk, TimePoint now);
    /// It writes this file itself: nothing of the stream comes by here.
    void writes_itself(int rank, Streams stream, const std::string& path);
    void clear() { ranks_.clear(); }

    /// The last (at most 20) lines rank wrote to stderr: from memory, or from its file.
    [[nodiscard]] std::vector<std::string> last_stderr(int rank) const;
    /// When rank last wrote anything, or began.
    [[nodiscard]] TimePoint last_output(int rank) const;

  private:
    struct Rank {
        std::string tail;  ///< the end of its stderr
        bool tail_is_cut = false;
        TimePoint last_output{};
        std::string stderr_path;  ///< when stderr goes straight to a file
        std::vector<std::string> direct_files;
    };
    static void remember(Rank& rank, std::string_view chunk);

    std::map<int, Rank> ranks_;
};

}  // namespace ddprun
