#pragma once

#include <string>

#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/output/log_writer.h"
#include "launcher/output/stream_route.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

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

}  // namespace ddprun
