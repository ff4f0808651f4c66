#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/io/background_call.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// Remembers the end of each rank's stderr in one attempt, for the report, and the time of its last output.
/// Bounded per rank.
class RankMemory {
  public:
    /// The rank starts now, without output so far; what an earlier process of the rank wrote is forgotten.
    void begin(int rank, TimePoint now);
    void on_output(int rank, Streams stream, std::string_view chunk, TimePoint now);
    /// The rank writes this stream to a file itself, without on_output().
    void add_direct_file(int rank, Streams stream, const std::string& path);
    /// True when some rank writes a stream to a file itself.
    [[nodiscard]] bool has_direct_files() const;
    void clear() { ranks_.clear(); }

    /// The last (at most 20) lines rank wrote to stderr: from memory, or from its file.
    [[nodiscard]] std::vector<std::string> last_stderr(int rank) const;
    /// The time at which the rank last wrote anything, or began. Another thread reads the times of direct
    /// files: blocks for 50 ms at most, and where their file system hangs returns what is known.
    [[nodiscard]] TimePoint last_output(int rank);

  private:
    using FileTimes = std::map<std::string, TimePoint>;  ///< by path
    struct Rank {
        std::string tail;  ///< the end of its stderr
        bool tail_is_cut = false;
        TimePoint last_output{};
        std::string stderr_path;  ///< when stderr goes straight to a file
        std::vector<std::string> direct_files;
    };
    static void remember(Rank& rank, std::string_view chunk);
    void read_file_times();

    std::map<int, Rank> ranks_;
    FileTimes file_times_;
    TimePoint file_times_read_{};
    std::optional<BackgroundCall<FileTimes>> reading_;  ///< nullopt: no thread is reading
};

}  // namespace ddprun
