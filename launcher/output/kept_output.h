#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/io/background_call.h"
#include "env/os/log.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/output/log_writer.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The worker of a stream, for prefixes and file names.
struct StreamOwner {
    int rank = 0;
    int local_rank = 0;
    std::string role = "default";
    std::string host;
};

/// The destinations of one stream of a worker.
struct StreamRoute {
    bool to_console = false;
    bool to_file = false;
    bool is_filtered = false;  ///< lines of it are copied to the file of filtered lines
    /// False when the worker writes to its file, or to /dev/null, itself.
    bool needs_pipe = false;
    bool operator==(const StreamRoute&) const = default;
};

/// `stream` is Out or Err. Without `has_directory`, streams that should go to a file are shown. Pure.
StreamRoute route_of(const OutputSpec& spec, int local_rank, Streams stream, bool has_directory);
/// The filters of a stream: lines that contain one are copied to a file of all ranks. `stream` is Out or Err.
const std::vector<std::string>& filters_of(const OutputSpec& spec, Streams stream);

/// The log files of the current attempt: `<log_dir>/attempt_<attempt>/<rank>/{stdout,stderr}.log` and, beside
/// the rank directories, `filtered_{stdout,stderr}.log`. Opening a file waits for the disk; writing does not
/// (log_writer.h).
class AttemptFiles {
  public:
    /// Both are borrowed for its life.
    AttemptFiles(const OutputSpec& spec, LogWriter& writer) : spec_(spec), writer_(writer) {}

    /// Closes the files of the attempt before. Error: System; this attempt then has no directory and no
    /// files.
    Status begin(int attempt);
    /// "" when the attempt has no directory.
    [[nodiscard]] const std::string& directory() const { return directory_; }

    /// Every rank has a directory, for its error report, even when no stream has a file. Error: System.
    Status make_rank_directory(const StreamOwner& owner) const;
    [[nodiscard]] std::string path_of(const StreamOwner& owner, Streams stream) const;
    /// Error: System.
    Result<LogWriter::Handle> open(const StreamOwner& owner, Streams stream) {
        return open(path_of(owner, stream));
    }
    /// The file for all ranks' filtered lines of this stream; null: no filter is set. Error: System.
    Result<LogWriter::Handle> filtered(Streams stream);

  private:
    Result<LogWriter::Handle> open(const std::string& path);

    const OutputSpec& spec_;
    LogWriter& writer_;
    std::string directory_;
    LogWriter::Handle filtered_out_, filtered_err_;
};

/// The last bytes of a file, at most `max_bytes`; "" when it cannot be read.
std::string read_file_end(const std::string& path, std::size_t max_bytes);
/// The last `count` lines of a text whose first line may be cut off (`is_cut`).
std::vector<std::string> last_lines(std::string_view text, std::size_t count, bool is_cut);

/// Writes a small file and removes it, to learn whether the disk is full. Blocks as the file system does.
/// Error: System ("write into /logs: No space left on device").
Status check_room(const std::string& directory);

/// Makes this run's directory "<--log-dir>/<run id>_<random>", or a temporary one when streams go to files
/// without --log-dir, and returns the output part of `spec` with it. When no temporary one can be made, logs
/// a warning and returns without_files(): the job goes on. Error: InvalidArgument, naming --log-dir.
Result<OutputSpec> prepare_log_directory(const JobSpec& spec, os::Log& log);
/// The same output, to the console only. A head without workers uses it too: log files lie on the nodes.
OutputSpec without_files(OutputSpec output);

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
