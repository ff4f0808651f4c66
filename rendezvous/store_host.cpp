#include "rendezvous/store_host.h"

#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "env/hmac.h"
#include "env/io/background_call.h"
#include "rendezvous/frame.h"
#include "rendezvous/store.h"
#include "rendezvous/strangers.h"

namespace ddprun::rdzv {
namespace {

constexpr Duration kAcceptAgain = std::chrono::milliseconds(200);

/// One connection, from the first byte to the last.
struct StoreGuest {
    UniqueFd fd;
    ServerHandshake handshake;
    TimePoint leaves_at;  ///< by when the handshake, or the last word, must be over; kNever: it is served
    FrameDecoder decoder{kStrangerLimits};
    std::string output = {};
    bool is_leaving = false;  ///< gets its last word, and is heard no more
    bool is_over = false;
};

}  // namespace

struct StoreHost::Impl {
    Impl(UniqueFd socket, StoreHostOptions given)
        : listener(std::move(socket)),
          options(std::move(given)),
          store(options.store_limits),
          strangers(options.limits.strangers) {}

    void serve();

    UniqueFd listener;
    StoreHostOptions options;
    UniqueFd stop{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    pid_t owner = ::getpid();
    std::thread thread;

  private:
    TimePoint turn(TimePoint until);
    void accept_some();
    bool make_room();
    [[nodiscard]] TimePoint accepts_at() const { return std::max(accepts_from, strangers.room_at()); }
    void receive(ClientId id, StoreGuest& guest);
    Status take(ClientId id, StoreGuest& guest, Frame frame);
    Status shake_hands(ClientId id, StoreGuest& guest, Frame frame);
    void send(StoreGuest& guest, Result<EncodedMessage> message);
    void refuse(ClientId id, StoreGuest& guest, const Failure& why);
    void write(StoreGuest& guest);
    void deliver(StoreAnswers answers);
    void remove_the_gone(TimePoint now);
    [[nodiscard]] bool has_output() const;
    [[nodiscard]] bool has_others() const;

    Store store;
    Strangers strangers;
    std::map<ClientId, StoreGuest> guests;
    ClientId last_guest = 0;
    TimePoint accepts_from{};  ///< after the process ran out of descriptors: later
    std::array<char, 65536> buffer{};
};

// ---- the thread

void StoreHost::Impl::serve() {
    TimePoint next = kNever;
    pollfd asked{stop.get(), POLLIN, 0};
    while (::poll(&asked, 1, 0) == 0) next = turn(next);
    std::uint64_t asked_to = 0;
    static_cast<void>(!::read(stop.get(), &asked_to, sizeof asked_to));  // waits go on without it
    const TimePoint farewell = deadline_after(MonotonicClock::now(), options.farewell);
    while ((has_output() || has_others()) && MonotonicClock::now() < farewell) turn(farewell);
}

/// Waits for something to do, and does it. When there is something to do next without a peer's doing.
TimePoint StoreHost::Impl::turn(TimePoint until) {
    const bool accepts = accepts_at() <= MonotonicClock::now();
    std::vector<pollfd> waits = {{stop.get(), POLLIN, 0}, {accepts ? listener.get() : -1, POLLIN, 0}};
    std::vector<ClientId> ids;
    for (const auto& [id, guest] : guests) {
        const int events = (guest.is_leaving ? 0 : POLLIN) | (guest.output.empty() ? 0 : POLLOUT);
        waits.push_back({guest.fd.get(), static_cast<short>(events), 0});
        ids.push_back(id);
    }
    if (::poll(waits.data(), waits.size(), poll_milliseconds(MonotonicClock::now(), until)) < 0) return until;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const short seen = waits[i + 2].revents;
        StoreGuest& guest = guests.at(ids[i]);
        if ((seen & POLLOUT) != 0) write(guest);
        if ((seen & (POLLIN | POLLHUP | POLLERR)) != 0) receive(ids[i], guest);
    }
    if (waits[1].revents != 0) accept_some();
    const TimePoint now = MonotonicClock::now();
    deliver(store.expire(now));
    remove_the_gone(now);
    TimePoint next = std::min(store.next_deadline(), accepts_at() > now ? accepts_at() : kNever);
    for (const auto& [id, guest] : guests) next = std::min(next, guest.leaves_at);
    return next;
}

void StoreHost::Impl::accept_some() {
    while (accepts_at() <= MonotonicClock::now()) {
        UniqueFd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd) {
            const bool is_full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
            if (is_full) accepts_from = deadline_after(MonotonicClock::now(), kAcceptAgain);
            return;
        }
        Result<std::string> nonce = random_hex(kNonceBytes);
        // Whoever knows the token comes again.
        if (!nonce || !make_room()) continue;
        const int on = 1;
        ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        const TimePoint now = MonotonicClock::now(), until = deadline_after(now, options.limits.handshake);
        guests.emplace(
            ++last_guest,
            StoreGuest{std::move(fd), ServerHandshake(options.credentials, *std::move(nonce)), until});
        strangers.arrived(last_guest, now);
    }
}

/// As Server::make_room: a connection that has not proved that it knows the token gives way. False: there is
/// none.
bool StoreHost::Impl::make_room() {
    if (!strangers.is_crowded() && guests.size() < options.limits.connections) return true;
    const std::optional<ClientId> id = strangers.next_to_go();
    if (!id) return false;
    strangers.left(*id);
    guests.erase(*id);
    return true;
}

void StoreHost::Impl::receive(ClientId id, StoreGuest& guest) {
    if (guest.is_leaving) {  // nothing more is heard from it, and it has hung up
        guest.is_over = true;
        return;
    }
    const ssize_t got = ::recv(guest.fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        guest.is_over = true;
        return;
    }
    guest.decoder.feed({buffer.data(), static_cast<std::size_t>(got)});
    while (!guest.is_leaving && !guest.is_over) {
        Result<std::optional<Frame>> frame = guest.decoder.next();
        if (!frame) return refuse(id, guest, {frame.error().code, frame.error().what});
        if (!*frame) return;
        const Status taken = take(id, guest, std::move(**frame));
        if (!taken) return refuse(id, guest, {taken.error().code, taken.error().what});
    }
}

Status StoreHost::Impl::take(ClientId id, StoreGuest& guest, Frame frame) {
    if (!guest.handshake.authenticated()) return shake_hands(id, guest, std::move(frame));
    const std::uint32_t number = frame.request;
    const std::uint8_t type = frame.type;
    switch (kind_of(type)) {
        case MessageKind::Heartbeat: return {};
        case MessageKind::Unknown:
            send(guest, encode_message(
                            Failure{Errc::NotFound, fmt::format("message type {} is not known here", type)},
                            number));
            return {};
        case MessageKind::StoreRequest: break;
        default:
            return Error{Errc::Protocol,
                         fmt::format("{}: there is a store here, and no controller", message_name(type)), 0};
    }
    Result<StoreRequest> request = decode_store_request(std::move(frame));
    if (!request) return request.error();
    deliver(store.apply(id, number, *std::move(request), MonotonicClock::now()));
    return {};
}

Status StoreHost::Impl::shake_hands(ClientId id, StoreGuest& guest, Frame frame) {
    strangers.spoke(id, MonotonicClock::now());
    const std::uint32_t number = frame.request;
    const Result<HandshakeMessage> message = decode_handshake(std::move(frame));
    if (!message) return message.error();
    Result<HandshakeMessage> answer = guest.handshake.receive(*message);
    if (!answer) {
        refuse(id, guest, guest.handshake.refusal());
        return {};
    }
    if (guest.handshake.authenticated()) {
        strangers.left(id);
        guest.decoder.set_limits(kPeerLimits);
        guest.leaves_at = kNever;
    }
    send(guest, encode_message(*std::move(answer), number));
    return {};
}

void StoreHost::Impl::send(StoreGuest& guest, Result<EncodedMessage> message) {
    if (message) guest.output += std::move(*message).whole();
    if (!message || guest.output.size() > options.limits.output_bytes) {
        guest.is_over = true;
        return;
    }
    write(guest);
}

void StoreHost::Impl::refuse(ClientId id, StoreGuest& guest, const Failure& why) {
    strangers.refused(id);
    send(guest, encode_message(why, 0));
    guest.is_leaving = true;
    guest.leaves_at = deadline_after(MonotonicClock::now(), options.limits.goodbye);
}

void StoreHost::Impl::write(StoreGuest& guest) {
    const ssize_t sent =
        ::send(guest.fd.get(), guest.output.data(), guest.output.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) guest.output.erase(0, static_cast<std::size_t>(sent));
    else if (errno != EAGAIN && errno != EINTR) guest.is_over = true;
}

void StoreHost::Impl::deliver(StoreAnswers answers) {
    for (StoreAnswer& answer : answers) {
        const auto guest = guests.find(answer.client.connection);
        if (guest != guests.end())
            send(guest->second, encode_message(std::move(answer.reply), answer.request));
    }
}

void StoreHost::Impl::remove_the_gone(TimePoint now) {
    for (auto one = guests.begin(); one != guests.end();) {
        StoreGuest& guest = one->second;
        const bool has_heard_it = guest.is_leaving && guest.output.empty();
        if (!guest.is_over && !has_heard_it && guest.leaves_at > now) {
            ++one;
            continue;
        }
        store.disconnect(one->first);
        strangers.left(one->first);
        one = guests.erase(one);
    }
}

bool StoreHost::Impl::has_output() const {
    return std::any_of(guests.begin(), guests.end(),
                       [](const auto& guest) { return !guest.second.output.empty(); });
}

bool StoreHost::Impl::has_others() const {
    return std::any_of(guests.begin(), guests.end(), [this](const auto& guest) {
        const ServerHandshake& handshake = guest.second.handshake;
        return handshake.authenticated() && !guest.second.is_leaving &&
               handshake.peer().name != options.own_name;
    });
}

// ---- the handle

StoreHost::StoreHost(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<StoreHost>> StoreHost::start(UniqueFd listener, StoreHostOptions options) {
    if (options.credentials.token.empty()) return Error{Errc::InvalidArgument, "a store without a token", 0};
    auto impl = std::make_unique<Impl>(std::move(listener), std::move(options));
    if (!impl->stop) return Error::system("eventfd");
    Result<std::thread> thread =
        start_thread("start a thread for the store", [serving = impl.get()] { serving->serve(); });
    if (!thread) return thread.error();
    impl->thread = *std::move(thread);
    return std::unique_ptr<StoreHost>(new StoreHost(std::move(impl)));
}

StoreHost::~StoreHost() {
    if (impl_->owner != ::getpid()) {  // a forked child has no such thread, and shares what it would close
        impl_->thread.detach();
        static_cast<void>(impl_.release());
        return;
    }
    const std::uint64_t one = 1;
    static_cast<void>(!::write(impl_->stop.get(), &one, sizeof one));
    impl_->thread.join();
}

}  // namespace ddprun::rdzv
