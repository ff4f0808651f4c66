#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/os/event_loop.h"
#include "env/unique_fd.h"
#include "launcher/output/kept_output.h"
#include "launcher/output/lines.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The workers whose lines Output shows.
struct OutputRanks {
    int here = 0;               ///< workers of this node
    bool is_whole_job = false;  ///< the job can have no other node
    bool is_merged = false;     ///< other nodes' lines reach the same console, through their starter
};

/// Reads the workers' pipes on the event loop and writes whole lines to the console and to files.
///
/// Lines of different ranks are never mixed, whatever pieces they arrive in; a line longer than 1 MiB is
/// passed on in marked pieces. When the console or the disk is slower than the workers, the workers wait
/// (their pipes fill): nothing is dropped, nothing grows, and the loop is never blocked. One object lives for
/// the whole job; streams begin and end with generations.
class Output {
  public:
    /// `console_out` and `console_err` are borrowed (1 and 2). A log directory that cannot be made is
    /// reported by the first add().
    Output(os::EventLoop& loop, OutputSpec spec, OutputRanks ranks, int console_out, int console_err);
    ~Output();

    /// Starts a generation: files go to `<log_dir>/attempt_<attempt>/<rank>/{stdout,stderr}.log`.
    /// A directory that cannot be made is a loss, not an error: the job goes on without files.
    void begin_attempt(int attempt);

    enum class Stream : std::uint8_t { Out, Err };
    /// True when a worker's stream needs a pipe of ours; false: the worker writes to `direct_file` itself.
    [[nodiscard]] bool needs_pipe(const StreamOwner& owner, Stream stream) const;
    /// The open file for a stream that needs no pipe. Error: System.
    Result<UniqueFd> direct_file(const StreamOwner& owner, Stream stream);

    /// Takes the (non-blocking) read end of a stream. `last_lines` of stderr are kept for the report.
    /// Error: System (epoll); files that cannot be opened are a loss, not an error.
    Status add(UniqueFd pipe, const StreamOwner& owner, Stream stream);

    /// Shows the lines of a (non-blocking) pipe of another ddprun as they are, with that one's prefixes. The
    /// pipe lives across attempts until its end. `on_piece` is called with every piece read. Error: System
    /// (epoll).
    Status relay(UniqueFd pipe, Stream stream, std::function<void(std::string_view piece)> on_piece,
                 std::function<void()> on_end);

    /// Shows a piece that the ddprun of another host has sent (output_sender.h), by whole lines. `sender`
    /// identifies that ddprun from piece to piece.
    void show_sent(std::uint64_t sender, Stream stream, std::string_view piece);
    /// This sender sends no more: shows the rest of its lines.
    void end_sent(std::uint64_t sender);
    /// `handler` is called from the loop when `bytes` of a sender have been taken and it may send as many
    /// more: at once, or as soon as the console is no longer full.
    void on_shown(std::function<void(std::uint64_t sender, std::uint64_t bytes)> handler);

    /// Reads what the rank's pipes hold, without waiting. Call it before last_stderr().
    void read_rest_of(int rank);
    /// Reads what the workers' pipes hold, without waiting, finishes half lines and closes the streams, even
    /// those that a surviving grandchild holds open. Call it when all workers of a generation have ended.
    void finish_attempt();
    /// Takes a full disk for a loss where workers write to files themselves: we do not see their failed
    /// writes. Call it when all workers of a generation have ended. Blocks as the file system does.
    void check_disk();
    /// Shows whole lines of ddprun's own, in order with what has been read from the workers and never inside
    /// one of their lines. False: 1 MiB of our own lines wait already, so these are dropped (nobody can make
    /// our memory grow).
    bool say(std::string_view lines, Stream console = Stream::Err);
    /// Shows lines as say() does and never drops them: for the report.
    void say_last(std::string_view lines);
    /// The console that `fd` leads to as well; nullopt: none. Text for such a descriptor must go through
    /// say().
    [[nodiscard]] std::optional<Stream> console_at(int fd) const;
    /// True when every byte read has reached the consoles.
    [[nodiscard]] bool consoles_are_written() const;
    /// True when every byte read has reached the consoles and the files.
    [[nodiscard]] bool flushed() const;
    /// True when every byte read has reached the files.
    [[nodiscard]] bool files_are_written() const;
    /// Writes the queues of consoles and files, blocking until `deadline`. For the end of the job.
    void flush(TimePoint deadline);

    /// The last (at most 20) lines rank wrote to stderr, for the report: from memory, or from its file.
    [[nodiscard]] std::vector<std::string> last_stderr(int rank) const;
    /// The time at which the rank last wrote anything, or was added.
    [[nodiscard]] TimePoint last_output(int rank) const;
    [[nodiscard]] const OutputLoss& loss() const;
    /// Directory of this attempt's files, "" when there is none.
    [[nodiscard]] std::string attempt_directory() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddprun
