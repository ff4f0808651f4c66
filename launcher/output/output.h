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
#include "launcher/job_spec.h"
#include "launcher/output/log_files.h"
#include "launcher/output/stream_route.h"

namespace ddprun {

/// The workers whose lines come together here.
struct OutputRanks {
    int here = 0;               ///< workers of this node
    bool is_whole_job = false;  ///< there can be no other node
    bool is_merged = false;     ///< other nodes' lines come to the same place, through what started them
};

/// Reads the workers' pipes on the event loop and writes whole lines to the console and to files.
///
/// Lines of different ranks are never mixed, whatever pieces they arrive in; a line longer than 1 MiB is
/// passed on in marked pieces. When the console is slower than the workers, the workers wait (their pipes
/// fill): nothing is dropped and nothing grows; the same holds for the disk under their files. Neither ever
/// blocks the loop. One object lives for the whole job; streams come and go with generations.
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
    /// What a worker's stream is connected to: a file of its own (redirect only), or a pipe of ours.
    /// False: the child writes straight to the file `direct_file` gives.
    [[nodiscard]] bool needs_pipe(const StreamOwner& owner, Stream stream) const;
    /// The open file for a stream that needs no pipe. Error: System.
    Result<UniqueFd> direct_file(const StreamOwner& owner, Stream stream);

    /// Takes the (non-blocking) read end of a stream. `last_lines` of stderr are kept for the report.
    /// Error: System (epoll); files that cannot be opened are a loss, not an error.
    Status add(UniqueFd pipe, const StreamOwner& owner, Stream stream);

    /// Shows the lines of a (non-blocking) pipe as they are: another ddprun has put its prefixes. It lives
    /// across attempts, until its end, which is told; every piece is told as it is read. Error: System
    /// (epoll).
    Status relay(UniqueFd pipe, Stream stream, std::function<void(std::string_view piece)> on_piece,
                 std::function<void()> on_end);

    /// Shows a piece of what the ddprun of another host sends (output_sender.h) as it is, but by whole lines.
    /// `sender` says whose lines these are, from one piece to the next.
    void show_sent(std::uint64_t sender, Stream stream, std::string_view piece);
    /// Nothing more comes of this sender.
    void end_sent(std::uint64_t sender);
    /// Called from the loop when so many bytes of a sender have gone where there is room for as many more: at
    /// once, or as soon as the console is not full any more.
    void on_shown(std::function<void(std::uint64_t sender, std::uint64_t bytes)> handler);

    /// Reads what rank's pipes hold now, without waiting: before asking for its last lines.
    void read_rest_of(int rank);
    /// Reads what is in the pipes now, without waiting, and finishes half lines. Called when all workers of a
    /// generation have ended; a stream that a surviving grandchild still holds open is closed.
    void finish_attempt();
    /// Whole lines of ddprun's own on the error console, in order with what has been read from the workers
    /// and never inside one of their lines, also when the console is jammed. False: so much of our own waits
    /// already that these are dropped; nobody who makes us talk can make us grow.
    bool say(std::string_view lines, Stream console = Stream::Err);
    /// The same, never dropped: for the report.
    void say_last(std::string_view lines);
    /// The console that a descriptor leads to as well; nullopt: none. Whoever would write there has to say()
    /// it.
    [[nodiscard]] std::optional<Stream> console_at(int fd) const;
    /// True when every byte read has reached the consoles.
    [[nodiscard]] bool consoles_are_written() const;
    /// The same of the files, too.
    [[nodiscard]] bool flushed() const;
    /// The same of the files alone.
    [[nodiscard]] bool files_are_written() const;
    /// Writes what is queued to console and files, blocking until `deadline`. For the end of the job.
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
