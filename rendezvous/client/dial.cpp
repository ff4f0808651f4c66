#include "rendezvous/client/dial.h"

#include <fmt/core.h>
#include <netdb.h>
#include <sys/epoll.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "env/hmac.h"
#include "rendezvous/client/link_state.h"

namespace ddprun::rdzv {

void Resolver::look_up(const Endpoint& endpoint, Handler handler) {
    forget();
    const auto answer_soon = [this, &handler](Result<SocketAddresses> found) {
        soon_ = loop_.call_after(Duration::zero(), [handler, found = std::move(found)] { handler(found); });
    };
    // A numeric address, such as that of the only node, needs no thread.
    if (Result<SocketAddresses> numeric = resolve(endpoint, AI_NUMERICHOST))
        return answer_soon(std::move(numeric));
    call_.emplace([endpoint]() -> Result<SocketAddresses> {
        Result<SocketAddresses> found = resolve(endpoint, 0);
        if (!found) return found.error().with("resolve " + endpoint.host);
        return found;
    });
    const auto answer = [this, handler](std::uint32_t) {
        Result<SocketAddresses> found = *call_->wait(loop_.now());
        forget();
        handler(std::move(found));
    };
    const Result<int> done = call_->done();
    const Status watched = done ? loop_.watch(*done, EPOLLIN, answer) : Status(done.error());
    if (!watched) answer_soon(watched.error());
}

void Resolver::forget() {
    loop_.cancel(std::exchange(soon_, 0));
    if (call_) loop_.unwatch(call_->done().value_or(-1));
    call_.reset();
}

namespace {

/// The time before the next address is tried too (RFC 8305 has 250 ms; our hosts are close).
constexpr Duration kHeadStart = std::chrono::milliseconds(50);
constexpr Duration kOthersAnswer = std::chrono::seconds(1);

}  // namespace

Dial::Dial(os::EventLoop& loop, DialOptions options, Handler handler)
    : loop_(loop),
      options_(std::move(options)),
      handler_(std::move(handler)),
      open_look_ups_(options_.controllers.size()) {
    for (const Endpoint& controller : options_.controllers) {
        look_ups_.push_back(std::make_unique<Resolver>(loop_));
        look_ups_.back()->look_up(controller,
                                  [this](Result<SocketAddresses> addresses) { found(std::move(addresses)); });
    }
}

Dial::~Dial() {
    loop_.cancel(next_timer_);
    for (Attempt& attempt : attempts_) {
        loop_.cancel(attempt.timer);
        if (attempt.socket) loop_.unwatch(attempt.socket.get());
    }
}

void Dial::found(Result<SocketAddresses> addresses) {
    --open_look_ups_;
    if (is_over()) return;
    if (addresses) {
        addresses_.insert(addresses_.end(), addresses->begin(), addresses->end());
        for (const SocketAddress& one : *addresses)
            found_.push_back(numeric_endpoint(one.storage, one.length));
    } else {
        remember(addresses.error());
    }
    if (next_timer_ == 0) try_next();
}

/// The timer for the next attempt is cancelled when that attempt begins earlier.
void Dial::try_next() {
    loop_.cancel(std::exchange(next_timer_, 0));
    if (addresses_.empty()) return end_if_nothing_is_left();
    const SocketAddress address = addresses_.front();
    addresses_.pop_front();
    Attempt& attempt = attempts_.emplace_back();
    if (const Status begun = connect(attempt, address); !begun) return drop(attempt, begun.error());
    attempt.timer = loop_.call_after(options_.connecting, [this, raw = &attempt] {
        drop(*raw, {Errc::Timeout, "connect timed out", 0});
    });
    if (!addresses_.empty()) next_timer_ = loop_.call_after(kHeadStart, [this] { try_next(); });
}

Status Dial::connect(Attempt& attempt, const SocketAddress& address) {
    Result<UniqueFd> socket = begin_connect(address);
    if (!socket) return socket.error();
    attempt.socket = *std::move(socket);
    return loop_.watch(attempt.socket.get(), EPOLLOUT,
                       [this, raw = &attempt](std::uint32_t) { on_connect_result(*raw); });
}

void Dial::on_connect_result(Attempt& attempt) {
    if (const int failure = connect_outcome(attempt.socket.get()))
        return drop(attempt, Error::system("connect", failure));
    options_.met();
    if (const Status begun = begin_handshake(attempt); !begun) drop(attempt, begun.error());
}

Status Dial::begin_handshake(Attempt& attempt) {
    loop_.cancel(attempt.timer);
    loop_.unwatch(attempt.socket.get());
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return nonce.error();
    Connection::Options options{peer_name(attempt.socket.get()), kStrangerLimits, ServerLimits{}.output_bytes,
                                options_.tls};
    Result<std::unique_ptr<Connection>> connection =
        Connection::adopt(loop_, std::move(attempt.socket), std::move(options), *this);
    if (!connection) return connection.error();
    attempt.connection = *std::move(connection);
    attempt.handshake.emplace(options_.credentials, options_.hello, *std::move(nonce));
    attempt.timer = loop_.call_after(options_.handshake, [raw = &attempt] {
        raw->connection->fail({Errc::Timeout, "no answer in the handshake", 0});
    });
    attempt.connection->send(encode_message(attempt.handshake->hello(), 0));
    return {};
}

void Dial::on_frame(Connection& connection, Frame frame) {
    Attempt& attempt = *attempt_of(connection);
    const Result<bool> proved = shake_hands(attempt, std::move(frame));
    if (!proved) return connection.fail(proved.error());
    if (*proved) take(attempt);
}

/// True: both sides have proved that they know the token.
Result<bool> Dial::shake_hands(Attempt& attempt, Frame frame) {
    ClientHandshake& handshake = *attempt.handshake;
    const bool has_proved = handshake.has_proved();
    handshake.bind_to(attempt.connection->tls_binding());
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    Result<std::optional<HandshakeMessage>> answer = handshake.receive(*message);
    if (!answer) {
        Error why = answer.error();
        const bool is_token = has_proved && why.code == Errc::Refused && options_.hello.session.empty();
        if (is_token && !options_.when_token_differs.empty()) why.what += "; " + options_.when_token_differs;
        return why;
    }
    if (*answer) attempt.connection->send(encode_message(**std::move(answer), 0));
    return handshake.authenticated();
}

/// Takes this connection and drops the others. The handler may destroy us.
void Dial::take(Attempt& attempt) {
    loop_.cancel(attempt.timer);
    Dialled dialled{std::move(attempt.connection), attempt.handshake->hello().nonce, {}};
    dialled.found = {dialled.connection->remote()};
    std::copy_if(found_.begin(), found_.end(), std::back_inserter(dialled.found),
                 [&](const Endpoint& one) { return one != dialled.found.front(); });
    addresses_.clear();
    loop_.cancel(std::exchange(next_timer_, 0));
    for (Attempt& other : attempts_) {
        loop_.cancel(other.timer);
        if (other.socket) loop_.unwatch(other.socket.get());
    }
    attempts_.clear();
    std::exchange(handler_, nullptr)(std::move(dialled));
}

void Dial::on_closed(Connection& connection, const Error& why) { drop(*attempt_of(connection), why); }

void Dial::drop(Attempt& attempt, const Error& why) {
    const bool was_refused = why.sys == ECONNREFUSED;  // `why` may be the attempt's own
    remember(why);
    loop_.cancel(attempt.timer);
    if (attempt.socket) loop_.unwatch(attempt.socket.get());
    attempts_.remove_if([&](const Attempt& one) { return &one == &attempt; });
    if (was_refused) expect_others();
    try_next();
}

/// A host that refuses a connection lives, and may listen soon: an address that does not answer holds up the
/// next dial for kOthersAnswer at most.
void Dial::expect_others() {
    for (Attempt& other : attempts_) {
        if (other.connection) continue;
        loop_.cancel(other.timer);
        other.timer = loop_.call_after(std::min(kOthersAnswer, options_.connecting), [this, raw = &other] {
            drop(*raw, {Errc::Timeout, "connect timed out", 0});
        });
    }
}

/// Keeps an answer's error in preference to another address's timeout.
void Dial::remember(const Error& why) {
    if (!why_not_ || is_worth_coming_again(*why_not_)) why_not_ = why;
}

void Dial::end_if_nothing_is_left() {
    if (is_over() || open_look_ups_ > 0 || !attempts_.empty()) return;
    std::exchange(handler_, nullptr)(why_not_.value_or(Error{Errc::NotFound, "no address", 0}));
}

Dial::Attempts::iterator Dial::attempt_of(const Connection& connection) {
    return std::find_if(attempts_.begin(), attempts_.end(),
                        [&](const Attempt& one) { return one.connection.get() == &connection; });
}

}  // namespace ddprun::rdzv
