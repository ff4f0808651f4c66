#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "env/event_loop.h"
#include "env/unique_fd.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// Who a stream belongs to, for prefixes and file names.
struct StreamOwner {
    int rank = 0;
    int local_rank = 0;
    std::string role = "default";
    std::string host;
};

/// Lines that could not be kept, for the report.
struct OutputLoss {
    std::uint64_t bytes = 0;
    std::string why;  ///< the first cause: "write /logs/3/stdout.log: No space left on device"
};

/// Reads the workers' pipes on the event loop and writes whole lines to the console and to files.
///
/// Lines of different ranks are never mixed, whatever pieces they arrive in; a line longer than 1 MiB is passed
/// on in marked pieces. When the console is slower than the workers, the workers wait (their pipes fill): nothing
/// is dropped and nothing grows. Writing to the console never blocks the loop.
/// One object lives for the whole job; streams come and go with generations.
class Output {
  public:
    /// `console_out` and `console_err` are borrowed (1 and 2). A log directory that cannot be made is reported by
    /// the first add().
    Output(os::EventLoop& loop, OutputSpec spec, int console_out, int console_err);
    ~Output();

    /// Starts a generation: files go to `<log_dir>/attempt_<attempt>/<rank>/{stdout,stderr}.log`.
    /// A directory that cannot be made is a loss, not an error: the job goes on without files.
    void begin_attempt(int attempt);

    enum class Stream : std::uint8_t { Out, Err };
    /// What a worker's stream is connected to: a file of its own (redirect only), or a pipe of ours.
    /// False: the child writes straight to the file `direct_file` gives.
    [[nodiscard]] bool needs_pipe(const StreamOwner& owner, Stream stream) const;
    /// The open file for a stream that needs no pipe. Error: System.
    Result<UniqueFd> direct_file(const StreamOwner& owner, Stream stream);

    /// Takes the (non-blocking) read end of a stream. `last_lines` of stderr are kept for the report.
    /// Error: System (epoll); files that cannot be opened are a loss, not an error.
    Status add(UniqueFd pipe, const StreamOwner& owner, Stream stream);

    /// Reads what rank's pipes hold now, without waiting: before asking for its last lines.
    void drain(int rank);
    /// Reads what is in the pipes now, without waiting, and finishes half lines. Called when all workers of a
    /// generation have ended; a stream that a surviving grandchild still holds open is closed.
    void finish_attempt();
    /// A line of ddprun's own (without newline) on the error console, in order with what has been read from the
    /// workers and never inside one of their lines, also when the console is jammed.
    void say(std::string_view line);
    /// True when every byte read has reached the console.
    [[nodiscard]] bool flushed() const;
    /// Writes what is queued to the console, blocking until `deadline`. For the end of the job.
    void flush(TimePoint deadline);

    /// The last (at most 20) lines rank wrote to stderr, for the report: from memory, or from its file.
    [[nodiscard]] std::vector<std::string> last_stderr(int rank) const;
    /// When rank last wrote anything, or the time it was added.
    [[nodiscard]] TimePoint last_output(int rank) const;
    [[nodiscard]] const OutputLoss& loss() const;
    /// Directory of this attempt's files, "" when there is none.
    [[nodiscard]] std::string attempt_directory() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddprun
