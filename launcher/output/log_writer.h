#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "launcher/output/log_files.h"

namespace ddprun {

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
