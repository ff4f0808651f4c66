#include "launcher/output/log_files.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

Result<UniqueFd> open_log(const std::string& path, int extra_flags) {
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | extra_flags, 0644));
    if (!fd) return Error::system("open " + path);
    return fd;
}

/// The part of `bytes` to write before the rotation: the whole lines that fit, or a line that fits no file.
std::size_t bytes_before_rotation(std::string_view bytes, std::uint64_t room, bool file_is_empty) {
    const std::size_t fitting = bytes.substr(0, room).rfind('\n');
    if (fitting != std::string_view::npos) return fitting + 1;
    if (!file_is_empty) return 0;
    const std::size_t end = bytes.find('\n');
    return end == std::string_view::npos ? bytes.size() : end + 1;
}

bool wants_files(const OutputSpec& output) {
    const auto any = [](const StreamsMap& map) {
        return map.everyone != Streams::None || !map.by_local_rank.empty();
    };
    return any(output.redirects) || any(output.tee) || !output.stdout_filters.empty() ||
           !output.stderr_filters.empty();
}

/// A run id as part of a path: those of PBS array jobs have brackets, users' may have any character and
/// length.
std::string as_file_name(std::string id) {
    constexpr std::size_t kLongest = 200;  // of the 255 bytes of a name, with what stands around it
    if (id.size() > kLongest) id.resize(kLongest);
    std::replace_if(
        id.begin(), id.end(), [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '.'; },
        '_');
    return id;
}

}  // namespace

Result<LogFile> LogFile::open(std::string path, std::uint64_t max_bytes) {
    Result<UniqueFd> fd = open_log(path, 0);
    if (!fd) return fd.error();
    struct stat status {};
    LogFile file;
    if (::fstat(fd->get(), &status) == 0) file.size_ = static_cast<std::uint64_t>(status.st_size);
    file.path_ = std::move(path);
    file.fd_ = *std::move(fd);
    file.max_bytes_ = max_bytes;
    return file;
}

void LogFile::lose(std::uint64_t bytes, std::string_view attempt) {
    if (loss_.empty()) loss_ = fmt::format("{} {}: {}", attempt, path_, ::strerror(errno));
    lost_bytes_ += bytes;
}

void LogFile::write_all(std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return lose(bytes.size(), "write");
        size_ += static_cast<std::uint64_t>(written);
        bytes.remove_prefix(static_cast<std::size_t>(written));
    }
}

void LogFile::write(std::string_view bytes) {
    if (!fd_) {
        lost_bytes_ += bytes.size();
        return;
    }
    while (max_bytes_ != 0 && size_ + bytes.size() > max_bytes_) {
        const std::uint64_t room = max_bytes_ > size_ ? max_bytes_ - size_ : 0;
        const std::size_t now = bytes_before_rotation(bytes, room, size_ == 0);
        const std::uint64_t lost_before = lost_bytes_;
        write_all(bytes.substr(0, now));
        bytes.remove_prefix(now);
        // A file that is too long is better than lost lines; the next write tries again.
        if (bytes.empty() || lost_bytes_ > lost_before || !rotate()) break;
    }
    write_all(bytes);
}

/// False: the file could not be rotated, and nothing has changed.
bool LogFile::rotate() {
    const std::string next = path_ + ".next";
    Result<UniqueFd> fresh = open_log(next, O_TRUNC);
    if (!fresh) return false;
    for (int number = kKept; number > 1; --number) {
        const std::string from = fmt::format("{}.{}", path_, number - 1);
        (void)::rename(from.c_str(), fmt::format("{}.{}", path_, number).c_str());
    }
    if (::rename(path_.c_str(), (path_ + ".1").c_str()) != 0 || ::rename(next.c_str(), path_.c_str()) != 0) {
        ::unlink(next.c_str());
        return false;
    }
    fd_ = *std::move(fresh);
    size_ = 0;
    return true;
}

Status check_room(const std::string& directory) {
    const std::string some(4096, 'x');
    std::string path = directory + "/.room-XXXXXX";
    UniqueFd file(::mkostemp(path.data(), O_CLOEXEC));
    bool has_room =
        file && ::write(file.get(), some.data(), some.size()) == static_cast<ssize_t>(some.size());
    // close(2) is where NFS reports a full disk.
    if (has_room) has_room = ::close(file.release()) == 0;
    const int error = errno;
    ::unlink(path.c_str());
    const bool is_full = !has_room && (error == ENOSPC || error == EDQUOT);
    return is_full ? Status(Error::system("write into " + directory, error)) : Status();
}

std::string read_file_end(const std::string& path, std::size_t max_bytes) {
    const Result<UniqueFd> fd = open_regular_file(path);
    if (!fd) return "";
    const off_t size = ::lseek(fd->get(), 0, SEEK_END);
    const off_t start = std::max<off_t>(0, size - static_cast<off_t>(max_bytes));
    std::string text(static_cast<std::size_t>(std::max<off_t>(0, size - start)), '\0');
    const ssize_t n = ::pread(fd->get(), text.data(), text.size(), start);
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text;
}

std::vector<std::string> last_lines(std::string_view text, std::size_t count, bool is_cut) {
    if (text.ends_with('\n')) text.remove_suffix(1);
    if (text.empty()) return {};
    std::vector<std::string> lines;
    for (const std::string_view line : split(text, '\n')) lines.emplace_back(line);
    if (is_cut && lines.size() > 1) lines.erase(lines.begin());
    if (lines.size() > count) lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(count));
    return lines;
}

Result<OutputSpec> prepare_log_directory(const JobSpec& spec, os::Log& log) {
    OutputSpec output = spec.output;
    if (output.log_dir.empty() && !wants_files(output)) return output;
    const char* temporary = std::getenv("TMPDIR");
    const std::string base = !output.log_dir.empty() ? output.log_dir
                             : temporary != nullptr  ? temporary
                                                     : "/tmp";
    const std::string stem = output.log_dir.empty() ? "ddprun_" : "";
    output.log_dir = fmt::format("{}/{}{}_{}", base, stem, as_file_name(spec.rendezvous.run_id),
                                 random_hex(4).value_or("0"));
    const Status made = make_directories(output.log_dir);
    if (made) {
        if (spec.output.log_dir.empty())
            log.info("log files are in {} (no --log-dir was given)", output.log_dir);
        return output;
    }
    if (!spec.output.log_dir.empty())
        return Error{Errc::InvalidArgument, "--log-dir: " + made.error().what, 0};
    log.warning("no log files: {}; output goes to the console only", made.error().what);
    return without_files(std::move(output));
}

OutputSpec without_files(OutputSpec output) {
    output.log_dir.clear();
    output.redirects = output.tee = {};
    output.stdout_filters.clear();
    output.stderr_filters.clear();
    return output;
}

}  // namespace ddprun
