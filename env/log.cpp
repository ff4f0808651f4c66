#include "env/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>

#include "env/line_writer.h"
#include "env/text.h"

namespace ddprun::os {
namespace {

spdlog::level::level_enum spdlog_level(LogLevel level) {
    switch (level) {
        case LogLevel::Debug:
            return spdlog::level::debug;
        case LogLevel::Info:
            return spdlog::level::info;
        case LogLevel::Warning:
            return spdlog::level::warn;
        case LogLevel::Error:
            return spdlog::level::err;
        case LogLevel::Quiet:
            return spdlog::level::off;
    }
    return spdlog::level::off;
}

std::string_view color_of(spdlog::level::level_enum level) {
    switch (level) {
        case spdlog::level::err:
            return "\033[31m";
        case spdlog::level::warn:
            return "\033[33m";
        case spdlog::level::debug:
            return "\033[2m";
        default:
            return "";
    }
}

/// Hosts, programs and peers can put anything into a text; a terminal must not obey it.
std::string on_one_line(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '\n') out += "\\n";
        else if ((byte < 0x20 && c != '\t') || byte == 0x7f) out += fmt::format("\\x{:02x}", byte);
        else out += c;
    }
    return out;
}

class LineSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
  public:
    LineSink(int fd, bool color) : writer_(fd), color_(color) {}

  private:
    void sink_it_(const spdlog::details::log_msg& message) override {
        report_lost(message.logger_name);
        const std::string_view text(message.payload.data(), message.payload.size());
        const std::string_view color = color_ ? color_of(message.level) : std::string_view();
        if (!write(message.logger_name, text, color)) ++lost_;
    }
    void flush_() override {}

    bool write(spdlog::string_view_t prefix, std::string_view text, std::string_view color) {
        const std::string_view reset = color.empty() ? "" : "\033[0m";
        return writer_.write(fmt::format("{}{}{}{}\n", color, prefix, text, reset));
    }

    void report_lost(spdlog::string_view_t prefix) {
        if (lost_ == 0) return;
        const std::string_view lines = lost_ == 1 ? "line" : "lines";
        const std::string text = fmt::format("{} {} could not be written before this one", lost_, lines);
        if (write(prefix, text, "")) lost_ = 0;
    }

    LineWriter writer_;
    bool color_;
    std::uint64_t lost_ = 0;
};

}  // namespace

Result<LogLevel> parse_log_level(std::string_view text) {
    const std::string word = lower(text);
    if (word == "debug" || word == "trace" || word == "notset") return LogLevel::Debug;
    if (word == "info") return LogLevel::Info;
    if (word == "warn" || word == "warning") return LogLevel::Warning;
    if (word == "error" || word == "critical" || word == "fatal") return LogLevel::Error;
    if (word == "quiet" || word == "off") return LogLevel::Quiet;
    // Python's numbers: a level shows itself and all above it.
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

/// A logger of our own, outside spdlog's registry: no global state, nothing done at exit.
struct Log::Output {
    Output(int fd, bool color) : sink(std::make_shared<LineSink>(fd, color)), logger("", sink) {}
    std::shared_ptr<LineSink> sink;
    spdlog::logger logger;
};

Log::Log(LogPrefix prefix, LogOptions options)
    : Log(std::move(prefix), std::make_shared<Output>(options.fd, options.color)) {
    set_level(options.level);
}

Log::Log(LogPrefix prefix, std::shared_ptr<Output> output)
    : prefix_(std::move(prefix)), output_(std::move(output)) {
    rebuild_prefix();
}

Log::~Log() = default;
Log::Log(Log&& other) noexcept = default;
Log& Log::operator=(Log&& other) noexcept = default;

Log Log::with_component(std::string component) const {
    LogPrefix prefix = prefix_;
    prefix.component = std::move(component);
    return {std::move(prefix), output_};
}

void Log::set_generation(std::uint64_t generation) {
    prefix_.generation = generation;
    rebuild_prefix();
}

void Log::set_level(LogLevel level) { output_->logger.set_level(spdlog_level(level)); }

bool Log::is_enabled(LogLevel level) const {
    return level != LogLevel::Quiet && output_->logger.should_log(spdlog_level(level));
}

void Log::rebuild_prefix() {
    std::vector<std::string> parts;
    if (!prefix_.host.empty()) parts.push_back(prefix_.host);
    if (!prefix_.component.empty()) parts.push_back(prefix_.component);
    if (prefix_.generation) parts.push_back(fmt::format("g{}", *prefix_.generation));
    shown_prefix_ = parts.empty() ? "" : on_one_line("[" + join(parts, " ") + "] ");
}

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args args) {
    if (!is_enabled(level)) return;
    // spdlog gets the finished text: a brace in a worker's name must not be read as a format.
    const std::string line = on_one_line(fmt::vformat(text, args));
    const spdlog::details::log_msg message(shown_prefix_, spdlog_level(level), line);
    output_->sink->log(message);
}

}  // namespace ddprun::os
