#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

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

/// The thread that writes the log files, so that a disk that hangs (NFS) never holds up the event loop.
///
/// The unwritten bytes are bounded: producers stop at is_full() and go on after on_news(). The thread starts
/// with the first file. All members are for the loop's thread.
class LogWriter {
  public:
    class File;
    using Handle = std::shared_ptr<File>;

    /// `on_news` is called from the loop when there is room again, and when bytes have been lost.
    LogWriter(os::EventLoop& loop, std::function<void()> on_news);
    /// Does not wait for unwritten bytes: call flush() first.
    ~LogWriter();
    LogWriter(const LogWriter&) = delete;
    LogWriter& operator=(const LogWriter&) = delete;

    /// Error: System (eventfd, or no thread).
    Result<Handle> add(LogFile file);
    /// Queues bytes; a later kick() wakes the thread for all of them.
    void write(const Handle& file, std::string_view bytes);
    /// Closes the file after its last write, in the thread.
    void close(Handle file);
    void kick();

    /// While this is true, producers should wait for on_news.
    [[nodiscard]] bool is_full();
    [[nodiscard]] bool is_written() const;
    /// Blocks until all is written, or until `deadline`.
    void flush(TimePoint deadline);

    /// The sum of LogFile's counts, of all files so far.
    [[nodiscard]] std::uint64_t lost_bytes() const;
    [[nodiscard]] std::string loss() const;

  private:
    static constexpr std::size_t kHighWater = 16 << 20;
    static constexpr std::size_t kLowWater = 4 << 20;

    struct Shared;
    static void run(const std::shared_ptr<Shared>& shared);
    Status start();

    os::EventLoop& loop_;
    std::function<void()> on_news_;
    std::shared_ptr<Shared> shared_;  ///< shared with the thread, which outlives us when its disk hangs
    bool started_ = false;
    bool kick_is_due_ = false;
};

}  // namespace ddprun
