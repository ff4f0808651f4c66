#include "launcher/output/pipes.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ddprun {

namespace {

constexpr std::size_t kReadBytes = 256 * 1024;
/// The limit on one read_rest(), for a writer that never stops: more than any pipe holds.
constexpr std::size_t kMostRestBytes = 2 << 20;
/// The pause between two reads of a busy worker's pipe. Nobody sees two milliseconds, and a worker that
/// writes a line every microsecond would otherwise wake us for each.
constexpr Duration kRest = std::chrono::milliseconds(2);

}  // namespace

PipeReader::Pipe::Pipe(UniqueFd fd) : fd_(std::move(fd)) {
    const int capacity = ::fcntl(fd_.get(), F_GETPIPE_SZ);
    capacity_ = capacity > 0 ? static_cast<std::size_t>(capacity) : 0;
}

bool PipeReader::Pipe::has_unread() const {
    int bytes = 0;
    return ::ioctl(fd_.get(), FIONREAD, &bytes) == 0 && bytes > 0;
}

PipeReader::PipeReader(os::EventLoop& loop, Owner& owner)
    : loop_(loop), owner_(owner), buffer_(new char[kReadBytes]) {}

PipeReader::~PipeReader() {
    loop_.cancel(timer_);
    for (const auto& [fd, pipe] : pipes_) unwatch(*pipe);
}

Status PipeReader::add(Pipe& pipe) {
    if (Status watched = watch(pipe); !watched) return watched;
    pipes_[pipe.fd_.get()] = &pipe;
    return {};
}

void PipeReader::remove(Pipe& pipe) {
    unwatch(pipe);
    pipes_.erase(pipe.fd_.get());
}

Status PipeReader::watch(Pipe& pipe) {
    const int fd = pipe.fd_.get();
    Status watched = loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { on_readable(fd); });
    pipe.is_watched_ = watched.has_value();
    return watched;
}

void PipeReader::unwatch(Pipe& pipe) {
    if (std::exchange(pipe.is_watched_, false)) loop_.unwatch(pipe.fd_.get());
}

void PipeReader::watch_again(Pipe& pipe) {
    if (const Status watched = watch(pipe); !watched) owner_.on_unreadable(watched.error());
}

// A paused pipe is not watched at all, because epoll reports a hang-up again and again.
void PipeReader::pause(Pipe& pipe) {
    pipe.is_paused_ = true;
    pipe.is_resting_ = false;
    unwatch(pipe);
}

void PipeReader::resume(Pipe& pipe) {
    if (std::exchange(pipe.is_paused_, false)) watch_again(pipe);
}

void PipeReader::on_readable(int fd) {
    const auto found = pipes_.find(fd);
    if (found == pipes_.end() || !owner_.make_room(*found->second)) return;
    Pipe& pipe = *found->second;
    const ssize_t n = read_once(pipe);
    if (n == 0) return owner_.on_end(pipe);
    if (n < 0) return;
    const TimePoint before = std::exchange(pipe.last_read_, loop_.now());
    if (loop_.now() - before < kRest && static_cast<std::size_t>(n) < pipe.capacity_ / 2) rest(pipe);
    owner_.on_pause_in_reading();
}

void PipeReader::rest(Pipe& pipe) {
    pipe.is_resting_ = true;
    unwatch(pipe);
    resting_.push_back(pipe.fd_.get());
    if (timer_ == 0) timer_ = loop_.call_at(deadline_after(loop_.now(), kRest), [this] { read_resting(); });
}

void PipeReader::read_resting() {
    bool any_full = false;
    for (const int fd : std::exchange(resting_, {})) {
        const auto found = pipes_.find(fd);
        if (found == pipes_.end() || !found->second->is_resting_ || !owner_.make_room(*found->second))
            continue;
        Pipe& pipe = *found->second;
        const ssize_t n = read_once(pipe);
        if (n == 0) {
            owner_.on_end(pipe);
        } else if (n < 0) {
            pipe.is_resting_ = false;
            watch_again(pipe);
        } else {
            any_full = any_full || static_cast<std::size_t>(n) >= pipe.capacity_ / 2;
            pipe.last_read_ = loop_.now();
            resting_.push_back(fd);
        }
    }
    owner_.on_pause_in_reading();
    // A pipe that is full makes its worker wait: read it again at once.
    const TimePoint next = any_full ? loop_.now() : deadline_after(loop_.now(), kRest);
    timer_ = resting_.empty() ? 0 : loop_.call_at(next, [this] { read_resting(); });
}

/// Returns as read(2): bytes taken, 0 at the end of the stream, -1 when the pipe is empty.
ssize_t PipeReader::read_once(Pipe& pipe) {
    ssize_t n = 0;
    do {
        n = ::read(pipe.fd_.get(), buffer_.get(), kReadBytes);
    } while (n < 0 && errno == EINTR);
    if (n > 0) owner_.on_read(pipe, {buffer_.get(), static_cast<std::size_t>(n)});
    // An error counts as the end of the stream.
    return n < 0 && errno != EAGAIN ? 0 : n;
}

void PipeReader::read_rest(Pipe& pipe) {
    // A full console does not matter here: the pipe's content is bounded.
    for (std::size_t n = 0; n < kMostRestBytes / kReadBytes && read_once(pipe) > 0; ++n) {
    }
}

StdinRelay::StdinRelay(os::EventLoop& loop, int input, UniqueFd worker)
    : loop_(loop), input_(input), worker_(std::move(worker)) {
    const Status input_watched = loop_.watch(input_, EPOLLIN, [this](std::uint32_t) { read_input(); });
    // For now watch only for errors and hang-ups: the worker has closed its standard input, or is gone.
    const Status worker_watched = loop_.watch(worker_.get(), 0, [this](std::uint32_t events) {
        if ((events & EPOLLOUT) != 0) write_worker();
        else finish();
    });
    if (!input_watched || !worker_watched) finish();
}

StdinRelay::~StdinRelay() { finish(); }

void StdinRelay::read_input() {
    char piece[4096];
    const ssize_t n = ::read(input_, piece, sizeof piece);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return finish();  // Ctrl-D, or the terminal is gone
    pending_.assign(piece, static_cast<std::size_t>(n));
    write_worker();
}

void StdinRelay::write_worker() {
    const ssize_t n = ::write(worker_.get(), pending_.data(), pending_.size());
    if (n < 0 && errno != EAGAIN && errno != EINTR) return finish();
    if (n > 0) pending_.erase(0, static_cast<std::size_t>(n));
    constexpr std::uint32_t kNothing = 0, kReadable = EPOLLIN, kWritable = EPOLLOUT;
    loop_.change(worker_.get(), pending_.empty() ? kNothing : kWritable);
    loop_.change(input_, pending_.empty() ? kReadable : kNothing);
}

void StdinRelay::finish() {
    if (!worker_) return;
    loop_.unwatch(input_);
    loop_.unwatch(worker_.get());
    worker_.reset();
}

}  // namespace ddprun
