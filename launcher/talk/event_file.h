#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// One line of --events; see docs/events.md.
struct JobEventLine {
    using Value = std::variant<std::int64_t, double, bool, std::string>;
    std::string event;
    std::uint64_t generation = 0;
    std::vector<std::pair<std::string, Value>> fields;
};

/// The writer, the same in every line.
struct EventOrigin {
    std::string job;
    std::string run_id;
    std::string host;
};

/// The line, with newline. `seconds` count from the epoch.
std::string to_json(const EventOrigin& origin, const JobEventLine& line, double seconds);
/// "2025-03-01T12:30:05.123456Z". Pure.
std::string format_utc(double seconds);

/// Appends lines to a file, each with one write, so that several jobs can share it. A write that fails loses
/// its line and never stops the job: the first is logged, and lost lines are counted. Lines for a console
/// ("/dev/stderr", or the log that standard output goes to) go through its owner, so that no line is torn.
class EventFile {
  public:
    using Say = std::function<void(std::string_view line)>;
    /// False: the line is lost.
    using Write = std::function<bool(std::string_view line)>;
    /// The function that writes whole lines, with newline, to the console that a descriptor leads to;
    /// nullptr: no console.
    using ConsoleAt = std::function<Write(int fd)>;

    /// Error: System naming the file.
    static Result<std::unique_ptr<EventFile>> open(const std::string& path, EventOrigin origin,
                                                   const ConsoleAt& console_at, Say warn);

    void write(const JobEventLine& line);
    [[nodiscard]] std::uint64_t lost() const { return lost_; }

  private:
    EventFile(std::string path, EventOrigin origin, Say warn)
        : path_(std::move(path)), origin_(std::move(origin)), warn_(std::move(warn)) {}
    void append(std::string_view line);

    std::string path_;
    EventOrigin origin_;
    Say warn_;
    Write console_;  ///< nullptr: the file is ours
    UniqueFd fd_;
    bool torn_ = false;  ///< the last line is not complete
    std::uint64_t lost_ = 0;
};

}  // namespace ddprun
