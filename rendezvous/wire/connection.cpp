#include "rendezvous/wire/connection.h"

#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun::rdzv {
namespace {

/// Enough for every message but large values; one read per event keeps a busy peer from starving the others.
constexpr std::size_t kReadBytes = 64 * 1024;
constexpr std::size_t kPartsPerWrite = 64;
/// The bytes that are given to TLS at once. Its records have 16 KiB.
constexpr std::size_t kSealBytes = 64 * 1024;
/// So many queued bytes are written at once; fewer wait for more messages of the same batch of events.
constexpr std::size_t kWorthWriting = 64 * 1024;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

std::string peer_name(int fd) {
    const Endpoint endpoint = remote_endpoint(fd).value_or({});
    return endpoint.host.empty() ? "unknown peer" : to_string(endpoint);
}

void tune_connection(int fd) {
    set_socket_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(kUserTimeout).count();
    set_socket_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(timeout));
    // The timeout needs unacknowledged data: keepalive probes are that on an idle connection.
    set_socket_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_socket_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set_socket_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_socket_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

Connection::Connection(os::EventLoop& loop, UniqueFd fd, Options options, ConnectionOwner& owner)
    : loop_(loop),
      fd_(std::move(fd)),
      options_(std::move(options)),
      owner_(&owner),
      decoder_(options_.limits),
      last_heard_(loop.now()) {}

Result<std::unique_ptr<Connection>> Connection::adopt(os::EventLoop& loop, UniqueFd fd, Options options,
                                                      ConnectionOwner& owner) {
    tune_connection(fd.get());
    std::unique_ptr<Connection> connection(new Connection(loop, std::move(fd), std::move(options), owner));
    if (const auto& context = connection->options_.client_tls) {
        Result<std::unique_ptr<TlsSession>> tls = TlsSession::begin(context);
        if (!tls) return tls.error().with(connection->peer());
        connection->tls_ = *std::move(tls);
        connection->write_soon();
    }
    connection->watched_ = EPOLLIN;
    const Status watched =
        loop.watch(connection->fd_.get(), EPOLLIN,
                   [raw = connection.get()](std::uint32_t events) { raw->on_events(events); });
    if (!watched) return watched.error().with(connection->peer());
    return connection;
}

Connection::~Connection() {
    *alive_ = false;
    loop_.cancel(goodbye_timer_);
    if (state_ == State::Closed) return;
    if (can_write()) static_cast<void>(write_some());  // as much as the kernel takes now
    loop_.unwatch(fd_.get());
}

std::string Connection::local_host() const { return local_endpoint(fd_.get()).value_or({}).host; }

Endpoint Connection::remote() const { return remote_endpoint(fd_.get()).value_or({}); }

void Connection::on_events(std::uint32_t events) {
    if ((events & EPOLLOUT) != 0) write();
    // read() finds errors and hang-ups after the last bytes that came before them.
    if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0 && state_ != State::Closed) read();
}

// ---- in

void Connection::read() {
    // Not thread_local: every thread of a program with libddp would have one.
    std::array<char, kReadBytes> buffer;
    const ssize_t got = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && would_block(errno)) return;
    if (got <= 0 && state_ == State::SayingGoodbye) return fail(*why_);
    if (got <= 0) {
        const int error = got == 0 ? 0 : errno;
        const std::string how = got == 0
                                    ? fmt::format("{} closed the connection", peer())
                                    : fmt::format("connection to {} lost: {}", peer(), ::strerror(error));
        return fail(
            {Errc::Closed, how + (decoder_.pending() > 0 ? ", in the middle of a message" : ""), error});
    }
    last_heard_ = loop_.now();
    if (state_ != State::Open)
        return;  // saying goodbye: read only so that a reset does not drop our last message
    const Result<std::string_view> said = unseal({buffer.data(), static_cast<std::size_t>(got)});
    if (can_write()) write_soon();
    if (!said) {
        static_cast<void>(write_some());  // a TLS alert that tells the peer what was wrong
        return fail(said.error());
    }
    if (!tls_) return said->empty() ? void() : hear(*said);
    const std::shared_ptr<bool> alive = alive_;
    if (!said->empty()) hear(*said);
    if (*alive && !tls_->end() && state_ == State::Open) fail(tls_->end().error().with(peer()));
}

/// Decrypts received bytes if the peer uses TLS; "" when they were TLS's own.
Result<std::string_view> Connection::unseal(std::string_view bytes) {
    const bool begins_tls =
        !tls_ && speech_ == Speech::Unknown && options_.server_tls && bytes.front() == kTlsFirstByte;
    if (begins_tls) {
        Result<std::unique_ptr<TlsSession>> tls = TlsSession::begin(options_.server_tls);
        if (!tls) return tls.error();
        tls_ = *std::move(tls);
    }
    return tls_ ? tls_->receive(bytes) : bytes;
}

void Connection::hear(std::string_view bytes) {
    if (speech_ == Speech::Unknown)
        speech_ = owner_->on_first_byte(*this, bytes.front()) ? Speech::Bytes : Speech::Frames;
    if (state_ != State::Open) return;
    if (speech_ == Speech::Bytes) return owner_->on_bytes(*this, bytes);
    decoder_.feed(bytes);
    deliver();
}

void Connection::deliver() {
    while (state_ == State::Open && !is_paused_) {
        Result<std::optional<Frame>> frame = decoder_.next();
        if (!frame) {
            const Error& why = frame.error();
            if (decoder_.is_foreign()) return fail(why);
            return refuse(failure_of(why), why, ServerLimits{}.goodbye);
        }
        if (!*frame) return;
        owner_->on_frame(*this, std::move(**frame));
    }
}

void Connection::pause_reading() {
    is_paused_ = true;
    update_watch();
}

void Connection::resume_reading() {
    if (!std::exchange(is_paused_, false)) return;
    update_watch();
    loop_.post([this, alive = alive_] {
        if (*alive) deliver();  // frames received before the pause
    });
}

// ---- out

void Connection::send(Result<EncodedMessage> message) {
    if (!message) return fail(message.error());
    if ((state_ == State::Closed && !outbox_.keeps()) || said_all_) return;
    outbox_.push(*std::move(message));
    write_when_worth_it();
    if (takes_messages() && outbox_.bytes() > options_.output_bytes) {
        fail({Errc::Limit,
              fmt::format("{} does not read: {} wait for it", peer(), format_bytes(outbox_.bytes())), 0});
    }
}

void Connection::beat(const Heartbeat& heartbeat) {
    if (state_ != State::Open) return;
    Result<EncodedMessage> message = encode_message(heartbeat);
    if (message) outbox_.push_heartbeat(*std::move(message));
    write_when_worth_it();
}

void Connection::keep_alive(const Heartbeat& heartbeat) {
    if (state_ != State::Open) return;
    Result<EncodedMessage> message = encode_message(heartbeat);
    if (message) outbox_.push_heartbeat(*std::move(message));
    while (can_write() && !write_some()) {
    }
}

void Connection::write_when_worth_it() {
    if (state_ == State::Closed) return;
    if (outbox_.unwritten_bytes() >= kWorthWriting) write();
    else write_soon();
}

void Connection::write_soon() {
    if (write_posted_ || (watched_ & EPOLLOUT) != 0) return;
    write_posted_ = true;
    loop_.post([this, alive = alive_] {
        if (!*alive) return;
        write_posted_ = false;
        write();
    });
}

void Connection::write() {
    while (can_write() && state_ != State::Closed) {
        const std::optional<int> failure = write_some();
        if (!failure) continue;
        if (would_block(*failure)) break;
        return fail(
            {Errc::Closed, fmt::format("connection to {} lost: {}", peer(), ::strerror(*failure)), *failure});
    }
    after_write();
}

/// True when there are bytes to write now. Messages wait until TLS has its keys; on a server with TLS, they
/// wait until the peer's first byte shows whether it uses TLS.
bool Connection::can_write() const {
    if (!tls_) return !outbox_.is_written() && !(options_.server_tls && speech_ == Speech::Unknown);
    return !tls_->output().empty() || (tls_->is_ready() && !outbox_.is_written());
}

/// Writes with one system call; returns its errno when it fails.
std::optional<int> Connection::write_some() { return tls_ ? write_sealed() : write_parts(); }

/// Sealed bytes are written before more are sealed, so that at most kSealBytes wait sealed for a slow peer.
std::optional<int> Connection::write_sealed() {
    if (tls_->output().empty() && tls_->is_ready()) {
        std::array<iovec, kPartsPerWrite> parts;
        std::string plain;
        for (const iovec& part : std::span(parts).first(outbox_.fill(parts))) {
            plain.append(static_cast<const char*>(part.iov_base),
                         std::min(part.iov_len, kSealBytes - plain.size()));
        }
        if (!tls_->seal(plain)) return EPROTO;
        outbox_.consume(plain.size());
    }
    const ssize_t sent =
        ::send(fd_.get(), tls_->output().data(), tls_->output().size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno;
    tls_->sent(static_cast<std::size_t>(sent));
    return std::nullopt;
}

std::optional<int> Connection::write_parts() {
    std::array<iovec, kPartsPerWrite> parts;
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = outbox_.fill(parts);
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno;
    outbox_.consume(static_cast<std::size_t>(sent));
    return std::nullopt;
}

void Connection::after_write() {
    const bool is_written = outbox_.is_written() && !can_write();
    if (state_ == State::SayingGoodbye && is_written && !said_all_) {
        said_all_ = true;
        ::shutdown(fd_.get(), SHUT_WR);
    }
    update_watch();
    if (state_ != State::Closed && is_written) owner_->on_written(*this);
}

void Connection::update_watch() {
    if (state_ == State::Closed) return;
    const std::uint32_t wanted = (is_paused_ ? 0U : static_cast<std::uint32_t>(EPOLLIN)) |
                                 (can_write() ? static_cast<std::uint32_t>(EPOLLOUT) : 0U);
    if (wanted == watched_) return;
    watched_ = wanted;
    loop_.change(fd_.get(), wanted);
}

// ---- the end

void Connection::refuse(const Failure& failure, Error why, Duration goodbye) {
    if (state_ == State::Closed && outbox_.keeps()) {  // the kept messages are not sent again
        why_ = std::move(why);
        give_up();
    }
    if (state_ != State::Open) return;
    state_ = State::SayingGoodbye;
    why_ = why;
    goodbye_timer_ = loop_.call_after(goodbye, [this] { fail(*why_); });
    if (Result<EncodedMessage> encoded = encode_message(failure, 0)) outbox_.push_last(*std::move(encoded));
    write_soon();
}

void Connection::dismiss(const Failure& failure, Error why) {
    Result<EncodedMessage> encoded = encode_message(failure, 0);
    if (encoded && state_ == State::Open) {
        outbox_.push(*std::move(encoded));
        if (can_write()) static_cast<void>(write_some());
        // With unread bytes the kernel would reset the connection, and the peer would lose our message.
        std::array<char, 4096> unread;
        static_cast<void>(::recv(fd_.get(), unread.data(), unread.size(), MSG_DONTWAIT));
    }
    fail(std::move(why));
}

void Connection::fail(Error why) {
    const bool was_closed = state_ == State::Closed;
    if (was_closed && !outbox_.keeps()) return;
    const bool is_final = state_ == State::SayingGoodbye || outage_of(why) == Outage::Final;
    // The reason given to refuse() stays, however the connection ends meanwhile.
    if (!why_ || was_closed) why_ = std::move(why);
    if (is_final || !outbox_.keeps()) outbox_.clear();
    state_ = State::Closed;
    if (!was_closed) {
        loop_.cancel(goodbye_timer_);
        loop_.unwatch(fd_.get());
        fd_.reset();
    }
    if (!was_closed || is_final) tell_of_end();
}

void Connection::tell_of_end() {
    loop_.post([this, alive = alive_] {
        if (*alive) owner_->on_closed(*this, *why_);
    });
}

// ---- a session

void Connection::resume(Connection& earlier, const Heartbeat& received) {
    outbox_.resume(std::move(earlier.outbox_));
    beat(received);
}

Status Connection::acknowledge(std::uint64_t received) {
    Status known = outbox_.acknowledge(received);
    write_when_worth_it();
    return known;
}

void Connection::give_up() {
    if (state_ != State::Closed || !outbox_.keeps()) return;
    outbox_.clear();
    tell_of_end();
}

}  // namespace ddprun::rdzv
