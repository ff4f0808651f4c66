#include "env/io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun {
namespace {

std::string directory_of(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return ".";
    return slash == 0 ? "/" : path.substr(0, slash);
}

/// Returns 0 or the errno of the first failure.
int write_all(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd, bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        bytes.remove_prefix(static_cast<std::size_t>(written));
    }
    return 0;
}

/// Makes a new name in the directory survive a power cut.
int sync_directory(const std::string& directory) {
    const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd) return errno;
    // Some network and FUSE file systems have no fsync of directories; the file itself is then safe.
    if (::fsync(fd.get()) == 0 || errno == EINVAL || errno == ENOTSUP) return 0;
    return errno;
}

int fill(int fd, std::string_view content) {
    if (const int failure = write_all(fd, content)) return failure;
    return ::fsync(fd) == 0 ? 0 : errno;
}

/// Makes a file beside `path` with `mode` less the umask, and sets `name`. (mkostemp always uses 0600, and
/// only open(2) knows the umask of a process with threads.) Empty with errno on failure.
UniqueFd create_beside(const std::string& path, mode_t mode, std::string& name) {
    constexpr int kTries = 100;
    for (int attempt = 0; attempt < kTries; ++attempt) {
        std::uint64_t random = 0;
        if (::getrandom(&random, sizeof random, 0) != sizeof random) break;
        name = fmt::format("{}.tmp.{:016x}", path, random);
        UniqueFd fd(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
        if (fd || errno != EEXIST) return fd;
    }
    return UniqueFd();
}

Result<std::string> read_to_end(int fd, const std::string& path, std::size_t max_bytes) {
    // Most files, those of /proc and /sys, are shorter. A larger piece costs a page fault for each 4 KiB,
    // because resize() writes zeros.
    constexpr std::size_t kFirstPiece = 4095;
    std::string content;
    for (;;) {
        const std::size_t have = content.size();
        // Read one byte more than allowed, to detect a file that is too long.
        content.resize(have + std::min(std::max(kFirstPiece, have), max_bytes - have) + 1);
        const ssize_t got = ::read(fd, content.data() + have, content.size() - have);
        const int failure = errno;
        content.resize(have + (got > 0 ? static_cast<std::size_t>(got) : 0));
        if (got < 0 && failure == EINTR) continue;
        if (got < 0) return Error::system("read " + path, failure);
        if (got == 0) return content;
        if (content.size() > max_bytes) {
            return Error{Errc::Limit, fmt::format("read {}: longer than {} bytes", path, max_bytes), 0};
        }
    }
}

/// close(2) is where NFS reports a full disk.
int close_checked(UniqueFd& fd) { return ::close(fd.release()) == 0 ? 0 : errno; }

}  // namespace

Result<std::string> read_file(const std::string& path, std::size_t max_bytes) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
    if (!fd) return Error::system("read " + path);
    return read_to_end(fd.get(), path, max_bytes);
}

Result<UniqueFd> open_regular_file(const std::string& path) {
    // O_NONBLOCK does not change reads of a regular file.
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0) return Error::system(path);
    if (S_ISREG(status.st_mode)) return fd;
    const char* const kind = S_ISDIR(status.st_mode)    ? "directory"
                             : S_ISFIFO(status.st_mode) ? "pipe"
                                                        : "device";
    return Error{Errc::InvalidArgument, fmt::format("{}: is a {}, not a file", path, kind), 0};
}

Result<std::string> read_regular_file(const std::string& path, std::size_t max_bytes) {
    const Result<UniqueFd> fd = open_regular_file(path);
    if (!fd) return fd.error();
    return read_to_end(fd->get(), path, max_bytes);
}

std::string own_directory() {
    std::array<char, 4096> path{};
    const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
    return length > 0 ? directory_of({path.data(), static_cast<std::size_t>(length)}) : "";
}

std::vector<std::string> names_in(const std::string& directory) {
    std::vector<std::string> names;
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(directory.c_str()), ::closedir);
    while (const dirent* const entry = opened ? ::readdir(opened.get()) : nullptr) {
        const std::string_view name = entry->d_name;
        if (name != "." && name != "..") names.emplace_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
}

std::vector<int> numbers_in(const std::string& directory) {
    std::vector<int> numbers;
    for (const std::string& name : names_in(directory)) {
        const Result<std::int64_t> number = parse_int_between(name, 1, 0x7fffffff);
        if (number) numbers.push_back(static_cast<int>(*number));
    }
    std::sort(numbers.begin(), numbers.end());
    return numbers;
}

std::string find_executable(std::string_view name, std::string_view path) {
    const auto is_executable = [](const std::string& file) { return ::access(file.c_str(), X_OK) == 0; };
    if (name.find('/') != name.npos) return is_executable(std::string(name)) ? std::string(name) : "";
    for (const std::string_view directory : split(path, ':')) {
        std::string file = fmt::format("{}/{}", directory, name);
        if (!directory.empty() && is_executable(file)) return file;
    }
    return "";
}

Status check_makeable(const std::string& path) {
    const auto cannot = [&](const std::string& there, const char* why) {
        return Error{Errc::InvalidArgument, fmt::format("{}: {} {} (name another)", path, there, why), 0};
    };
    std::string there = path;
    struct stat status {};
    while (::stat(there.c_str(), &status) != 0) {
        if ((errno != ENOENT && errno != ENOTDIR) || there == "/" || there == ".")
            return cannot(there, ::strerror(errno));
        there = directory_of(there);
    }
    if (!S_ISDIR(status.st_mode)) return cannot(there, "is no directory");
    if (::access(there.c_str(), W_OK | X_OK) != 0) return cannot(there, "cannot be written");
    return {};
}

Status check_replaceable(const std::string& path) {
    const auto cannot = [&](const std::string& why) {
        return Error{Errc::InvalidArgument, fmt::format("{}: {}", path, why), 0};
    };
    const std::string directory = directory_of(path);
    struct stat status {};
    if (::stat(directory.c_str(), &status) != 0) {
        return cannot(fmt::format("the directory {}: {} (make it first, or name another)", directory,
                                  ::strerror(errno)));
    }
    if (!S_ISDIR(status.st_mode)) return cannot(fmt::format("{} is no directory", directory));
    if (::access(directory.c_str(), W_OK | X_OK) != 0) {
        return cannot(fmt::format("the directory {} cannot be written: {} (name another)", directory,
                                  ::strerror(errno)));
    }
    // /dev/stderr may lead to a file, but rename would replace the link itself.
    const bool is_other =
        directory == "/dev" || (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode));
    return is_other ? Status(cannot("exists and is no regular file (name another)")) : Status();
}

Status write_file_atomically(const std::string& path, std::string_view content, mode_t mode) {
    // Use the same directory, because rename cannot cross file systems.
    std::string temporary;
    UniqueFd fd = create_beside(path, mode, temporary);
    if (!fd) return Error::system("write " + path);
    int failure = fill(fd.get(), content);
    if (const int closed = close_checked(fd); failure == 0) failure = closed;
    if (failure == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) failure = errno;
    if (failure != 0) {
        ::unlink(temporary.c_str());
        return Error::system("write " + path, failure);
    }
    failure = sync_directory(directory_of(path));
    if (failure != 0) return Error::system("sync directory of " + path, failure);
    return {};
}

Status make_directories(const std::string& path) {
    if (path.empty()) return Error::invalid("the directory has no name");
    for (std::size_t end = 0; end != std::string::npos;) {
        end = path.find('/', end + 1);
        const std::string upto = path.substr(0, end);
        // An existing directory, the common case, costs one call: mkdir reports EEXIST before a missing
        // permission or a read-only disk.
        if (::mkdir(upto.c_str(), 0777) == 0 || errno == EEXIST) continue;
        return Error::system("mkdir " + upto);
    }
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return Error::system("mkdir " + path);
    if (!S_ISDIR(status.st_mode)) return Error::system("mkdir " + path, ENOTDIR);
    return {};
}

TimePoint last_write(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return {};
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    const Duration ago = std::chrono::seconds(now.tv_sec - status.st_mtim.tv_sec) +
                         std::chrono::nanoseconds(now.tv_nsec - status.st_mtim.tv_nsec);
    return MonotonicClock::now() - std::max(ago, Duration::zero());
}

Status resize_memory_file(int fd, std::uint64_t bytes) {
    rlimit before{};
    const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &before) == 0 && before.rlim_cur < bytes;
    // Do not try: it would also raise SIGXFSZ.
    if (is_limited && before.rlim_max < bytes) {
        return Error{
            Errc::Limit,
            fmt::format("shared memory of {}: files may have {} at most: raise the hard limit (ulimit "
                        "-Hf); nothing is taken from disk or memory until it is used",
                        format_bytes(bytes), format_bytes(before.rlim_max))};
    }
    const rlimit raised{before.rlim_max, before.rlim_max};
    if (is_limited) ::setrlimit(RLIMIT_FSIZE, &raised);
    const bool resized = ::ftruncate(fd, static_cast<off_t>(bytes)) == 0;
    const int error = errno;
    if (is_limited) ::setrlimit(RLIMIT_FSIZE, &before);
    return resized ? Status{} : Error::system("ftruncate of shared memory", error);
}

std::uint64_t room_in_memory_file(std::uint64_t before, std::uint64_t wanted) {
    constexpr std::uint64_t kPage = 4096;
    rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_max >= before + wanted) return wanted;
    return limit.rlim_max > before ? (limit.rlim_max - before) / kPage * kPage : 0;
}

}  // namespace ddprun
