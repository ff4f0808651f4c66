#include "env/os/log.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>

#include "env/text.h"

namespace ddprun::os {
namespace {

spdlog::level::level_enum spdlog_level(LogLevel level) {
    return static_cast<spdlog::level::level_enum>(level);
}
static_assert(static_cast<int>(LogLevel::Debug) == SPDLOG_LEVEL_DEBUG &&
              static_cast<int>(LogLevel::Quiet) == SPDLOG_LEVEL_OFF);

std::string_view color_of(spdlog::level::level_enum level) {
    switch (level) {
        case spdlog::level::err: return "\033[31m";
        case spdlog::level::warn: return "\033[33m";
        case spdlog::level::debug: return "\033[2m";
        default: return "";
    }
}

}  // namespace

Result<LogLevel> parse_log_level(std::string_view text) {
    const std::string word = lower(text);
    if (word == "debug" || word == "trace" || word == "notset") return LogLevel::Debug;
    if (word == "info") return LogLevel::Info;
    if (word == "warn" || word == "warning") return LogLevel::Warning;
    if (word == "error" || word == "critical" || word == "fatal") return LogLevel::Error;
    if (word == "quiet" || word == "off") return LogLevel::Quiet;
    // Python's numbers: a level shows itself and all levels above it.
    const Result<std::int64_t> number = parse_int_between(word, 0, 1000);
    if (!number) {
        return Error{
            Errc::InvalidArgument,
            fmt::format("'{}' is not a log level (expected debug, info, warning, error or quiet)", text), 0};
    }
    if (*number <= 10) return LogLevel::Debug;
    if (*number <= 20) return LogLevel::Info;
    return *number <= 30 ? LogLevel::Warning : LogLevel::Error;
}

/// Hands lines in our pattern to a writer that does not block.
class Log::Sink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
  public:
    Sink(int fd, bool color)
        : base_sink(std::make_unique<spdlog::pattern_formatter>("%^%n%v%$")), writer_(fd), color_(color) {}

    void write_through(Outlet outlet) {
        outlet_ = std::move(outlet);
        // The outlet ends a line that the writer could only begin.
        if (outlet_ && writer_.is_mid_line()) (void)outlet_("\n");
    }

  private:
    void sink_it_(const spdlog::details::log_msg& message) override {
        report_lost(message.logger_name);
        if (!write(message)) ++lost_;
    }
    void flush_() override {}

    bool write(const spdlog::details::log_msg& message) {
        spdlog::memory_buf_t formatted;
        formatter_->format(message, formatted);
        std::string line(formatted.data(), formatted.size());
        if (const std::string_view color = color_of(message.level); color_ && !color.empty()) {
            line.insert(message.color_range_end, "\033[0m");
            line.insert(message.color_range_start, color);
        }
        return outlet_ ? outlet_(line) : writer_.write(line);
    }

    void report_lost(spdlog::string_view_t who) {
        if (lost_ == 0) return;
        const std::string text =
            fmt::format("{} {} could not be written before this one", lost_, lost_ == 1 ? "line" : "lines");
        if (write({who, spdlog::level::info, text})) lost_ = 0;
    }

    LineWriter writer_;
    Outlet outlet_;
    bool color_;
    std::uint64_t lost_ = 0;
};

Log::Log(LogPrefix prefix, LogOptions options)
    : Log(std::move(prefix), std::make_shared<Sink>(options.fd, options.color)) {
    set_level(options.level);
}

Log::Log(LogPrefix prefix, std::shared_ptr<Sink> sink) : prefix_(std::move(prefix)), sink_(std::move(sink)) {
    rename();
}

Log::~Log() = default;
Log::Log(Log&& other) noexcept = default;
Log& Log::operator=(Log&& other) noexcept = default;

Log Log::with_component(std::string component) const {
    LogPrefix prefix = prefix_;
    prefix.component = std::move(component);
    return {std::move(prefix), sink_};
}

void Log::set_generation(std::uint64_t generation) {
    prefix_.generation = generation;
    rename();
}

void Log::set_level(LogLevel level) { sink_->set_level(spdlog_level(level)); }

void Log::write_through(Outlet outlet) { sink_->write_through(std::move(outlet)); }

bool Log::is_enabled(LogLevel level) const {
    return level != LogLevel::Quiet && sink_->should_log(spdlog_level(level));
}

/// Makes a new logger, as a logger cannot change its name. It is not in spdlog's registry: no global state,
/// nothing is done at exit.
void Log::rename() {
    std::vector<std::string> parts;
    if (!prefix_.host.empty()) parts.push_back(prefix_.host);
    if (!prefix_.component.empty()) parts.push_back(prefix_.component);
    if (prefix_.generation) parts.push_back(fmt::format("g{}", *prefix_.generation));
    logger_ = std::make_unique<spdlog::logger>(parts.empty() ? "" : printable("[" + join(parts, " ") + "] "),
                                               sink_);
    logger_->set_level(spdlog::level::trace);
}

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args args) {
    if (!is_enabled(level)) return;
    // spdlog gets the finished text: a brace in a worker's name must not be read as a format.
    // Hosts, programs and peers can put anything into it: a terminal must not obey it.
    logger_->log(spdlog_level(level), spdlog::string_view_t(printable(fmt::vformat(text, args))));
}

namespace {

constexpr Duration kWriteTimeout = std::chrono::milliseconds(100);
/// The bytes that a pipe takes without blocking after poll() reports it as writable (PIPE_BUF).
constexpr std::size_t kPiece = 4096;

/// Opens the pipe or terminal behind `fd` again; empty for others. A second open of a regular file would have
/// its own position and overwrite others' lines.
UniqueFd reopen_nonblocking(int fd, const struct stat& status) {
    if (!S_ISFIFO(status.st_mode) && !(S_ISCHR(status.st_mode) && ::isatty(fd) == 1)) return {};
    const std::string path = fmt::format("/proc/self/fd/{}", fd);
    return UniqueFd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

/// Blocks and consumes SIGPIPE during a write, because write(2) has no MSG_NOSIGNAL.
class SigpipeHeld {
  public:
    SigpipeHeld() {
        ::sigemptyset(&pipe_);
        ::sigaddset(&pipe_, SIGPIPE);
        sigset_t pending;
        ::sigpending(&pending);
        was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
        ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
    }
    ~SigpipeHeld() {
        const int error = errno;
        const timespec at_once{};
        if (!was_pending_) ::sigtimedwait(&pipe_, nullptr, &at_once);
        ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
        errno = error;
    }
    SigpipeHeld(const SigpipeHeld&) = delete;
    SigpipeHeld& operator=(const SigpipeHeld&) = delete;

  private:
    sigset_t pipe_;
    sigset_t before_;
    bool was_pending_;
};

}  // namespace

LineWriter::LineWriter(int fd) : fd_(fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0) return;
    if (S_ISSOCK(status.st_mode)) kind_ = Kind::Socket;
    else own_ = reopen_nonblocking(fd, status);
    if (own_) fd_ = own_.get();
}

bool LineWriter::wait_until_writable(TimePoint deadline) const {
    pollfd entry{fd_, POLLOUT, 0};
    return ::poll(&entry, 1, poll_milliseconds(MonotonicClock::now(), deadline)) > 0;
}

bool LineWriter::may_write(TimePoint deadline) const {
    if (is_nonblocking() || wait_until_writable(deadline)) return true;
    errno = EAGAIN;
    return false;
}

ssize_t LineWriter::write_some(std::string_view bytes) const {
    const std::size_t piece = std::min(bytes.size(), kPiece);
    if (kind_ == Kind::Socket) return ::send(fd_, bytes.data(), piece, MSG_NOSIGNAL | MSG_DONTWAIT);
    const SigpipeHeld held;
    return ::write(fd_, bytes.data(), piece);
}

bool LineWriter::write(std::string_view line) {
    // End a line that was written in part, so that it does not run into this one.
    if (mid_line_ && !write_bytes("\n")) return false;
    return write_bytes(line);
}

bool LineWriter::write_bytes(std::string_view bytes) {
    const TimePoint now = MonotonicClock::now();
    const TimePoint deadline = stalled_ ? now : now + kWriteTimeout;
    while (!bytes.empty()) {
        const ssize_t written = may_write(deadline) ? write_some(bytes) : -1;
        if (written > 0) {
            mid_line_ = bytes[static_cast<std::size_t>(written) - 1] != '\n';
            bytes.remove_prefix(static_cast<std::size_t>(written));
            continue;
        }
        const bool busy = errno == EAGAIN || errno == EINTR;
        if (busy && MonotonicClock::now() < deadline) {
            wait_until_writable(deadline);
            continue;
        }
        stalled_ = busy;
        return false;
    }
    stalled_ = false;
    return true;
}

}  // namespace ddprun::os
