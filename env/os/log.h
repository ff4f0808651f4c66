#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace spdlog {
class logger;
}

namespace ddprun::os {

/// The numbers are those of spdlog's levels.
enum class LogLevel : std::uint8_t { Debug = 1, Info = 2, Warning = 3, Error = 4, Quiet = 6 };

/// Parses torchrun's LOGLEVEL: a name of Python's logging in any case ("DEBUG", "warn", "CRITICAL"), its
/// number, or "quiet". Error: InvalidArgument.
Result<LogLevel> parse_log_level(std::string_view text);

struct LogOptions {
    LogLevel level = LogLevel::Info;
    bool color = false;
    int fd = 2;  ///< borrowed
};

/// The prefix of a line: "[node02 agent g3]". Empty parts are left out.
struct LogPrefix {
    std::string host;
    std::string component;
    std::optional<std::uint64_t> generation;
};

/// Writes one line per fact: "[node02 agent g3] rank 5 (pid 4171) died of SIGKILL".
///
/// Writing blocks for at most 100 ms, once, until the reader reads again. It never raises SIGPIPE, and its
/// errors are ignored: a launcher must not stop because nobody reads its lines. The next line that can be
/// written tells how many were lost. A text is made printable: a line stays one line. For one thread.
class Log {
  public:
    explicit Log(LogPrefix prefix, LogOptions options = {});
    ~Log();
    Log(Log&& other) noexcept;
    Log& operator=(Log&& other) noexcept;

    /// Another log on the same descriptor ("job" beside "agent"), with its own generation.
    [[nodiscard]] Log with_component(std::string component) const;
    void set_generation(std::uint64_t generation);
    /// Sets the level of all logs on this descriptor.
    void set_level(LogLevel level);
    /// Makes all logs on this descriptor hand their lines (with newline) to `outlet`, the owner of the
    /// descriptor: two writers with their own queues would mix their lines. `outlet` returns false when the
    /// line was lost. nullptr: write to the descriptor again.
    using Outlet = std::function<bool(std::string_view line)>;
    void write_through(Outlet outlet);
    [[nodiscard]] bool is_enabled(LogLevel level) const;

    template <class... Args>
    void debug(fmt::format_string<Args...> text, Args&&... args) {
        write(LogLevel::Debug, text, fmt::make_format_args(args...));
    }
    template <class... Args>
    void info(fmt::format_string<Args...> text, Args&&... args) {
        write(LogLevel::Info, text, fmt::make_format_args(args...));
    }
    template <class... Args>
    void warning(fmt::format_string<Args...> text, Args&&... args) {
        write(LogLevel::Warning, text, fmt::make_format_args(args...));
    }
    template <class... Args>
    void error(fmt::format_string<Args...> text, Args&&... args) {
        write(LogLevel::Error, text, fmt::make_format_args(args...));
    }

  private:
    class Sink;
    Log(LogPrefix prefix, std::shared_ptr<Sink> sink);
    void write(LogLevel level, fmt::string_view text, fmt::format_args args);
    void rename();

    LogPrefix prefix_;
    std::shared_ptr<Sink> sink_;  ///< of all logs on the descriptor; it has the level
    std::unique_ptr<spdlog::logger> logger_;
};

/// Writes lines to a descriptor that others share (stderr) without blocking for long.
///
/// Opens the pipe or terminal behind `fd` again if the kernel allows it, so that O_NONBLOCK holds for its own
/// writes and not for the user's shell. Never raises SIGPIPE.
class LineWriter {
  public:
    explicit LineWriter(int fd);

    /// False when the line, or its end, was lost: the reader is slow or gone, or an error. The first lost
    /// line may have waited 100 ms; later ones do not wait.
    bool write(std::string_view line);
    /// True when the last byte written was not the end of a line.
    [[nodiscard]] bool is_mid_line() const { return mid_line_; }

  private:
    bool write_bytes(std::string_view bytes);
    [[nodiscard]] bool is_nonblocking() const { return kind_ == Kind::Socket || own_; }
    /// False, with EAGAIN, when a write now could block past the deadline.
    [[nodiscard]] bool may_write(TimePoint deadline) const;
    bool wait_until_writable(TimePoint deadline) const;
    [[nodiscard]] ssize_t write_some(std::string_view bytes) const;

    enum class Kind : std::uint8_t { Socket, Other };
    int fd_;
    UniqueFd own_;
    Kind kind_ = Kind::Other;
    bool stalled_ = false;
    bool mid_line_ = false;
};

}  // namespace ddprun::os
