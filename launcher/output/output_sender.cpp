#include "launcher/output/output_sender.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "env/io/socket.h"

namespace ddprun {
namespace {

using Stream = Output::Stream;

constexpr std::size_t kSentPiece = 64 * 1024;

/// The bytes that can be read now, at most `most`; "" none.
std::string read_available(int fd, std::size_t most) {
    std::string bytes(most, '\0');
    ssize_t n = 0;
    do {
        n = ::read(fd, bytes.data(), bytes.size());
    } while (n < 0 && errno == EINTR);
    bytes.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return bytes;
}

/// Ignores errors: bytes that the job's output file or its demultiplexer refuses have no other place.
void write_blocking(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t n = ::write(fd, bytes.data(), bytes.size());
        if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
        if (n >= 0 || errno == EINTR) continue;
        pollfd room{fd, POLLOUT, 0};
        if (errno != EAGAIN || ::poll(&room, 1, -1) < 0) return;
    }
}

/// How often signals are looked at while nobody reads the last lines.
constexpr Duration kFlushLook = std::chrono::milliseconds(100);

bool is_asked_to_end() {
    sigset_t pending;
    ::sigpending(&pending);
    const auto is_pending = [&](int signal) { return ::sigismember(&pending, signal) == 1; };
    return is_pending(SIGTERM) || is_pending(SIGINT) || is_pending(SIGHUP) || is_pending(SIGQUIT);
}

}  // namespace

Result<std::unique_ptr<OutputSender>> OutputSender::create(Parts parts) {
    std::unique_ptr<OutputSender> sender(new OutputSender(std::move(parts)));
    for (Way& way : sender->ways_) {
        // A socket, not a pipe: Console writes to it without blocking even without /proc.
        int ends[2];
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
            return Error::system("socketpair");
        way.reading.reset(ends[0]);
        way.writing.reset(ends[1]);
        if (const Status set = set_nonblocking(way.reading.get()); !set) return set.error();
    }
    return sender;
}

OutputSender::~OutputSender() {
    for (Way& way : ways_) unwatch(way);
}

void OutputSender::begin() {
    under_way_ = 0;
    for (const Stream stream : {Stream::Out, Stream::Err}) {
        Way& way = way_of(stream);
        under_way_ += way.unsent.size();
        if (!way.unsent.empty() && parts_.send(stream, way.unsent)) way.unsent.clear();
        watch(stream);
    }
}

void OutputSender::watch(Stream stream) {
    Way& way = way_of(stream);
    if (way.is_watched || !way.unsent.empty()) return;
    way.is_watched =
        parts_.loop.watch(way.reading.get(), EPOLLIN, [this, stream](std::uint32_t) { send_some(stream); })
            .has_value();
}

void OutputSender::unwatch(Way& way) {
    if (std::exchange(way.is_watched, false)) parts_.loop.unwatch(way.reading.get());
}

void OutputSender::send_some(Stream stream) {
    if (under_way_ >= parts_.window) {
        for (Way& one : ways_) unwatch(one);
        return;
    }
    Way& way = way_of(stream);
    std::string bytes =
        read_available(way.reading.get(), std::min<std::size_t>(kSentPiece, parts_.window - under_way_));
    if (bytes.empty()) return;
    under_way_ += bytes.size();
    if (parts_.send(stream, bytes)) return;
    way.unsent = std::move(bytes);
    unwatch(way);
}

void OutputSender::shown(std::uint64_t bytes) {
    under_way_ -= std::min(bytes, under_way_);
    if (under_way_ > parts_.window / 2) return;
    for (const Stream stream : {Stream::Out, Stream::Err}) watch(stream);
}

bool OutputSender::is_done() const {
    const auto is_empty = [](const Way& way) {
        int bytes = 0;
        return way.unsent.empty() && ::ioctl(way.reading.get(), FIONREAD, &bytes) == 0 && bytes == 0;
    };
    return under_way_ == 0 && std::all_of(ways_.begin(), ways_.end(), is_empty);
}

void OutputSender::write_rest(int out, int err) {
    for (const Stream stream : {Stream::Out, Stream::Err}) {
        Way& way = way_of(stream);
        unwatch(way);
        const int to = stream == Stream::Out ? out : err;
        for (std::string bytes = std::exchange(way.unsent, {});; bytes = {}) {
            if (bytes.empty()) bytes = read_available(way.reading.get(), kSentPiece);
            if (bytes.empty()) break;
            write_blocking(to, bytes);
        }
    }
}

void write_last_output(Output& output, OutputSender* sender, os::EventLoop& loop, os::Log& log,
                       Duration patience, const std::function<bool()>& has_session) {
    const TimePoint until = deadline_after(MonotonicClock::now(), patience);
    while (sender != nullptr && has_session() && MonotonicClock::now() < until) {
        output.flush(MonotonicClock::now());
        if (output.consoles_are_written() && sender->is_done()) break;
        if (!loop.run_once(until)) break;
    }
    bool is_said = false;
    do {
        output.flush(deadline_after(MonotonicClock::now(), kFlushLook));
        if (sender != nullptr) sender->write_rest(1, 2);
        if (is_said || output.files_are_written() || MonotonicClock::now() < until) continue;
        is_said = true;
        log.warning(
            "the job has ended, but its log files are not written yet (a disk that hangs?); waiting for "
            "them, a signal ends that");
    } while (!output.flushed() && !is_asked_to_end());
}

}  // namespace ddprun
