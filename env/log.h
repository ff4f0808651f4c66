#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "env/result.h"

namespace ddprun::os {

enum class LogLevel : std::uint8_t { Debug, Info, Warning, Error, Quiet };

/// torchrun's LOGLEVEL: a name of Python's logging, any case ("DEBUG", "warn", "CRITICAL"), its number, or
/// "quiet". Error: InvalidArgument.
Result<LogLevel> parse_log_level(std::string_view text);

struct LogOptions {
    LogLevel level = LogLevel::Info;
    bool color = false;
    int fd = 2;  ///< borrowed
};

/// Who speaks: "[node02 agent g3]". Empty parts are left out.
struct LogPrefix {
    std::string host;
    std::string component;
    std::optional<std::uint64_t> generation;
};

/// Writes one line per fact: "[node02 agent g3] rank 5 (pid 4171) died of SIGKILL".
///
/// Writing takes at most a moment (100 ms, once, until the reader comes back), never raises SIGPIPE, and its
/// errors are ignored: a launcher must not stop because nobody reads what it says. Lines that could not be
/// written are counted and the count is said in the next one that can. Control characters in a text are shown
/// as \n, \x1b: a line stays one line. For one thread.
class Log {
  public:
    explicit Log(LogPrefix prefix, LogOptions options = {});
    ~Log();
    Log(Log&& other) noexcept;
    Log& operator=(Log&& other) noexcept;

    /// Another voice on the same descriptor ("job" beside "agent"), with its own generation.
    [[nodiscard]] Log with_component(std::string component) const;
    void set_generation(std::uint64_t generation);
    /// Of all voices on this descriptor.
    void set_level(LogLevel level);
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
    struct Output;
    Log(LogPrefix prefix, std::shared_ptr<Output> output);
    void write(LogLevel level, fmt::string_view text, fmt::format_args args);
    void rebuild_prefix();

    LogPrefix prefix_;
    std::string shown_prefix_;
    std::shared_ptr<Output> output_;
};

}  // namespace ddprun::os
