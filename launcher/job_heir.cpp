#include "launcher/job.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/io/socket.h"
#include "env/text.h"
#include "launcher/exit_codes.h"

namespace ddprun {

/// Whoever was started by the head ends with it.
void Job::build_heir() {
    const JobSpec& spec = setup_.spec;
    if (setup_.is_started || setup_.has_lifeline || spec.outer_rank) return;
    Heir::Parts parts{*loop_, log_, {}, {}, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    parts.patience = spec.failure_grace + heartbeats_of(spec.rendezvous).timeout;
    parts.head_notices = head_notices_within(heartbeats_of(spec.rendezvous));
    parts.listen = [this] { return listen_as_standby(); };
    parts.say = [this](rdzv::FromAgent message) { link_->send(std::move(message)); };
    parts.go_to = [this](const std::vector<Endpoint>& controller, TimePoint by) {
        if (hello_.addresses.empty()) hello_.addresses = heir_->own_addresses();
        join(controller, by);
    };
    parts.own_endpoint = [this](std::uint16_t port) { return own_endpoint(setup_.spec.rendezvous, port); };
    parts.take_over = [this](JobState state, const std::string& why) { take_over(std::move(state), why); };
    parts.give_up = [this](const std::string& why) { give_up_without_head(why); };
    parts.refuse = [this](rdzv::AgentId agent, const Error& why) { server_->refuse_agent(agent, why); };
    heir_ = std::make_unique<Heir>(std::move(parts));
}

Result<std::uint16_t> Job::listen_as_standby() {
    if (const Status chosen = choose_store(); !chosen) return chosen.error();
    rdzv::ServerOptions options = server_options();
    options.where = {setup_.spec.rendezvous.listen_on, 0};
    if (const Status listens = listen(std::move(options)); !listens) return listens.error();
    return server_->bound().port;
}

/// True when nothing listens where the head did: its process has ended, it is not merely cut off. A host that
/// lives refuses at once.
bool Job::head_is_dead() const {
    constexpr Duration kRefusal = std::chrono::milliseconds(100);
    const Result<UniqueFd> again = connect_tcp(head_address_, MonotonicClock::now() + kRefusal);
    return !again && again.error().sys == ECONNREFUSED;
}

/// This node's workers are stopped, as survivors of any failure; when none is left the job goes on elsewhere.
/// Nothing here may wait before they are: the name server may have gone with the head.
void Job::lose_head(const Error& why) {
    const std::string lost = fmt::format("the head at {} is lost ({})", to_string(head_), why.what);
    lost_head_ = head_;
    const std::string next = heir_->is_standby()
                                 ? "as the standby it waits for the other nodes"
                                 : fmt::format("it goes to the standby, {}", heir_->successor());
    log_.warning("{}; this node's workers are stopped, then {}", lost, next);
    rdzv::StopGeneration stop;
    stop.generation = agent_->generation();
    stop.grace_ns = setup_.spec.failure_grace.count();
    stop.failed_rank = 0;
    stop.why = lost;
    agent_->handle(stop);
    inquiry_->head_lost(lost);
    // Not only by another try: a ddprun that was started again may listen there by now.
    heir_->head_lost(lost, heir_->is_standby() && (link_->was_refused() || head_is_dead()));
    if (agent_->idle()) heir_->workers_ended();
}

void Job::take_over(JobState state, const std::string& why) {
    has_succeeded_ = true;
    if (const Status run = begin_run(RequeueRun::Head::Successor); !run)
        log_.warning("{}; the job will not be put back into its queue", run.error().what);
    build_controller();
    job_log_->warning(
        "this node is the head from now on; {} here; {}",
        early_.size() == 1 ? std::string("1 node is") : fmt::format("{} nodes are", early_.size()),
        listen_for_late_comers());
    observation_->becomes_head(*controller_);
    controller_->on_event([this](const JobEvent& event) { observation_->decided(event); });
    begin_asking_nodes();
    begin_control();
    begin_herald();
    for (const auto& [agent, hello] : newest_first(std::exchange(early_, {}))) on_agent_joined(agent, hello);
    controller_->succeed(std::move(state), why);
}

/// At the port that the lost head had: nodes that do not know of this one look there, on the hosts that they
/// know of. What the operator can do for others, in words.
std::string Job::listen_for_late_comers() {
    const std::optional<Endpoint> endpoint = shared_endpoint(setup_.spec);
    if (!endpoint || setup_.meeting) return "no others can come";
    const Status listens = server_->listen_also({setup_.spec.rendezvous.listen_on, endpoint->port});
    if (!listens) return fmt::format("no others can come: {}", listens.error().what);
    const std::vector<std::string> own = heir_->own_addresses();
    return fmt::format("others can come with --rdzv-endpoint {}",
                       to_string(Endpoint{own.empty() ? host_ : own.front(), endpoint->port}));
}

void Job::begin_herald() {
    const std::optional<Endpoint> endpoint = shared_endpoint(setup_.spec);
    if (!endpoint || setup_.meeting) return;
    const rdzv::Heartbeats limits = heartbeats_of(setup_.spec.rendezvous);
    const Duration pause = std::clamp<Duration>(
        setup_.spec.rendezvous.last_call / 4, std::chrono::milliseconds(50), std::chrono::milliseconds(500));
    rdzv::DialOptions where;
    where.controllers = {*endpoint};
    where.credentials = {setup_.spec.rendezvous.run_id, token_.token};
    where.hello.role = rdzv::Role::Tool;
    where.hello.name = "head on " + host_;
    where.connecting = pause;
    where.handshake = limits.timeout;
    where.tls = tls_;
    const rdzv::JobMoved moved{host_, heir_->own_addresses(), server_->bound().port, id_};
    const auto told = [this, where = to_string(*endpoint)] {
        job_log_->info("told the ddprun that listens at {} that the job goes on here", where);
    };
    herald_ = std::make_unique<Herald>(Herald::Parts{*loop_, std::move(where), moved, pause, told});
}

/// This process was started as the head of a job that goes on under another one.
void Job::on_job_moved(const rdzv::JobMoved& moved) {
    if (moved.instance == id_)
        return loop_->post([this] { herald_.reset(); });  // this process listens there, too
    if (!controller_ || moved_ || exit_code_ || controller_->finished()) return;
    const std::string there =
        fmt::format("the job goes on under {}, which succeeded its lost head", printable(moved.host));
    const bool can_join = !is_apart() && !setup_.start && !pmix_ && !moved.addresses.empty();
    switch (meet_successor({controller_->state().generation, has_succeeded_, can_join})) {
        case Encounter::Ignore: return;
        case Encounter::Stop: return controller_->overrule(there + ": it must not run a second time here");
        case Encounter::Join: break;
    }
    job_log_->warning("{}: this node joins it there", there);
    moved_ = moved;
    controller_->hand_over({moved.host, moved.addresses, moved.port});
    server_->when_written(kFarewell / 10, [this] { loop_->stop(); });
}

std::optional<JobSetup> Job::moved_to() const {
    if (!moved_) return std::nullopt;
    JobSetup there;
    there.spec = setup_.spec;
    there.program = setup_.program;
    there.machine = setup_.machine;
    there.workers = setup_.workers;
    there.environment = setup_.environment;
    there.log_level = setup_.log_level;
    there.token = token_.token;
    there.open_files = open_files_;
    for (const std::string& address : moved_->addresses)
        there.job_at.push_back({address, static_cast<std::uint16_t>(moved_->port)});
    return there;
}

void Job::give_up_without_head(const std::string& why) {
    for (const auto& [agent, hello] : std::exchange(early_, {}))
        server_->refuse_agent(agent, {Errc::Refused, why, 0});
    failure_ = why;
    server_->when_written(kFarewell, [this] { leave(static_cast<int>(ExitCode::Unavailable)); });
}

}  // namespace ddprun
