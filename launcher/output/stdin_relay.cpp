#include "launcher/output/stdin_relay.h"

#include <sys/epoll.h>
#include <unistd.h>

namespace ddprun {

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
