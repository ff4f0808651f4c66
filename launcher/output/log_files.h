#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/os/log.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// Lines that could not be kept, for the report.
struct OutputLoss {
    std::uint64_t bytes = 0;
    std::string why;  ///< the first cause: "write /logs/3/stdout.log: No space left on device"
};

/// One log file, rotated at a size: stdout.log, stdout.log.1 (newer), stdout.log.2 ...
///
/// Writing blocks as long as the disk does: LogWriter does it in a thread. Bytes that cannot be written are
/// counted and are no error: the job goes on.
class LogFile {
  public:
    /// Rotated files kept beside the current one.
    static constexpr int kKept = 3;

    LogFile() = default;
    /// `max_bytes` 0 means no rotation. Error: System, naming the file.
    static Result<LogFile> open(std::string path, std::uint64_t max_bytes);

    explicit operator bool() const { return static_cast<bool>(fd_); }
    void write(std::string_view bytes);

    [[nodiscard]] std::uint64_t lost_bytes() const { return lost_bytes_; }
    [[nodiscard]] const std::string& loss() const { return loss_; }

  private:
    void write_all(std::string_view bytes);
    bool rotate();
    void lose(std::uint64_t bytes, std::string_view attempt);

    std::string path_;
    UniqueFd fd_;
    std::uint64_t max_bytes_ = 0;
    std::uint64_t size_ = 0;
    std::uint64_t lost_bytes_ = 0;
    std::string loss_;
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

}  // namespace ddprun
