#pragma once

#include <string>

#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/job_spec.h"
#include "launcher/output/log_writer.h"
#include "launcher/output/stream_route.h"

namespace ddprun {

/// The files of one attempt after the other: `<log_dir>/attempt_<attempt>/<rank>/{stdout,stderr}.log`, and
/// beside the ranks' `filtered_{stdout,stderr}.log`. Opening waits for the disk; writing does not
/// (log_writer.h).
class AttemptFiles {
  public:
    /// Both are borrowed for its life.
    AttemptFiles(const OutputSpec& spec, LogWriter& writer) : spec_(spec), writer_(writer) {}

    /// Closes those of the attempt before. Error: System; then this one has no directory, and no files.
    Status begin(int attempt);
    /// "" there is none.
    [[nodiscard]] const std::string& directory() const { return directory_; }

    /// Error: System. A rank has a directory also where none of its streams has a file: error reports lie
    /// there.
    Status make_rank_directory(const StreamOwner& owner) const;
    [[nodiscard]] std::string path_of(const StreamOwner& owner, Streams stream) const;
    /// Error: System.
    Result<LogWriter::Handle> open(const StreamOwner& owner, Streams stream) {
        return open(path_of(owner, stream));
    }
    /// Where lines of this stream are copied to, of all ranks; null: nowhere. Error: System.
    Result<LogWriter::Handle> filtered(Streams stream);

  private:
    Result<LogWriter::Handle> open(const std::string& path);

    const OutputSpec& spec_;
    LogWriter& writer_;
    std::string directory_;
    LogWriter::Handle filtered_out_, filtered_err_;
};

}  // namespace ddprun
