#include "launcher/ends/error_file.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include "env/describe.h"
#include "env/io/file.h"
#include "env/json.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostRead = 4 * 1024 * 1024;
/// Of a readable report, whose end names the error in Python's form, and whose beginning does in others.
constexpr std::size_t kMostShown = 64 * 1024, kShownOfBegin = 16 * 1024;

std::string readable_name(const std::string& symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
    return status == 0 ? name.get() : symbol;
}

/// The error texts of NCCL and CUDA, one line each, except those that the message contains.
std::string device_errors(const Json& extra, const std::string& message) {
    std::string lines;
    for (const auto& [key, library] : {std::pair{"nccl_error", "NCCL"}, std::pair{"cuda_error", "CUDA"}}) {
        const std::string words = text_of(extra, key);
        if (!words.empty() && message.find(words) == std::string::npos)
            lines += fmt::format("last {} error: {}\n", library, words);
    }
    return lines;
}

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

std::string without_middle(std::string text) {
    if (text.size() <= kMostShown) return text;
    std::size_t begin = kShownOfBegin, end = text.size() - (kMostShown - kShownOfBegin);
    while (begin > 0 && continues_character(text[begin])) --begin;
    while (end < text.size() && continues_character(text[end])) ++end;
    return fmt::format("{}\n[{} of this report are left out]\n{}", text.substr(0, begin),
                       format_bytes(end - begin), text.substr(end));
}

/// The message, and the trace below it.
std::string message_and_trace(std::string_view content) {
    const Result<Json> json = parse_json_object(content);
    if (!json) return std::string(trim(content));
    // {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}, in older releases {"message":
    // "..."}.
    const Json& inner = member(*json, "message");
    std::string text = as<std::string>(inner).value_or(text_of(inner, "message"));
    if (text.empty()) return std::string(trim(content));
    const Json& extra = member(inner, "extraInfo");
    const std::string stack = with_readable_names(text_of(extra, "py_callstack"));
    const std::string device = device_errors(extra, text);
    // A Python trace ends with the message; do not say it twice.
    if (stack.find(text) != std::string::npos) return device + std::string(trim(stack));
    text += '\n' + device;
    return std::string(trim(text + std::string(trim(stack))));
}

/// The second, since 1970, in which torch (or libddp) says that the error happened.
std::optional<std::int64_t> timestamp_in(std::string_view content) {
    const Result<Json> json = parse_json_object(content);
    if (!json) return std::nullopt;
    const Result<std::int64_t> second =
        parse_int(text_of(member(member(*json, "message"), "extraInfo"), "timestamp"));
    return second ? std::optional(*second) : std::nullopt;
}

/// torch adds the code to reports whose message is an object, and leaves others as they are.
Result<Json> with_code(const std::string& report, int code) {
    Result<Json> json = parse_json_object(report);
    if (!json) return json;
    const auto message = json->find("message");
    if (message == json->end()) return Error::invalid("there is no message");
    if (message->is_object()) (*message)["errorCode"] = code;
    return json;
}

Duration of_timespec(const timespec& time) {
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// The time since 1970.
Duration realtime_now() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    return of_timespec(now);
}

}  // namespace

std::string with_readable_names(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const std::size_t at = text.find("_Z");
        out += text.substr(0, at);
        if (at == std::string_view::npos) break;
        const std::size_t end = text.find_first_of(" +)[]\n", at);
        out += readable_name(std::string(text.substr(at, end - at)));
        text = end == std::string_view::npos ? std::string_view() : text.substr(end);
    }
    return out;
}

std::string read_error_report(const std::string& path) {
    const Result<UniqueFd> file = open_regular_file(path);
    std::string content;
    char piece[16 * 1024];
    while (file && content.size() < kMostRead) {
        const ssize_t n = ::read(file->get(), piece, sizeof piece);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        content.append(piece, static_cast<std::size_t>(n));
    }
    return content;
}

std::string readable_error_file(std::string_view content) {
    return without_middle(message_and_trace(content));
}

std::string render_launcher_error_file(const LauncherFailure& failure) {
    if (const Result<Json> json = with_code(failure.report, failure.error_code)) return to_text(*json) + "\n";
    JsonWriter json;
    json.object("message", [&] {
        json("message", failure.message);
        json("errorCode", failure.error_code);
        json.object("extraInfo", [&] {
            json("py_callstack", failure.trace);
            json("timestamp", std::to_string(failure.unix_seconds));
        });
    });
    return std::move(json).text() + '\n';
}

Status leave_error_file(const EnvironmentLookup& env, const LauncherFailure& failure) {
    const std::string path = env("TORCHELASTIC_ERROR_FILE").value_or("");
    if (path.empty()) return {};
    const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!file) return Error::system("open " + path);
    const std::string text = render_launcher_error_file(failure);
    for (std::string_view rest = text; !rest.empty();) {
        const ssize_t written = ::write(file.get(), rest.data(), rest.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return Error::system("write " + path);
        rest.remove_prefix(static_cast<std::size_t>(written));
    }
    return {};
}

void tell_launcher_above(os::Log& log, LauncherFailure failure, const WorkerEnd* cause, int code) {
    failure.unix_seconds = ::time(nullptr);
    failure.error_code = code;
    if (cause != nullptr) {
        failure.message = fmt::format("rank {} on {}: {}", cause->rank, cause->host, describe_end(*cause));
        failure.trace = cause->error_file;
        if (cause->exec_failure.empty() && !cause->stopped_failing)
            failure.error_code = cause->signaled ? -cause->status : cause->status;
    }
    if (const Status left = leave_error_file(process_environment, failure); !left)
        log.warning("TORCHELASTIC_ERROR_FILE: {}; ignoring", left.error().what);
}

Duration clock_lead_of(const std::string& directory) {
    std::string path = directory + "/.clock-XXXXXX";
    const UniqueFd file(::mkostemp(path.data(), O_CLOEXEC));
    if (!file) return {};
    struct stat status {};
    const Duration before = realtime_now();
    // futimens without times makes the server stamp the file by its own clock, as a write does.
    const bool is_known = ::futimens(file.get(), nullptr) == 0 && ::fstat(file.get(), &status) == 0;
    const Duration after = realtime_now();
    ::unlink(path.c_str());
    if (!is_known) return {};
    // A server with our clock stamps between `before` and `after`, however long the call took.
    const Duration stamp = of_timespec(status.st_mtim);
    if (stamp > after) return stamp - after;
    return stamp + kFileClockTick < before ? stamp - before : Duration::zero();
}

TimePoint time_of_report(const std::string& path, std::string_view content, Duration lead,
                         TimePoint started) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return {};
    const Duration now = realtime_now();
    const TimePoint monotonic_now = MonotonicClock::now();
    Duration written = of_timespec(status.st_mtim) - lead;
    const std::optional<std::int64_t> second = timestamp_in(content);
    if (second && *second >= 0 && *second <= std::chrono::ceil<std::chrono::seconds>(now).count()) {
        const Duration begin = std::chrono::seconds(*second), end = begin + std::chrono::seconds(1);
        if (now - end <= monotonic_now - started) written = std::clamp(written, begin, end);
    }
    return monotonic_now - std::max(now - written, Duration::zero());
}

}  // namespace ddprun
