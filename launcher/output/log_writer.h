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

/// The thread behind the log files: a disk that hangs (NFS) holds it up, and never the event loop.
///
/// What it has not written yet is bounded: whoever writes stops at is_full() and goes on after on_news().
/// Starts its thread with the first file. All members are for the loop's thread.
class LogWriter {
  public:
    /// One file in its care.
    class File;
    using Handle = std::shared_ptr<File>;

    /// `on_news`: called from the loop when there is room again, and when something has been lost.
    LogWriter(os::EventLoop& loop, std::function<void()> on_news);
    /// Does not wait for a disk that hangs: flush() before.
    ~LogWriter();
    LogWriter(const LogWriter&) = delete;
    LogWriter& operator=(const LogWriter&) = delete;

    /// Error: System (eventfd); the thread cannot be had.
    Result<Handle> add(LogFile file);
    /// Queues; kick() sends it off, once for many.
    void write(const Handle& file, std::string_view bytes);
    /// Once all is written; in the thread, for it takes as long as a write.
    void close(Handle file);
    void kick();

    /// Producers should wait until on_news is called.
    [[nodiscard]] bool is_full();
    [[nodiscard]] bool is_written() const;
    /// Blocks until all is written, or until `deadline`.
    void flush(TimePoint deadline);

    /// Of all files so far, as LogFile counts.
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
    std::shared_ptr<Shared> shared_;  ///< the thread's, too: it may outlive us when its disk hangs
    bool started_ = false;
    bool kick_is_due_ = false;
};

}  // namespace ddprun
