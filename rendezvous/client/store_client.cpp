#include "rendezvous/client/store_client.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "env/hmac.h"
#include "env/text.h"
#include "rendezvous/wire/frame.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/store_message.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {
namespace {

constexpr Duration kFirstBackoff = std::chrono::milliseconds(5);
constexpr Duration kLongestBackoff = std::chrono::milliseconds(500);

/// True when the server may be there a moment later. The caller has named a running server, so an unknown
/// name and a failing system call are permanent here, unlike in is_worth_coming_again().
bool is_worth_another_try(const Error& error) {
    switch (error.code) {
        case Errc::Closed:
        case Errc::Timeout:
        case Errc::Limit: return true;
        case Errc::System:
            return error.sys == ECONNREFUSED || error.sys == ETIMEDOUT || error.sys == EHOSTUNREACH ||
                   error.sys == ENETUNREACH || error.sys == ECONNRESET || error.sys == EADDRNOTAVAIL;
        case Errc::InvalidArgument:
        case Errc::NotFound:
        case Errc::Refused:
        case Errc::StaleGeneration:
        case Errc::Mismatch:
        case Errc::Protocol: return false;
    }
    return false;
}

void pause_until(TimePoint when) {
    const TimePoint now = MonotonicClock::now();
    if (when > now) ::poll(nullptr, 0, poll_milliseconds(now, when));
}

/// The answer of an operation, or its error.
template <class T>
Result<T> expect(Result<StoreReply> reply) {
    if (!reply) return reply.error();
    if (auto* const wanted = std::get_if<T>(&*reply)) return std::move(*wanted);
    if (const auto* failure = std::get_if<Failure>(&*reply)) return Error{failure->code, failure->what, 0};
    return Error::protocol(fmt::format("the server answered {}", message_name(*reply)));
}

Status expect_done(Result<StoreReply> reply) {
    const Result<Done> done = expect<Done>(std::move(reply));
    return done ? Status() : Status(done.error());
}

/// Checks the keys, or the barrier, that the operation names.
Status check_names(const StoreOp& op) {
    Status named;
    const auto check = [&](const auto& one) {
        if constexpr (requires { one.key; }) named = check_key(one.key);
        else if constexpr (requires { one.name; }) named = check_key(one.name);
        else
            for (auto key = one.keys.begin(); named && key != one.keys.end(); ++key) named = check_key(*key);
    };
    std::visit(check, op);
    return named;
}

}  // namespace

std::string to_string(const StoreAddress& address) {
    return address.path.empty() ? to_string(address.tcp) : "unix:" + address.path;
}

Result<StoreAddress> parse_store_address(std::string_view text) {
    constexpr std::string_view kTcp = "tcp:", kUnix = "unix:";
    if (text.starts_with(kUnix) && text.size() > kUnix.size())
        return StoreAddress(std::string(text.substr(kUnix.size())));
    if (!text.starts_with(kTcp))
        return Error{Errc::InvalidArgument, fmt::format("'{}' is neither tcp:HOST:PORT nor unix:PATH", text),
                     0};
    Result<Endpoint> endpoint = parse_endpoint(text.substr(kTcp.size()), 0);
    if (!endpoint) return endpoint.error();
    return StoreAddress(*std::move(endpoint));
}

struct StoreClient::Impl {
    explicit Impl(StoreAddress address, ClientOptions own)
        : server(std::move(address)), options(std::move(own)) {}
    StoreAddress server;
    ClientOptions options;
    UniqueFd fd;
    std::unique_ptr<TlsSession> tls;  ///< null without TLS
    FrameDecoder decoder{kStrangerLimits};
    std::uint32_t last_request = 0;
    Duration operation_timeout = std::chrono::seconds(30);
    std::optional<Error> dead;
    std::array<char, 64 * 1024> buffer;

    Status open(TimePoint deadline);
    Status begin_tls(TimePoint deadline);
    Status shake_hands(TimePoint deadline);
    Result<StoreReply> call(StoreOp op);
    Result<StoreReply> call_waiting(StoreOp op, TimePoint deadline);

  private:
    Result<StoreReply> exchange(StoreRequest request, TimePoint deadline);
    Result<StoreReply> receive_answer(std::uint32_t request, TimePoint deadline);
    Result<Frame> receive_frame(TimePoint deadline);
    Status receive_some(TimePoint deadline);
    Status send_bytes(std::string_view bytes, TimePoint deadline);
    Status send(const std::string& bytes, TimePoint deadline);
    Error die(Error why);
};

// ---- connection

Status StoreClient::Impl::open(TimePoint deadline) {
    Result<UniqueFd> connected =
        server.path.empty() ? connect_tcp(server.tcp, deadline) : connect_unix(server.path, deadline);
    if (!connected) return connected.error();
    fd = *std::move(connected);
    decoder = FrameDecoder(kStrangerLimits);
    Status welcomed = options.tls ? begin_tls(deadline) : Status();
    if (welcomed) welcomed = shake_hands(deadline);
    if (!welcomed) return welcomed.error().with("connect " + to_string(server));
    decoder.set_limits(kPeerLimits);
    return {};
}

Status StoreClient::Impl::begin_tls(TimePoint deadline) {
    const Result<std::shared_ptr<const TlsContext>> context = TlsContext::for_client();
    if (!context) return context.error();
    Result<std::unique_ptr<TlsSession>> begun = TlsSession::begin(*context);
    if (!begun) return begun.error();
    tls = *std::move(begun);
    Status done = send_bytes("", deadline);
    while (done && !tls->is_ready()) done = receive_some(deadline);
    return done;
}

Status StoreClient::Impl::shake_hands(TimePoint deadline) {
    Result<std::string> nonce = random_hex(kNonceBytes);
    if (!nonce) return nonce.error();
    ClientHandshake handshake({options.job_id, options.token}, Hello{options.role, options.name, "", ""},
                              *std::move(nonce));
    if (tls) handshake.bind_to(tls->binding());
    std::optional<HandshakeMessage> next = handshake.hello();
    while (!handshake.authenticated()) {
        if (next) {
            Result<EncodedMessage> encoded = encode_message(*std::move(next), 0);
            if (!encoded) return encoded.error();
            if (const Status sent = send_bytes(std::move(*encoded).whole(), deadline); !sent)
                return sent.error();
        }
        Result<Frame> frame = receive_frame(deadline);
        if (!frame) return frame.error();
        const Result<HandshakeMessage> message = decode_handshake(*std::move(frame));
        if (!message) return message.error();
        Result<std::optional<HandshakeMessage>> answer = handshake.receive(*message);
        if (!answer) return answer.error();
        next = *std::move(answer);
    }
    return {};
}

Result<std::unique_ptr<StoreClient>> StoreClient::connect(const StoreAddress& server, ClientOptions options,
                                                          TimePoint deadline) {
    auto impl = std::make_unique<Impl>(server, std::move(options));
    Duration backoff = kFirstBackoff;
    std::optional<Error> why;
    for (;;) {
        const Status opened = impl->open(deadline);
        if (opened) return std::unique_ptr<StoreClient>(new StoreClient(std::move(impl)));
        if (!is_worth_another_try(opened.error())) return opened.error();
        // A try cut short by the deadline has a less useful error than the one before.
        if (!why || opened.error().code != Errc::Timeout) why = opened.error();
        if (MonotonicClock::now() >= deadline) return Error{Errc::Timeout, why->what, 0};
        pause_until(std::min(deadline, deadline_after(MonotonicClock::now(), backoff)));
        backoff = std::min(backoff * 2, kLongestBackoff);
    }
}

StoreClient::StoreClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StoreClient::~StoreClient() = default;

void StoreClient::set_operation_timeout(Duration timeout) { impl_->operation_timeout = timeout; }

// ---- one round trip

Error StoreClient::Impl::die(Error why) {
    dead = why.with("store at " + to_string(server));
    fd.reset();
    return *dead;
}

/// Sends the bytes, and TLS's own pending bytes. A large value is encrypted in pieces, while the server
/// decrypts the pieces before.
Status StoreClient::Impl::send_bytes(std::string_view bytes, TimePoint deadline) {
    if (!tls) return send_all(fd.get(), bytes, deadline);
    do {
        const std::string_view piece = bytes.substr(0, buffer.size());
        bytes.remove_prefix(piece.size());
        if (const Status sealed = tls->seal(piece); !sealed) return sealed;
        if (const Status sent = send_all(fd.get(), tls->output(), deadline); !sent) return sent;
        tls->sent(tls->output().size());
    } while (!bytes.empty());
    return {};
}

Status StoreClient::Impl::send(const std::string& bytes, TimePoint deadline) {
    const Status sent = send_bytes(bytes, deadline);
    // After a time-out too: the server has a part of a message, and no other can follow.
    return sent ? Status() : Status(die(sent.error()));
}

Result<Frame> StoreClient::Impl::receive_frame(TimePoint deadline) {
    for (;;) {
        Result<std::optional<Frame>> frame = decoder.next();
        if (!frame) return frame.error();
        if (*frame) return std::move(**frame);
        if (const Status some = receive_some(deadline); !some) return some.error();
    }
}

/// Gives the decoder the bytes that have come. Bytes of TLS itself give it nothing.
Status StoreClient::Impl::receive_some(TimePoint deadline) {
    const Result<bool> ready = wait_readable(fd.get(), deadline);
    if (!ready) return ready.error();
    if (!*ready) return Error{Errc::Timeout, "no answer", 0};
    const ssize_t got = ::recv(fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return {};
    if (got <= 0)
        return Error{Errc::Closed,
                     got == 0 ? "the server closed the connection" : Error::system("receive").what, 0};
    const std::string_view bytes(buffer.data(), static_cast<std::size_t>(got));
    if (!tls) {
        decoder.feed(bytes);
        return {};
    }
    const Result<std::string_view> said = tls->receive(bytes);
    if (!said) return said.error();
    decoder.feed(*said);
    return tls->output().empty() || !tls->end() ? Status() : send_bytes("", deadline);
}

Result<StoreReply> StoreClient::Impl::receive_answer(std::uint32_t request, TimePoint deadline) {
    for (;;) {
        Result<Frame> frame = receive_frame(deadline);
        if (!frame && frame.error().code == Errc::Timeout) return frame.error();
        if (!frame) return die(frame.error());
        const std::uint32_t of_request = frame->request;
        // This answers an earlier request that has timed out.
        if (of_request != request && of_request != 0) continue;
        if (of_request == 0 && kind_of(frame->type) != MessageKind::Failure) continue;
        Result<StoreReply> reply = decode_store_reply(*std::move(frame));
        if (!reply) return die(reply.error());
        if (of_request == request) return reply;
        const Failure& last_words = std::get<Failure>(*reply);
        return die({last_words.code, last_words.what, 0});
    }
}

Result<StoreReply> StoreClient::Impl::exchange(StoreRequest request, TimePoint deadline) {
    if (const Status named = check_names(request.op); !named) return named.error();
    if (dead) return *dead;
    if (++last_request == 0) ++last_request;
    const std::string_view name = message_name(request.op);
    Result<EncodedMessage> encoded = encode_message(std::move(request), last_request);
    if (!encoded) return encoded.error();
    if (const Status sent = send(std::move(*encoded).whole(), deadline); !sent) return sent.error();
    Result<StoreReply> reply = receive_answer(last_request, deadline);
    if (!reply && reply.error().code == Errc::Timeout) {
        return reply.error().with(fmt::format("{}: store at {}", name, to_string(server)));
    }
    if (reply) {
        // The server closes the connection after this refusal.
        const auto* const failure = std::get_if<Failure>(&*reply);
        if (failure != nullptr && failure->code == Errc::Protocol)
            return die({failure->code, failure->what, 0});
    }
    return reply;
}

Result<StoreReply> StoreClient::Impl::call(StoreOp op) {
    return exchange({options.generation, std::nullopt, std::move(op)},
                    deadline_after(MonotonicClock::now(), operation_timeout));
}

/// Gives the server kAnswerGrace to send its own Timeout, which tells more than ours ("3 of 4 arrived").
Result<StoreReply> StoreClient::Impl::call_waiting(StoreOp op, TimePoint deadline) {
    StoreRequest request{options.generation, std::nullopt, std::move(op)};
    if (deadline != kNever) request.timeout = std::max(deadline - MonotonicClock::now(), Duration::zero());
    return exchange(std::move(request),
                    deadline == kNever
                        ? kNever
                        : deadline_after(std::max(deadline, MonotonicClock::now()), kAnswerGrace));
}

// ---- operations

Status StoreClient::set(std::string_view key, std::string_view value) {
    return expect_done(impl_->call(store_op::Set{std::string(key), Blob(std::string(value))}));
}

Result<std::string> StoreClient::get(std::string_view key, TimePoint deadline) {
    const Result<Value> found = expect<Value>(impl_->call_waiting(store_op::Get{std::string(key)}, deadline));
    if (!found) return found.error();
    return std::string(found->value.view());
}

Result<std::optional<std::string>> StoreClient::try_get(std::string_view key) {
    Result<StoreReply> reply = impl_->call(store_op::TryGet{std::string(key)});
    if (reply && std::holds_alternative<Absent>(*reply)) return std::optional<std::string>();
    const Result<Value> found = expect<Value>(std::move(reply));
    if (!found) return found.error();
    return std::optional(std::string(found->value.view()));
}

Result<std::int64_t> StoreClient::add(std::string_view key, std::int64_t delta) {
    const Result<Sum> sum = expect<Sum>(impl_->call(store_op::Add{std::string(key), delta}));
    if (!sum) return sum.error();
    return sum->sum;
}

Result<StoreClient::Exchange> StoreClient::compare_set(std::string_view key,
                                                       std::optional<std::string_view> expected,
                                                       std::string_view desired) {
    store_op::CompareSet op{std::string(key), std::nullopt, Blob(std::string(desired))};
    if (expected) op.expected = std::string(*expected);
    const Result<Exchanged> done = expect<Exchanged>(impl_->call(std::move(op)));
    if (!done) return done.error();
    return Exchange{done->swapped, std::string(done->value.view())};
}

Result<bool> StoreClient::erase(std::string_view key) {
    const Result<Erased> erased = expect<Erased>(impl_->call(store_op::Erase{std::string(key)}));
    if (!erased) return erased.error();
    return erased->existed;
}

Status StoreClient::wait(const std::vector<std::string>& keys, TimePoint deadline) {
    return expect_done(impl_->call_waiting(store_op::Wait{keys}, deadline));
}

Status StoreClient::barrier(std::string_view name, int participants, TimePoint deadline) {
    return expect_done(impl_->call_waiting(store_op::Barrier{std::string(name), participants}, deadline));
}

// ---- one of several addresses

namespace {

constexpr Duration kFirstTry = std::chrono::milliseconds(500);
constexpr Duration kLongestTry = std::chrono::seconds(8);
/// The time for other addresses to answer after one has refused us (a foreign server, or a wrong secret).
constexpr Duration kAfterRefusal = std::chrono::seconds(10);
/// The time after which a kept meeting point is read again.
constexpr Duration kBelief = std::chrono::seconds(3);

/// True when another try would fail the same way.
bool is_final(const Error& error) { return error.code == Errc::Refused || error.code == Errc::Protocol; }

}  // namespace

Result<Reached> reach(const std::vector<Endpoint>& candidates, const ClientOptions& options,
                      TimePoint deadline) {
    Error last{Errc::NotFound, "no address is known", 0};
    std::optional<Error> refusal;
    for (Duration timeout = kFirstTry; !candidates.empty(); timeout = std::min(2 * timeout, kLongestTry)) {
        bool may_get_better = false;
        for (const Endpoint& candidate : candidates) {
            const bool was_tried = last.code != Errc::NotFound;
            if (was_tried && MonotonicClock::now() >= deadline) break;
            const TimePoint until = std::min(deadline, deadline_after(MonotonicClock::now(), timeout));
            Result<std::unique_ptr<StoreClient>> client = StoreClient::connect(candidate, options, until);
            if (client) return Reached{candidate, *std::move(client)};
            last = client.error();
            may_get_better = may_get_better || !is_final(last);
            if (!is_final(last) || refusal) continue;
            refusal = last;
            deadline = std::min(deadline, deadline_after(MonotonicClock::now(), kAfterRefusal));
        }
        if (!may_get_better || MonotonicClock::now() >= deadline) break;
    }
    const std::string tried = join(candidates, ", ", [](const Endpoint& one) { return to_string(one); });
    if (refusal) return refusal->with("none of " + tried + " is the server");
    return Error{Errc::Timeout, fmt::format("none of {} answers: {}", tried, last.what), 0};
}

Result<Reached> reach(Exchange& exchange, MeetingPoint& point, ClientOptions options, TimePoint deadline) {
    for (;;) {
        const TimePoint begin = MonotonicClock::now();
        const TimePoint until =
            exchange.keeps_what_was_put() ? std::min(deadline, deadline_after(begin, kBelief)) : deadline;
        options.job_id = point.job;
        options.token = point.token;
        Result<Reached> reached = reach(point.endpoints(), options, until);
        if (reached || !exchange.keeps_what_was_put() || MonotonicClock::now() >= deadline) return reached;
        // A refusal comes at once; what replaces it may take a while.
        const TimePoint again = std::min(deadline, deadline_after(begin, std::chrono::milliseconds(200)));
        ::poll(nullptr, 0, poll_milliseconds(MonotonicClock::now(), again));
        Result<MeetingPoint> newer = ask_meeting_point(exchange);
        if (!newer) return newer.error();
        point = *std::move(newer);
    }
}

}  // namespace ddprun::rdzv
