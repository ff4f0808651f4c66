#include "env/os/line_writer.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>

namespace ddprun::os {
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
