#include "env/os/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>

#include "env/os/line_writer.h"
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

}  // namespace ddprun::os
