#include "launcher/job/head_link.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "env/io/socket.h"
#include "env/nodes/meeting_point.h"
#include "env/worker_env.h"

namespace ddprun {

// ---- the server of a process that is not the head yet

Result<std::unique_ptr<Standby>> Standby::listen(NodeParts& node, Tell tell, rdzv::ServerOptions options) {
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
    std::unique_ptr<Standby> standby(new Standby(node, std::move(tell)));
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

// ---- the link

HeadLink::HeadLink(NodeParts& node, bool is_head, rdzv::AgentLinkHandler& handler, Ways ways)
    : node_(node),
      spec_(node.setup.spec),
      handler_(handler),
      ways_(std::move(ways)),
      follower_(begin_following(is_head)) {}

bool HeadLink::head_stays_here() const { return stays_on_host(head_.host); }

FollowerState HeadLink::begin_following(bool is_head) const {
    const rdzv::Heartbeats limits = heartbeats_of(spec_.rendezvous);
    FollowerState state;
    state.has_restarts = spec_.restart.max_restarts > 0 || spec_.nodes.min < spec_.nodes.max;
    state.is_head = is_head;
    state.own_host = node_.hello.host;
    state.own_address = own_endpoint(spec_.rendezvous, 0).host;
    state.arrival_timeout = spec_.failure_grace + limits.timeout;
    state.head_notices = head_notices_within(limits);
    state.return_timeout = return_timeout(spec_.rendezvous);
    return state;
}

void HeadLink::obey(const rdzv::JobSnapshot& snapshot) {
    const Status listens = standby_ ? Status() : listen_as_standby();
    if (!listens) node_.log.warning("this node cannot be the standby: {}", listens.error().what);
    feed(follower_event::Appointed{snapshot, standby_ ? standby_->server->bound().port : std::uint16_t{0}});
}

Status HeadLink::listen_as_standby() {
    rdzv::ServerOptions options;
    options.where = {spec_.rendezvous.listen_on, 0};
    Result<std::unique_ptr<Standby>> standby = Standby::listen(
        node_, [this](const FollowerEvent& event) { feed(event); }, std::move(options));
    if (!standby) return standby.error();
    standby_ = *std::move(standby);
    return {};
}

Status HeadLink::relay_store() {
    rdzv::StoreRelay::Parts parts{*node_.loop, [this] { return link_.get(); },
                                  [this](const std::string& line) { node_.connections->warn(line); }};
    Result<std::unique_ptr<rdzv::StoreRelay>> relay = rdzv::StoreRelay::serve(
        std::move(parts), std::move(node_.guards.store.fd), {spec_.rendezvous.run_id, node_.token.token});
    if (!relay) return relay.error();
    relay_ = *std::move(relay);
    return {};
}

void HeadLink::join(const Endpoint& controller, bool is_ours) {
    std::vector<Endpoint> controllers{controller};
    for (const Endpoint& other : node_.setup.head_elsewhere) {
        if (other != controller) controllers.push_back(other);
    }
    join(std::move(controllers), deadline_after(MonotonicClock::now(), spec_.rendezvous.join_timeout),
         is_ours);
}

void HeadLink::join(std::vector<Endpoint> controllers, TimePoint by, bool is_ours) {
    head_ = controllers.front();
    head_places_ = controllers.size();
    rdzv::AgentLinkOptions options;
    const auto stays_here = [](const Endpoint& controller) { return stays_on_host(controller.host); };
    if (!std::ranges::all_of(controllers, stays_here)) options.tls = node_.tls;
    options.controllers = std::move(controllers);
    options.credentials = {spec_.rendezvous.run_id, node_.token.token};
    options.name = "agent on " + node_.host;
    options.when_token_differs = node_.token.when_refused;
    options.hello = node_.hello;
    const bool has_others = spec_.nodes.max > 1 && !spec_.rendezvous.local_addr;
    if (has_others)
        options.other_addresses =
            reachable_addresses(list_interfaces(), process_environment("NCCL_SOCKET_IFNAME").value_or(""));
    options.heartbeats = heartbeats_of(spec_.rendezvous);
    options.is_ours = is_ours;
    options.connect_by = by;
    has_joined_ = false;
    link_ = std::make_unique<rdzv::AgentLink>(*node_.loop, std::move(options), handler_);
}

void HeadLink::ask_to_end(const rdzv::StopRequest& how) {
    feed(follower_event::EndAsked{how, is_connected()});
}

void HeadLink::keep_alive() {
    if (standby_ && standby_->server) standby_->server->keep_alive();
    if (link_) link_->keep_alive();
}

// ---- events of the link

void HeadLink::connected() {
    has_joined_ = true;
    head_address_ = link_->controller();
    if (head_places_ > 1) head_ = head_address_;
}

void HeadLink::end_requests(const Error& why) {
    if (relay_) relay_->on_lost(fmt::format("the head at {} is lost ({})", to_string(head_), why.what));
}

void HeadLink::generation_began(const rdzv::StartGeneration& start) {
    note_generation(node_.hello, start);
    feed(follower_event::GenerationBegan{});
}

// ---- what the follower decides

void HeadLink::feed(const FollowerEvent& event) {
    const FollowerActions actions = step(follower_, event, MonotonicClock::now());
    node_.loop->cancel(timer_);
    if (follower_.timer != kNever)
        timer_ = node_.loop->call_at(follower_.timer, [this] { feed(follower_event::TimerFired{}); });
    perform(actions);
}

void HeadLink::perform(const FollowerActions& actions) {
    if (actions.send) send(*actions.send);
    if (!actions.stop_workers.empty()) stop_workers(actions.stop_workers);
    for (const auto& [agent, why] : actions.refuse) standby_->server->refuse_agent(agent, why);
    if (actions.renew) renew(*actions.renew);
    const bool ends_workers = actions.renew || !actions.stop_workers.empty();
    if (ends_workers && !has_workers()) workers_ended();
    if (!actions.join.empty()) join_soon(actions.join, actions.join_by);
    if (actions.take_over)
        ways_.take_over(*standby_, follower_.why,
                        {*actions.take_over, actions.joined, follower_.successor.addresses});
    if (!actions.give_up.empty())
        standby_->server->when_written(kFarewell, [this, why = actions.give_up] { ways_.give_up(why); });
    if (actions.end) ways_.end(*actions.end);
    if (actions.leave) leave(actions.lost);
}

void HeadLink::lost(const Error& why) {
    const bool is_dead = follower_.is_standby() && head_is_dead();
    feed(follower_event::LinkLost{head_, why, has_joined_, is_dead});
}

/// True when nothing listens at the head's address: its process has ended, rather than being cut off. A
/// living host refuses at once. The first refusal counts too: a ddprun that was started again may listen
/// there now.
bool HeadLink::head_is_dead() const {
    if (link_->was_refused()) return true;
    constexpr Duration kRefusal = std::chrono::milliseconds(100);
    const Result<UniqueFd> again = connect_tcp(head_address_, MonotonicClock::now() + kRefusal);
    return !again && again.error().sys == ECONNREFUSED;
}

/// Asks no name server: it may have been lost with the head.
void HeadLink::stop_workers(const std::string& why) {
    const FollowerState& state = follower_;
    const bool waits = node_.agent->state().may_be_left() && node_.agent->state().alive() > 0;
    node_.log.warning("{}; this node's workers {}, then {}", why,
                      waits ? "leave their generation" : "are stopped",
                      state.is_standby() ? "as the standby it waits for the other nodes"
                                         : fmt::format("it goes to the standby, {}", state.successor.host));
    if (waits) node_.agent->suspend(0, why, heartbeats_of(spec_.rendezvous).timeout);
    else end_workers(why);
    node_.inquiry->head_lost(why);
}

/// Workers that have all died leave processes behind, which have to end.
void HeadLink::workers_left() {
    const FollowerState& state = follower_;
    if (keeps_workers()) workers_ended();
    else if (state.is_orphan()) end_workers(state.why);
}

void HeadLink::end_workers(const std::string& why) {
    node_.agent->handle(
        rdzv::StopGeneration{node_.agent->generation(), SIGTERM, spec_.failure_grace.count(), 0, why});
}

/// Kills the workers. A standby does not count nodes that its head has lost, so this node joins as another
/// instance.
void HeadLink::renew(const Error& why) {
    node_.hello.rejoins =
        std::exchange(node_.hello.instance, fmt::format("{}.{}", node_.guards.id, follower_.instances));
    node_.log.warning("the controller: {}; {}joining again", why.what,
                      node_.agent->idle() ? "" : "killing the workers of this node and ");
    if (!node_.agent->idle()) node_.agent->kill_all();
}

/// Joins the head later, because the caller may be a handler of the earlier link.
void HeadLink::join_soon(std::vector<Endpoint> where, TimePoint by) {
    node_.hello.keeps_workers = keeps_workers();
    node_.loop->post([this, where = std::move(where), by] {
        const bool is_ours = follower_.is_standby();
        if (node_.hello.addresses.empty() && is_ours) node_.hello.addresses = follower_.successor.addresses;
        join(where, by, is_ours);
    });
}

/// Workers that wait take a while to end: no new head may count on them meanwhile.
void HeadLink::leave(const std::optional<Error>& lost) {
    if (keeps_workers()) node_.loop->post([this] { link_.reset(); });
    ways_.leave(lost, follower_.has_asked_to_end ? ExitCode::TryAgain : ExitCode::Unavailable);
}

}  // namespace ddprun
