#include "launcher/node/head_link.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/io/socket.h"
#include "env/nodes/meeting_point.h"
#include "env/worker_env.h"

namespace ddprun {
namespace {

/// True when the controller is on loopback, so that nothing leaves this host.
bool stays_here(const Endpoint& controller) { return controller.host == "127.0.0.1"; }

}  // namespace

HeadLink::HeadLink(NodeParts& node, rdzv::AgentLinkHandler& handler, TakeOver take_over, GiveUp give_up)
    : node_(node),
      spec_(node.setup.spec),
      handler_(handler),
      take_over_(std::move(take_over)),
      give_up_(std::move(give_up)),
      heir_(heir_parts()) {}

bool HeadLink::head_stays_here() const { return stays_here(head_); }

/// Whoever was started by the head ends with it.
bool HeadLink::outlives_head() const { return !node_.setup.started && !spec_.outer_rank; }

Heir::Parts HeadLink::heir_parts() {
    const rdzv::Heartbeats limits = heartbeats_of(spec_.rendezvous);
    return {.loop = *node_.loop,
            .log = node_.log,
            .patience = spec_.failure_grace + limits.timeout,
            .head_notices = head_notices_within(limits),
            .listen = [this] { return listen_as_standby(); },
            .say = [this](rdzv::FromAgent message) { send(std::move(message)); },
            .go_to =
                [this](const std::vector<Endpoint>& controller, TimePoint by) {
                    if (node_.hello.addresses.empty()) node_.hello.addresses = heir_.own_addresses();
                    join(controller, by, heir_.is_standby());
                },
            .own_endpoint = [this](std::uint16_t port) { return own_endpoint(spec_.rendezvous, port); },
            .take_over =
                [this](const JobState& state, const std::string& why) {
                    take_over_(*standby_, why, {state, heir_.own_addresses()});
                },
            .give_up =
                [this](const std::string& why) { standby_->refuse_all(why, [this, why] { give_up_(why); }); },
            .refuse = [this](rdzv::AgentId agent,
                             const Error& why) { standby_->server->refuse_agent(agent, why); }};
}

Result<std::uint16_t> HeadLink::listen_as_standby() {
    rdzv::ServerOptions options;
    options.where = {spec_.rendezvous.listen_on, 0};
    Result<std::unique_ptr<Standby>> standby = Standby::listen(node_, &heir_, std::move(options));
    if (!standby) return standby.error();
    standby_ = *std::move(standby);
    return standby_->server->bound().port;
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

void HeadLink::join(std::vector<Endpoint> controllers, TimePoint by, bool is_ours) {
    head_ = controllers.front();
    head_places_ = controllers.size();
    rdzv::AgentLinkOptions options;
    if (!std::all_of(controllers.begin(), controllers.end(), stays_here)) options.tls = node_.tls;
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

bool HeadLink::ask_to_end(const char* how, int signal) {
    if (!is_connected() || heir_.is_orphan()) return false;
    has_asked_to_end_ = true;
    return send(rdzv::Notice{how, std::to_string(signal)});
}

void HeadLink::keep_alive() {
    if (standby_ && standby_->server) standby_->server->keep_alive();
    if (link_) link_->keep_alive();
}

// ---- what the link's handler hears

void HeadLink::connected() {
    has_joined_ = true;
    head_address_ = link_->controller();
    if (head_places_ > 1) head_ = head_address_;
}

void HeadLink::generation_began(const rdzv::StartGeneration& start) {
    heir_.generation_began();
    node_.hello.kept_place = start.place;
    node_.hello.kept_generation = start.generation;
    node_.hello.kept_restarts = start.restart_count;
}

void HeadLink::obey(const rdzv::Legacy& legacy) {
    if (outlives_head()) heir_.obey(legacy);
}

void HeadLink::obey(const rdzv::Successor& successor) {
    if (outlives_head()) heir_.obey(successor);
}

void HeadLink::on_store_reply(std::uint32_t number, const rdzv::StoreReply& reply) {
    relay_->on_store_reply(number, reply);
}

void HeadLink::on_acknowledged() {
    if (relay_) relay_->on_acknowledged();
}

void HeadLink::end_requests(const Error& why) {
    if (relay_) relay_->on_lost(fmt::format("the head at {} is lost ({})", to_string(head_), why.what));
}

// ---- the head is lost

bool HeadLink::survive(const Error& why) {
    const bool is_gone = why.code == Errc::Closed || why.code == Errc::Timeout;
    const bool follows = !heir_.successor().empty() && !heir_.is_orphan() && !has_asked_to_end_;
    if (is_gone && follows) lose_head(why);
    else if (can_rejoin(why)) rejoin(why);
    else return false;
    return true;
}

/// This node's workers are stopped, as survivors of any failure; when none is left the job goes on elsewhere.
/// Nothing here may wait before they are: the name server may have gone with the head.
void HeadLink::lose_head(const Error& why) {
    const std::string lost = fmt::format("the head at {} is lost ({})", to_string(head_), why.what);
    lost_head_ = head_;
    const std::string next = heir_.is_standby()
                                 ? "as the standby it waits for the other nodes"
                                 : fmt::format("it goes to the standby, {}", heir_.successor());
    node_.log.warning("{}; this node's workers are stopped, then {}", lost, next);
    rdzv::StopGeneration stop;
    stop.generation = node_.agent->generation();
    stop.grace_ns = spec_.failure_grace.count();
    stop.failed_rank = 0;
    stop.why = lost;
    node_.agent->handle(stop);
    node_.inquiry->head_lost(lost);
    // Not only by another try: a ddprun that was started again may listen there by now.
    heir_.head_lost(lost, heir_.is_standby() && (link_->was_refused() || head_is_dead()));
    if (node_.agent->idle()) heir_.workers_ended();
}

/// True when nothing listens where the head did: its process has ended, it is not merely cut off. A host that
/// lives refuses at once.
bool HeadLink::head_is_dead() const {
    constexpr Duration kRefusal = std::chrono::milliseconds(100);
    const Result<UniqueFd> again = connect_tcp(head_address_, MonotonicClock::now() + kRefusal);
    return !again && again.error().sys == ECONNREFUSED;
}

/// A head that says that this node was taken for lost lives, and may still need the node. A head that fell
/// silent may come back, as one that was stopped does; without a restart left it ends the job then, and
/// nobody waits for it here.
bool HeadLink::can_rejoin(const Error& why) const {
    if (has_asked_to_end_) return false;
    const bool is_silent = why.code == Errc::Timeout || rdzv::outage_of(why) == rdzv::Outage::Unreachable;
    const bool has_restarts = spec_.restart.max_restarts > 0 || spec_.nodes.min < spec_.nodes.max;
    return why.code == Errc::StaleGeneration || (is_silent && has_joined_ && has_restarts);
}

/// The workers belong to a generation that is over for the other nodes: they are killed, and this node joins
/// as a new one. No grace: the other nodes may have begun the next generation.
void HeadLink::rejoin(const Error& why) {
    node_.log.warning("the controller: {}; {}joining again", why.what,
                      node_.agent->idle() ? "" : "killing the workers of this node and ");
    if (heir_.is_orphan()) head_ = lost_head_;
    heir_.rejoin();
    // A standby does not count what its head has lost, so this node is not to be taken for that one.
    node_.hello.rejoins =
        std::exchange(node_.hello.instance, fmt::format("{}.{}", node_.guards.id, ++joins_));
    rejoins_ = true;
    if (node_.agent->idle()) join_again();
    else node_.agent->kill_all();  // its last word has us join
}

void HeadLink::workers_ended() {
    heir_.workers_ended();
    if (rejoins_) join_again();
}

void HeadLink::join_again() {
    rejoins_ = false;
    node_.loop->post([this] {
        join({head_}, deadline_after(node_.loop->now(), return_timeout(spec_.rendezvous)), false);
    });
}

}  // namespace ddprun
