#include "rendezvous/serve/store_service.h"

#include <fmt/core.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "env/io/background_call.h"
#include "env/io/socket.h"
#include "env/os/event_loop.h"

namespace ddprun::rdzv {
namespace {

bool is_unix_socket(int fd) {
    int domain = 0;
    socklen_t length = sizeof domain;
    return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX;
}

}  // namespace

StorePeers::StorePeers(os::EventLoop& loop, bool is_local, Credentials credentials, ServerLimits limits,
                       StorePeersHandler& handler)
    : is_local_(is_local),
      most_unanswered_(limits.unanswered),
      handler_(handler),
      peers_(loop, {std::move(credentials), limits, is_local ? "connections of workers" : "connections"},
             *this) {}

Result<std::unique_ptr<StorePeers>> StorePeers::serve(os::EventLoop& loop, UniqueFd listener,
                                                      Credentials credentials, ServerLimits limits,
                                                      StorePeersHandler& handler) {
    const bool is_local = is_unix_socket(listener.get());
    std::unique_ptr<StorePeers> peers(
        new StorePeers(loop, is_local, std::move(credentials), limits, handler));
    if (const Status listens = peers->peers_.listen(std::move(listener)); !listens) return listens.error();
    return peers;
}

Result<std::string> StorePeers::identify(int fd) {
    if (!is_local_) return peer_name(fd);
    const Result<UnixPeer> who = unix_peer(fd);
    if (!who) return who.error();
    if (who->uid == ::geteuid() || who->uid == 0) return fmt::format("pid {}", who->pid);
    return Error{Errc::Refused, fmt::format("refusing pid {}: it is user {}'s", who->pid, who->uid), 0};
}

Result<bool> StorePeers::on_hello(const Hello& hello) {
    if (is_local_ && hello.role == Role::Agent)
        return Error::protocol("an agent goes to the controller's port");
    return false;
}

Status StorePeers::on_entered(Peer& peer) {
    if (is_paused_) peer.connection->pause_reading();
    return {};
}

Status StorePeers::on_frame(Peer& peer, Frame frame) {
    const std::uint32_t number = frame.request;
    const std::uint8_t type = frame.type;
    const MessageKind kind = kind_of(type);
    if (kind == MessageKind::Unknown) peer.send_unknown(frame);
    if (kind == MessageKind::Unknown || kind == MessageKind::Heartbeat) return {};
    if (kind != MessageKind::StoreRequest) return peer.misplaced(type);
    Result<StoreRequest> request = decode_store_request(std::move(frame));
    if (!request) return request.error();
    if (request->client != 0)
        return Error::protocol(fmt::format("{}: 'client' is for agents", message_name(type)));
    if (++peer.unanswered == most_unanswered_) peer.connection->pause_reading();
    handler_.on_store_request(peer.id, number, *std::move(request));
    return {};
}

void StorePeers::answer(ClientId client, std::uint32_t number, StoreReply reply) {
    Peer* const peer = peers_.find(client);
    if (peer == nullptr) return;
    peer->connection->send(encode_message(std::move(reply), number));
    if (peer->unanswered-- == most_unanswered_ && !is_paused_) peer->connection->resume_reading();
}

void StorePeers::pause() {
    if (std::exchange(is_paused_, true)) return;
    for (const auto& [id, peer] : peers_.all()) {
        if (peer->stage == Peer::Stage::Serving) peer->connection->pause_reading();
    }
}

void StorePeers::resume() {
    if (!std::exchange(is_paused_, false)) return;
    for (const auto& [id, peer] : peers_.all()) {
        if (peer->unanswered < most_unanswered_) peer->connection->resume_reading();
    }
}

bool StorePeers::is_busy_but_for(const std::string& name) const {
    return std::any_of(peers_.all().begin(), peers_.all().end(), [&](const auto& entry) {
        const Peer& peer = *entry.second;
        const bool is_served = peer.stage == Peer::Stage::Serving && peer.handshake.peer().name != name;
        return is_served || peer.connection->kept_bytes() > 0;
    });
}

void StorePeers::on_gone(Peer& peer, const Error&) {
    if (peer.handshake.authenticated()) handler_.on_store_peer_gone(peer.id);
}

Status StoreService::serve(UniqueFd listener, const Credentials& credentials, ServerLimits limits) {
    Result<std::unique_ptr<StorePeers>> peers =
        StorePeers::serve(parts_.loop, std::move(listener), credentials, limits, *this);
    if (!peers) return peers.error();
    peers_ = *std::move(peers);
    return {};
}

void StoreService::on_store_request(ClientId client, std::uint32_t number, StoreRequest request) {
    ask({kOwn, client}, number, std::move(request));
}

void StoreService::ask(StoreClientId client, std::uint32_t number, StoreRequest request) {
    deliver(store_.apply(client, number, std::move(request), parts_.loop.now()));
    expiry_.arm(store_.next_deadline());
}

StoreReply StoreService::ask_own(StoreOp op) {
    StoreRequest request{store_.generation(), Duration::zero(), std::move(op)};
    StoreAnswers answers = store_.apply(kOwn, 0, std::move(request), parts_.loop.now());
    for (StoreAnswer& late : store_.expire(parts_.loop.now())) answers.push_back(std::move(late));
    StoreReply own = Failure{Errc::Timeout, "the store did not answer"};
    const auto mine = std::find_if(answers.begin(), answers.end(),
                                   [](const StoreAnswer& a) { return a.client == StoreClientId(kOwn); });
    if (mine != answers.end()) own = mine->reply;
    deliver(std::move(answers));
    return own;
}

void StoreService::deliver(StoreAnswers answers) {
    for (StoreAnswer& answer : answers) {
        if (answer.client.connection != kOwn) parts_.answer(std::move(answer));
        else if (peers_) peers_->answer(answer.client.number, answer.request, std::move(answer.reply));
    }
}

void StoreService::expire() {
    deliver(store_.expire(parts_.loop.now()));
    expiry_.arm(store_.next_deadline());
}

struct StoreHost::Impl {
    Impl(std::unique_ptr<os::EventLoop> own_loop, const StoreHostOptions& options)
        : own_name(options.own_name),
          farewell(options.farewell),
          loop(std::move(own_loop)),
          service({*loop, [](const StoreAnswer&) {}, [](const std::string&) {}}, options.store_limits) {}

    void serve() {
        static_cast<void>(loop->run());
        const TimePoint until = deadline_after(MonotonicClock::now(), farewell);
        while (service.peers()->is_busy_but_for(own_name) && MonotonicClock::now() < until) {
            if (!loop->run_once(until)) return;
        }
    }

    std::string own_name;
    Duration farewell;
    UniqueFd stop{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    pid_t owner = ::getpid();
    std::unique_ptr<os::EventLoop> loop;
    StoreService service;
    std::thread thread;
};

StoreHost::StoreHost(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<StoreHost>> StoreHost::start(UniqueFd listener, StoreHostOptions options) {
    if (options.credentials.token.empty()) return Error{Errc::InvalidArgument, "a store without a token", 0};
    Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create({});
    if (!loop) return loop.error();
    auto impl = std::make_unique<Impl>(*std::move(loop), options);
    if (!impl->stop) return Error::system("eventfd");
    Status ready = impl->loop->watch(impl->stop.get(), EPOLLIN, [raw = impl.get()](std::uint32_t) {
        raw->loop->unwatch(raw->stop.get());
        raw->loop->stop();
    });
    if (ready) ready = impl->service.serve(std::move(listener), options.credentials, options.limits);
    if (!ready) return ready.error();
    Result<std::thread> thread =
        start_thread("start a thread for the store", [serving = impl.get()] { serving->serve(); });
    if (!thread) return thread.error();
    impl->thread = *std::move(thread);
    return std::unique_ptr<StoreHost>(new StoreHost(std::move(impl)));
}

StoreHost::~StoreHost() {
    if (impl_->owner != ::getpid()) {  // a forked child has no such thread, and shares the descriptors
        impl_->thread.detach();
        static_cast<void>(impl_.release());
        return;
    }
    ::eventfd_write(impl_->stop.get(), 1);
    impl_->thread.join();
}

}  // namespace ddprun::rdzv
