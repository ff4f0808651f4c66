#include "launcher/hang/nccl_ras.h"

#include <fmt/core.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "env/text.h"
#include "env/unique_fd.h"
#include "rendezvous/client/dial.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxStatus = 256 * 1024;

/// One question. Its handlers in the loop keep it alive.
class RasQuestion : public std::enable_shared_from_this<RasQuestion> {
  public:
    using Done = std::function<void(Result<std::string>)>;
    RasQuestion(os::EventLoop& loop, const Endpoint& where, Done done)
        : loop_(loop), where_(where), done_(std::move(done)), resolver_(loop) {}

    void begin(Duration timeout) {
        timer_ = loop_.call_after(timeout, [self = shared_from_this(), timeout] { self->give_up(timeout); });
        resolver_.look_up(where_, [weak = weak_from_this()](Result<SocketAddresses> found) {
            const std::shared_ptr<RasQuestion> self = weak.lock();
            if (!self || !self->done_) return;
            if (!found) return self->finish(found.error());
            self->addresses_ = *std::move(found);
            self->connect_next(Error{Errc::NotFound, fmt::format("{} has no address", self->where_.host), 0});
        });
    }

  private:
    void connect_next(const Error& last) {
        if (next_ >= addresses_.size()) return finish(last);
        const SocketAddress& address = addresses_[next_++];
        fd_ = UniqueFd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!fd_) return finish(Error::system("socket"));
        if (::connect(fd_.get(), address.get(), address.length) != 0 && errno != EINPROGRESS)
            return connect_next(connect_error(errno));
        connecting_ = true;
        const Status watched = loop_.watch(fd_.get(), EPOLLOUT, [self = shared_from_this()](std::uint32_t) {
            if (self->connecting_) self->connected();
            else self->read();
        });
        if (!watched) finish(watched.error());
    }

    [[nodiscard]] Error connect_error(int number) const {
        errno = number;
        return Error::system(fmt::format("connect {}", to_string(where_)));
    }

    void connected() {
        if (const int failure = connect_outcome(fd_.get())) {
            close();
            return connect_next(connect_error(failure));
        }
        connecting_ = false;
        loop_.change(fd_.get(), EPOLLIN);
        send(RasDialogue::greeting());
    }

    /// Sends a few bytes, which fit into an empty socket buffer unless the connection has failed.
    void send(const std::string& words) {
        const ssize_t n = ::send(fd_.get(), words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n != static_cast<ssize_t>(words.size()))
            finish(Error{Errc::Closed, fmt::format("{} does not listen", to_string(where_)), 0});
    }

    void read() {
        char piece[16 * 1024];
        const ssize_t n = ::recv(fd_.get(), piece, sizeof piece, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n < 0) return finish(Error::system(fmt::format("read from {}", to_string(where_))));
        if (n == 0 && dialogue_.status().empty())
            return finish(Error{Errc::Closed, fmt::format("{} closed the connection", to_string(where_)), 0});
        if (n == 0) return finish(dialogue_.status());
        const Result<std::string> words = dialogue_.take({piece, static_cast<std::size_t>(n)});
        if (!words) return finish(words.error().with(to_string(where_)));
        if (!words->empty()) return send(*words);
        if (dialogue_.status().size() > kMaxStatus) finish(dialogue_.status() + "\n(the rest is left out)\n");
    }

    void give_up(Duration timeout) {
        if (!done_) return;
        const std::string span = format_duration(timeout);
        if (dialogue_.status().empty())
            finish(Error{Errc::Timeout, fmt::format("{} gave no answer in {}", to_string(where_), span), 0});
        else finish(dialogue_.status() + fmt::format("\n(nothing more came within {})\n", span));
    }

    void close() {
        if (fd_) loop_.unwatch(fd_.get());
        fd_.reset();
    }

    void finish(Result<std::string> result) {
        if (!done_) return;
        close();
        loop_.cancel(timer_);
        resolver_.forget();
        std::exchange(done_, nullptr)(std::move(result));
    }

    os::EventLoop& loop_;
    Endpoint where_;
    Done done_;
    rdzv::Resolver resolver_;
    SocketAddresses addresses_;
    std::size_t next_ = 0;
    UniqueFd fd_;
    bool connecting_ = false;
    RasDialogue dialogue_;
    os::EventLoop::TimerId timer_ = 0;
};

}  // namespace

void ask_nccl_ras(os::EventLoop& loop, const Endpoint& where, Duration timeout,
                  std::function<void(Result<std::string>)> done) {
    std::make_shared<RasQuestion>(loop, where, std::move(done))->begin(timeout);
}

}  // namespace ddprun
