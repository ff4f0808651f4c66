#include "launcher/job/standby.h"

#include <fcntl.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "env/io/socket.h"

namespace ddprun {

Result<std::unique_ptr<Standby>> Standby::listen(NodeParts& node, Heir* heir, rdzv::ServerOptions options) {
    const JobSpec& spec = node.setup.spec;
    const bool is_python = is_run_by_python(node.setup.program);
    const Result<TorchStoreChoice> store = choose_torch_store(spec, is_python);
    if (!store) return store.error();
    const bool is_news = !store->is_served && spec.rendezvous.tls && is_python;
    if (is_news) node.log.info("PyTorch's rank 0 hosts the store of its workers: {}", store->why);
    else
        node.log.debug("the store of PyTorch's workers is {}: {}", store->is_served ? "ours" : "theirs",
                       store->why);
    if (store->is_served && spec.nodes.max == 1)
        options.where.port = static_cast<std::uint16_t>(spec.rendezvous.master_port.value_or(0));
    options.credentials = {spec.rendezvous.run_id, node.token.token};
    options.serves_torch = store->is_served;
    options.heartbeats = heartbeats_of(spec.rendezvous);
    if (spec.rendezvous.tls) {
        Result<std::shared_ptr<const rdzv::TlsContext>> tls = rdzv::TlsContext::for_server();
        if (!tls) return tls.error().with("--tls");
        options.tls = *std::move(tls);
    }
    std::unique_ptr<Standby> standby(new Standby(node, heir));
    Result<std::unique_ptr<rdzv::Server>> server =
        rdzv::Server::create(*node.loop, std::move(options), *standby);
    if (!server) return server.error();
    standby->server = *std::move(server);
    standby->serves_torch = store->is_served;
    return standby;
}

/// The kernel can refuse both of two processes that begin to listen at the same moment. A process that finds
/// nobody listening therefore tries again, after a pause that depends on its process id.
Result<std::unique_ptr<Standby>> Standby::listen_first(NodeParts& node, const HeadChoice& choice) {
    const JobSpec& spec = node.setup.spec;
    const std::optional<Endpoint> shared = shared_endpoint(spec);
    // With several nodes the controller itself listens on --master-port, unless the nodes met elsewhere.
    if (spec.rendezvous.master_port && (!shared || node.setup.meeting)) {
        if (const Status free = MasterPort::check(*spec.rendezvous.master_port); !free) return free.error();
    }
    constexpr int kTries = 20;
    for (int attempt = 1;; ++attempt) {
        rdzv::ServerOptions options;
        options.where = choice.endpoint;
        if (node.setup.meeting) options.listener = std::move(node.setup.meeting->listener);
        // A copy, because another process may turn out to be the head.
        options.local_listener = UniqueFd(::fcntl(node.guards.store.fd.get(), F_DUPFD_CLOEXEC, 0));
        Result<std::unique_ptr<Standby>> standby = listen(node, nullptr, std::move(options));
        if (standby || !choice.contested || standby.error().sys != EADDRINUSE || attempt == kTries ||
            connect_tcp(*shared, MonotonicClock::now() + std::chrono::seconds(1)))
            return standby;
        std::this_thread::sleep_for(std::chrono::milliseconds(1 + (::getpid() + attempt) % 16));
    }
}

void Standby::on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) {
    heir_->feed(heir_event::AgentCame{agent, hello});
}

void Standby::on_agent_lost(rdzv::AgentId agent, const Error&) { heir_->feed(heir_event::AgentGone{agent}); }

}  // namespace ddprun
