#include "rendezvous/agent/resolver.h"

#include <fmt/core.h>
#include <netdb.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace ddprun::rdzv {
namespace {

Result<SocketAddresses> ask_system(const Endpoint& endpoint) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int failure =
        ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
    if (failure == EAI_SYSTEM) return Error::system("resolve " + endpoint.host);
    if (failure != 0)
        return Error{Errc::NotFound, fmt::format("resolve {}: {}", endpoint.host, ::gai_strerror(failure)),
                     0};
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
    SocketAddresses addresses;
    for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
        SocketAddress& address = addresses.emplace_back();
        std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
        address.length = a->ai_addrlen;
    }
    return addresses;
}

}  // namespace

/// Shared by the loop and the thread; the event tells the loop that `outcome` is there.
struct Resolver::Lookup {
    Endpoint endpoint;
    UniqueFd done;
    std::optional<Result<SocketAddresses>> outcome;

    static void* run(void* argument) {
        const std::unique_ptr<std::shared_ptr<Lookup>> held(static_cast<std::shared_ptr<Lookup>*>(argument));
        Lookup& lookup = **held;
        lookup.outcome = ask_system(lookup.endpoint);
        ::eventfd_write(lookup.done.get(), 1);
        return nullptr;
    }
};

void Resolver::look_up(const Endpoint& endpoint, Handler handler) {
    forget();
    handler_ = std::move(handler);
    lookup_ = std::make_shared<Lookup>();
    const Status started = start(endpoint);
    if (started) return;
    lookup_->outcome = started.error();
    loop_.post([this, lookup = std::weak_ptr<Lookup>(lookup_)] {
        const std::shared_ptr<Lookup> mine = lookup.lock();
        if (mine == nullptr || mine != lookup_) return;  // forgotten meanwhile
        lookup_.reset();
        std::exchange(handler_, nullptr)(*std::move(mine->outcome));
    });
}

Status Resolver::start(const Endpoint& endpoint) {
    lookup_->endpoint = endpoint;
    lookup_->done = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!lookup_->done) return Error::system("eventfd");
    const Status watched = loop_.watch(lookup_->done.get(), EPOLLIN, [this](std::uint32_t) {
        std::uint64_t count = 0;
        ::eventfd_read(lookup_->done.get(), &count);  // orders the outcome before us
        const std::shared_ptr<Lookup> mine = lookup_;
        Handler handler = std::exchange(handler_, nullptr);
        forget();
        handler(*std::move(mine->outcome));
    });
    if (!watched) return watched;
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    auto held = std::make_unique<std::shared_ptr<Lookup>>(lookup_);
    pthread_t thread{};
    const int failure = ::pthread_create(&thread, &attributes, &Lookup::run, held.get());
    ::pthread_attr_destroy(&attributes);
    if (failure == 0) {
        (void)held.release();  // the thread's now
        return {};
    }
    loop_.unwatch(lookup_->done.get());
    return Error::system("pthread_create", failure);
}

void Resolver::forget() {
    if (lookup_ != nullptr && lookup_->done) loop_.unwatch(lookup_->done.get());
    lookup_.reset();
    handler_ = nullptr;
}

}  // namespace ddprun::rdzv
