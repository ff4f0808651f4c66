#include "rendezvous/serve/store_host.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "env/io/background_call.h"
#include "env/os/event_loop.h"
#include "rendezvous/serve/store_service.h"

namespace ddprun::rdzv {

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
