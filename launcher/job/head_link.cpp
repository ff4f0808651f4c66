#include "launcher/job/head_link.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "env/io/socket.h"
#include "env/nodes/meeting_point.h"
#include "env/worker_env.h"

namespace ddprun {

HeadLink::HeadLink(NodeParts& node, bool is_head, rdzv::AgentLinkHandler& handler, Ways ways)
    : node_(node),
      spec_(node.setup.spec),
      handler_(handler),
      ways_(std::move(ways)),
      heir_(*node.loop, heir_at_first(is_head), node.hello, *this) {}

bool HeadLink::head_stays_here() const { return stays_on_host(head_.host); }

HeirState HeadLink::heir_at_first(bool is_head) const {
    const rdzv::Heartbeats limits = heartbeats_of(spec_.rendezvous);
    HeirState state;
    state.has_restarts = spec_.restart.max_restarts > 0 || spec_.nodes.min < spec_.nodes.max;
    state.is_head = is_head;
    state.own_host = node_.hello.host;
    state.own_address = own_endpoint(spec_.rendezvous, 0).host;
    state.patience = spec_.failure_grace + limits.timeout;
    state.head_notices = head_notices_within(limits);
    state.return_timeout = return_timeout(spec_.rendezvous);
    return state;
}

void HeadLink::obey(const rdzv::Legacy& legacy) {
    const Status listens = standby_ ? Status() : listen_as_standby();
    if (!listens) node_.log.warning("this node cannot be the standby: {}", listens.error().what);
    heir_.feed(heir_event::Appointed{legacy, standby_ ? standby_->server->bound().port : std::uint16_t{0}});
}

Status HeadLink::listen_as_standby() {
    rdzv::ServerOptions options;
    options.where = {spec_.rendezvous.listen_on, 0};
    Result<std::unique_ptr<Standby>> standby = Standby::listen(node_, &heir_, std::move(options));
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

void HeadLink::ask_to_end(const char* how, int signal) {
    heir_.feed(heir_event::EndAsked{{how, std::to_string(signal)}, is_connected()});
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

// ---- the head is lost

void HeadLink::lost(const Error& why) {
    const bool is_dead = heir_.state().is_standby() && head_is_dead();
    heir_.feed(heir_event::LinkLost{head_, why, has_joined_, is_dead});
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
    const HeirState& state = heir_.state();
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
    const HeirState& state = heir_.state();
    if (keeps_workers()) workers_ended();
    else if (state.is_orphan()) end_workers(state.why);
}

void HeadLink::end_workers(const std::string& why) {
    node_.agent->handle(
        rdzv::StopGeneration{node_.agent->generation(), SIGTERM, spec_.failure_grace.count(), 0, why});
}

void HeadLink::kill_workers(const Error& why) {
    node_.log.warning("the controller: {}; {}joining again", why.what,
                      node_.agent->idle() ? "" : "killing the workers of this node and ");
    if (!node_.agent->idle()) node_.agent->kill_all();
}

void HeadLink::join(std::vector<Endpoint> where, TimePoint by) {
    node_.loop->post([this, where = std::move(where), by] {
        const bool is_ours = heir_.state().is_standby();
        if (node_.hello.addresses.empty() && is_ours)
            node_.hello.addresses = heir_.state().successor.addresses;
        join(where, by, is_ours);
    });
}

void HeadLink::take_over(const JobState& job,
                         const std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>>& joined) {
    ways_.take_over(*standby_, heir_.state().why, {job, joined, heir_.state().successor.addresses});
}

void HeadLink::give_up(const std::string& why) {
    standby_->server->when_written(kFarewell, [this, why] { ways_.give_up(why); });
}

/// Workers that wait take a while to end: no new head may count on them meanwhile.
void HeadLink::leave(const std::optional<Error>& lost) {
    if (keeps_workers()) node_.loop->post([this] { link_.reset(); });
    ways_.leave(lost, heir_.state().has_asked_to_end ? ExitCode::TryAgain : ExitCode::Unavailable);
}

}  // namespace ddprun
