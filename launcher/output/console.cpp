#include "launcher/output/console.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>

namespace ddprun {

namespace {

/// Bytes that a terminal which cannot be opened again takes after poll() without blocking for long.
constexpr std::size_t kPolledPiece = 256;
/// Bytes per write(2), so that one call does not hold up the loop.
constexpr std::size_t kPiece = 1 << 20;

/// Bytes of our own lines that may wait for the console; further lines are dropped, because we cannot pause.
constexpr std::size_t kMaxOwn = 1 << 20;

/// The local time of day: "14:03:59.123".
std::string time_of_day() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    tm local{};
    ::localtime_r(&now.tv_sec, &local);
    return fmt::format("{:02}:{:02}:{:02}.{:03}", local.tm_hour, local.tm_min, local.tm_sec,
                       now.tv_nsec / 1'000'000);
}

std::string time_for(const PrefixTemplate& prefix) { return prefix.names_time() ? time_of_day() : ""; }

}  // namespace

// O_NONBLOCK belongs to the open file description, which our stdout shares with the user's shell and with
// every process on the terminal: setting it there breaks them. Opening /proc/self/fd/N again gives a
// description of our own for pipes and terminals. Sockets have MSG_DONTWAIT, files and /dev/null do not
// block. Any other place (a terminal that belongs to another user, after su) is polled and written in small
// pieces.
void Console::open_own(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0) return;
    if (S_ISSOCK(status.st_mode)) {
        kind_ = Kind::Socket;
        return;
    }
    is_terminal_ = ::isatty(fd) == 1;
    if (S_ISREG(status.st_mode) || (S_ISCHR(status.st_mode) && !is_terminal_)) {
        kind_ = Kind::NeverBlocks;
        return;
    }
    const std::string path = fmt::format("/proc/self/fd/{}", fd);
    own_.reset(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
    if (!own_) return;
    kind_ = Kind::Own;
    fd_ = own_.get();
}

Console::Console(os::EventLoop& loop, int fd) : loop_(loop), fd_(fd) {
    ::signal(SIGPIPE, SIG_IGN);
    open_own(fd);
}

Console::~Console() { stop_waiting(); }

bool Console::is_same_place(int one, int other) {
    struct stat a {
    }, b{};
    if (::fstat(one, &a) != 0 || ::fstat(other, &b) != 0) return false;
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_rdev == b.st_rdev;
}

bool Console::has_room_now() const {
    pollfd poll{fd_, POLLOUT, 0};
    return ::poll(&poll, 1, 0) == 1;
}

/// Returns as write(2) does, with EAGAIN when it would block.
ssize_t Console::write_some(std::string_view bytes) const {
    const std::string_view piece = bytes.substr(0, kPiece);
    switch (kind_) {
        case Kind::Own:
        case Kind::NeverBlocks: return ::write(fd_, piece.data(), piece.size());
        case Kind::Socket: return ::send(fd_, piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        case Kind::Polled: break;
    }
    if (!has_room_now()) {
        errno = EAGAIN;
        return -1;
    }
    return ::write(fd_, piece.data(), std::min(piece.size(), kPolledPiece));
}

void Console::write() {
    while (!closed_ && pending() > 0) {
        const ssize_t written = write_some(std::string_view(queue_).substr(head_));
        if (written >= 0) {
            head_ += static_cast<std::size_t>(written);
            gone_ += static_cast<std::size_t>(written);
            continue;
        }
        if (errno == EINTR) continue;
        if (errno == EAGAIN) break;
        give_up(errno);
    }
    if (closed_ && pending() > 0) give_up(0);
    compact();
    was_full_ = was_full_ || is_full();
    if (pending() > 0) wait_for_room();
    else stop_waiting();
    if (was_full_ && pending() <= kLowWater) {
        was_full_ = false;
        if (room_handler_) room_handler_();
    }
}

/// Drops the queue. A full disk may have room again later; a reader that has gone does not come back.
void Console::give_up(int error) {
    if (loss_.empty()) loss_ = fmt::format("write to the console: {}", ::strerror(error));
    lost_bytes_ += pending();
    gone_ += pending();
    queue_.clear();
    head_ = 0;
    if (error != 0 && error != ENOSPC && error != EDQUOT && error != EFBIG) closed_ = true;
}

/// Removes written bytes from the queue, so that it does not grow for ever.
void Console::compact() {
    if (head_ == queue_.size()) {
        // Keep the memory of a usual batch, not that of a rare burst.
        if (queue_.capacity() > 4 * kHighWater) queue_ = {};
        queue_.clear();
        head_ = 0;
    } else if (head_ > kHighWater) {
        queue_.erase(0, head_);
        head_ = 0;
    }
}

void Console::wait_for_room() {
    if (waiting_) return;
    waiting_ = true;
    const Status watched = loop_.watch(fd_, EPOLLOUT, [this](std::uint32_t) { write(); });
    if (!watched) {
        // A descriptor that epoll refuses is no pipe, terminal or socket: it will not block.
        waiting_ = false;
        kind_ = Kind::NeverBlocks;
    }
}

void Console::stop_waiting() {
    if (!waiting_) return;
    waiting_ = false;
    loop_.unwatch(fd_);
}

void Console::flush(TimePoint deadline) {
    write();
    while (pending() > 0) {
        const int wait = poll_milliseconds(MonotonicClock::now(), deadline);
        if (wait == 0) return;
        pollfd poll{fd_, POLLOUT, 0};
        if (::poll(&poll, 1, wait) < 0 && errno != EINTR) return;
        write();
    }
}

std::string render_prefix(const PrefixTemplate& prefix, const StreamOwner& owner) {
    return prefix.render({fmt::format("{}", owner.rank), fmt::format("{}", owner.local_rank), owner.role,
                          owner.host, time_for(prefix)});
}

Outlet::Outlet(os::EventLoop& loop, int fd, OutputSpec::Color color) : console_(loop, fd) {
    using Color = OutputSpec::Color;
    is_colored_ = color == Color::Always || (color == Color::Auto && console_.is_terminal());
}

std::string Outlet::prefix_of(const StreamOwner& owner) const {
    const std::string prefix = render_prefix(prefix_, owner);
    return is_colored_ && !prefix.empty() ? colored_prefix(prefix, owner.rank) : prefix;
}

void Outlet::show(std::string_view prefix, std::string_view block) {
    std::string& queue = console_.queue();
    for_each_line(block, [&](std::string_view line) {
        queue.append(prefix);
        queue.append(line);
    });
}

bool Outlet::say(std::string_view lines) {
    for (; !own_.empty() && own_.front().first <= console_.gone(); own_.pop_front())
        own_bytes_ -= own_.front().second;
    if (own_bytes_ + lines.size() > kMaxOwn) return false;
    console_.queue().append(lines);
    own_bytes_ += lines.size();
    own_.emplace_back(console_.gone() + console_.pending(), lines.size());
    return true;
}

std::string Outlet::take_new_loss() {
    if (console_.lost_bytes() == 0 || std::exchange(has_reported_loss_, true)) return "";
    return console_.loss();
}

}  // namespace ddprun
