#include "launcher/talk/event_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <time.h>
#include <unistd.h>

#include <cmath>

#include "env/clock.h"
#include "env/describe.h"

namespace ddprun {

std::string format_utc(double seconds) {
    const auto micros = static_cast<std::int64_t>(std::llround(seconds * 1e6));
    const auto whole = static_cast<time_t>(micros / 1'000'000);
    tm utc{};
    ::gmtime_r(&whole, &utc);
    return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z", utc.tm_year + 1900, utc.tm_mon + 1,
                       utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, micros % 1'000'000);
}

std::string to_json(const EventOrigin& origin, const JobEventLine& line, double seconds) {
    JsonWriter json;
    json("time", format_utc(seconds));
    json("event", line.event);
    json("job", origin.job);
    json("run_id", origin.run_id);
    json("host", origin.host);
    json("generation", line.generation);
    for (const auto& [key, value] : line.fields)
        std::visit([&json, &name = key](const auto& one) { json(name, one); }, value);
    return std::move(json).text() + '\n';
}

Result<std::unique_ptr<EventFile>> EventFile::open(const std::string& path, EventOrigin origin,
                                                   const ConsoleAt& console_at, Say warn) {
    std::unique_ptr<EventFile> file(new EventFile(path, std::move(origin), std::move(warn)));
    // Compare names, because a socket cannot be opened by its path.
    const int standard = path == "/dev/stdout" ? 1 : path == "/dev/stderr" ? 2 : -1;
    if (standard > 0 && console_at && (file->console_ = console_at(standard))) return file;
    // O_NONBLOCK: a FIFO with a slow reader, or without one, must not hold up the job.
    file->fd_.reset(
        ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644));
    if (!file->fd_) return Error::system("open " + path);
    if (console_at) file->console_ = console_at(file->fd_.get());
    return file;
}

void EventFile::write(const JobEventLine& line) {
    const std::string text = to_json(origin_, line, wall_clock());
    if (!console_) return append(text);
    if (!console_(text)) ++lost_;
}

void EventFile::append(std::string_view line) {
    const std::string text = (torn_ ? "\n" : "") + std::string(line);
    ssize_t written = 0;
    do written = ::write(fd_.get(), text.data(), text.size());
    while (written < 0 && errno == EINTR);
    if (written == static_cast<ssize_t>(text.size())) {
        torn_ = false;
        return;
    }
    const std::string why = written < 0
                                ? Error::system("write " + path_).what
                                : fmt::format("write {}: only {} of {} bytes", path_, written, text.size());
    // After a part of a line, the next write begins with a newline.
    if (written > 0) torn_ = true;
    if (++lost_ == 1) warn_(fmt::format("{}; this and further lines may be lost, the job goes on", why));
}

}  // namespace ddprun
