#include "launcher/job/head.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "env/io/file.h"
#include "env/nodes/batch_job.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/ends/error_file.h"
#include "launcher/ends/explain.h"
#include "launcher/ends/walltime.h"
#include "launcher/hang/nccl_ras.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/start/start_plan.h"
#include "rendezvous/client/dial.h"
#include "rendezvous/client/link_state.h"

namespace ddprun {
namespace {

/// The walltime notice with --requeue and without --walltime-notice: time for a checkpoint and the scheduler.
constexpr Duration kRequeueNotice = std::chrono::minutes(2);
/// At most this many of the hosts that cannot take part are named.
constexpr std::size_t kNamedHosts = 8;

/// The least pause after a refusal: another job's head has this endpoint now and logs each of our dials.
constexpr Duration kPauseAfterRefusal = std::chrono::minutes(1);

/// Columns of the terminal on stderr; nullopt: stderr is no terminal, or its width is not known.
std::optional<int> terminal_width() {
    winsize size{};
    if (::ioctl(2, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
    return size.ws_col;
}

/// True when the job was ended the way a scheduler does it: by a signal to ddprun or to a worker.
bool was_ended_from_outside(const JobEnd& end) {
    const WorkerEnd* cause = root_cause(end);
    return end.stopped_by_signal || end.preempted ||
           (cause != nullptr && cause->signaled && (cause->status == SIGTERM || cause->status == SIGKILL));
}

}  // namespace

/// On a head that was the standby: dials the lost head's endpoint. A process that listens there and proves
/// that it knows the job's token is told that the job goes on here (rdzv::JobMoved); else a restarted ddprun
/// of the lost head would run the job a second time. Dials again and again for as long as this object lives,
/// on the event loop's thread; never blocks.
class MovedNotifier final : private rdzv::ConnectionOwner {
  public:
    struct Parts {
        os::EventLoop& loop;
        rdzv::DialOptions where;
        rdzv::JobMoved moved;
        Duration pause;              ///< between two dials; shorter than a head's last call for nodes
        std::function<void()> told;  ///< called when a process was told and none was at the dial before
    };
    explicit MovedNotifier(Parts parts);
    ~MovedNotifier() override;
    MovedNotifier(const MovedNotifier&) = delete;
    MovedNotifier& operator=(const MovedNotifier&) = delete;

  private:
    void dial();
    void tell(rdzv::Dialled dialled);
    void on_frame(rdzv::Connection&, rdzv::Frame) override {}  // the peer does not know JobMoved
    void on_closed(rdzv::Connection&, const Error&) override {}

    Parts parts_;
    std::unique_ptr<rdzv::Dial> dial_;
    std::unique_ptr<rdzv::Connection> connection_;  ///< to the process told last; closed at the next dial
    os::EventLoop::TimerId timer_ = 0;
    bool has_told_ = false;  ///< at the last dial
};

MovedNotifier::MovedNotifier(Parts parts) : parts_(std::move(parts)) { dial(); }

MovedNotifier::~MovedNotifier() { parts_.loop.cancel(timer_); }

void MovedNotifier::dial() {
    connection_.reset();
    dial_ = std::make_unique<rdzv::Dial>(parts_.loop, parts_.where, [this](Result<rdzv::Dialled> outcome) {
        const bool is_refused = !outcome && !rdzv::is_worth_coming_again(outcome.error());
        const bool is_there = outcome.has_value();
        if (is_there) tell(*std::move(outcome));
        if (is_there && !has_told_) parts_.told();
        has_told_ = is_there;
        timer_ = parts_.loop.call_after(
            is_refused ? std::max(parts_.pause, kPauseAfterRefusal) : parts_.pause, [this] { dial(); });
    });
}

void MovedNotifier::tell(rdzv::Dialled dialled) {
    connection_ = std::move(dialled.connection);
    connection_->hand_to(*this);
    connection_->send(encode_message(parts_.moved));
}

Head::~Head() = default;

Head::Head(NodeParts& node, JobServer& from, const std::string& why, std::optional<RequeueRun> run,
           std::optional<Inheritance> inherited)
    : node_(node),
      spec_(node.setup.spec),
      log_(node.log.with_component("job")),
      server_(std::move(from.server)),
      serves_torch_(from.serves_torch),
      has_succeeded_(inherited.has_value()),
      controller_(
          *node.loop, log_, spec_, controller_config(),
          [this](rdzv::AgentId agent, const rdzv::ToAgent& message) { send(agent, message); },
          // Other nodes' agents still have to get the end; then their last lines come. Our agent is idle.
          [this] { when_written(kFarewell, [this] { stop(kFarewell); }); }),
      survey_({*node.loop, *node.inquiry,
               [this](rdzv::AgentId agent, rdzv::ToAgent message) {
                   return server_->send(agent, std::move(message));
               },
               [this] { return controller_.world(); }}),
      questions_({spec_, *node.observation, *node.inquiry, survey_, controller_}),
      walltime_(*node.loop, node.system, node.log),
      run_(std::move(run)) {
    controller_.on_generation([this](std::uint64_t generation) { begin_generation(generation); });
    controller_.on_event([this](const JobEvent& event) { node_.observation->decided(event); });
    controller_.on_recovered(
        [this](const job_action::Recovered& recovery) { node_.observation->recovered(recovery); });
    server_->hand_to(*this);
    node_.output->on_shown(
        [this](rdzv::AgentId agent, std::uint64_t bytes) { server_->send(agent, rdzv::OutputShown{bytes}); });
    if (inherited) {
        log_.warning("this node is the head from now on; {} here; {}",
                     inherited->nodes.size() == 1 ? std::string("1 node is")
                                                  : fmt::format("{} nodes are", inherited->nodes.size()),
                     listen_for_late_comers(inherited->addresses));
    } else if (spec_.nodes.max > 1) {
        // All hosts that this ddprun starts have to join, also where the job may go on with fewer.
        const int awaited = node_.setup.start ? spec_.nodes.max : spec_.nodes.min;
        log_.info("controller on port {}{} ({}), waiting for {} node{}", server_->bound().port,
                  spec_.rendezvous.tls ? " with TLS" : "", why, awaited, awaited == 1 ? "" : "s");
    }
    if (spec_.hang_timeout != Duration::zero() || spec_.recover.mode == RecoverSpec::Mode::Auto)
        watch_for_hangs();
    if (!spec_.tensorboard.empty()) write_curves();
    const bool wants_time = run_ && spec_.walltime_notice == Duration::zero();
    walltime_.begin(
        wants_time ? kRequeueNotice : spec_.walltime_notice,
        [this](TimePoint time_up) { controller_.walltime_known(time_up); },
        [this](std::chrono::seconds left) {
            if (finished()) return;
            controller_.preempt(SIGTERM, fmt::format("walltime in {}", format_duration(left)), left);
        });
    if (!inherited) {
        controller_.begin();
        return;
    }
    tell_lost_head(std::move(inherited->addresses));
    for (const auto& [agent, error] : controller_.succeed(std::move(inherited->state), inherited->nodes, why))
        refuse(agent, error);
}

ControllerConfig Head::controller_config() {
    ControllerConfig config;
    config.program = node_.setup.program.name;
    config.command = node_.hello.command;
    config.succession = {.can_be_succeeded = spec_.nodes.max > 1 && !node_.setup.start && !spec_.outer_rank,
                         .is_successor = has_succeeded_,
                         .nobody_can_come = node_.setup.start.has_value(),
                         .spec = spec_};
    config.random = static_cast<double>(::getpid() % 1000) / 1000;
    config.own_host = node_.host;
    if (!has_succeeded_)  // a successor's loop runs, so it must not wait for the name server
        config.hosts =
            hosts_by_rank(spec_, node_.setup.start ? &node_.setup.start->hosts : nullptr, node_.host);
    if (!is_apart()) config.own_instance = node_.hello.instance;
    config.terms = node_.hello.terms;
    if (!is_apart() || spec_.fabric)
        config.fabric = describe_fabric(node_.setup.machine.fabric, process_environment);
    config.in_batch_job = find_batch_job(process_environment).has_value();
    config.master = [this](const rdzv::AgentHello& first) { return master_for(first); };
    return config;
}

Result<MasterAddress> Head::master_for(const rdzv::AgentHello& first) {
    const bool is_here = first.instance == node_.hello.instance && !has_succeeded_;
    MasterChoice master = choose_master(spec_, serves_torch_, server_->bound().port,
                                        node_.setup.meeting.has_value(), is_here, first.addresses);
    if (serves_torch_ && has_succeeded_) master.host = node_.hello.addresses.front();
    if (master.port != 0) return MasterAddress{master.host, master.port, serves_torch_};
    const Result<int> port = master_port_.reserve();
    if (!port) return port.error();
    return MasterAddress{master.host, *port};
}

/// Without --hang-timeout only jobs whose hanging rank is replaced are watched.
void Head::watch_for_hangs() {
    const bool is_asked = spec_.hang_timeout != Duration::zero();
    hang_watch_ = std::make_unique<HangWatch>(
        *node_.loop, log_, controller_, survey_, is_asked ? spec_.hang_timeout : spec_.recover.within,
        is_asked ? HangWatch::Which::AllJobs : HangWatch::Which::Recoverable,
        // NCCL's variables as the first worker of this node has them: any worker can answer for the job.
        [this] {
            return ras_endpoint(node_.agent->variable(0, "NCCL_RAS_ENABLE"),
                                node_.agent->variable(0, "NCCL_RAS_ADDR"));
        },
        [this, is_asked](const HangVerdict& verdict) {
            controller_.hang_found(verdict.what, verdict.culprit, is_asked);
        });
}

void Head::write_curves() {
    const std::string& run_id = spec_.rendezvous.run_id;
    const std::optional<BatchJob> batch_job = find_batch_job(process_environment);
    const std::string run = run_id != "none" ? run_id : batch_job ? batch_job->id : node_.guards.id;
    curves_ =
        std::make_unique<JobCurves>(*node_.loop, *node_.inquiry, curve_directory(spec_.tensorboard, run),
                                    [this](std::string_view why) { log_.warning("{}", why); });
}

Status Head::start_others() {
    if (!node_.setup.start) return {};
    HostStart& start = *node_.setup.start;
    RemoteAgents::Parts parts{*node_.loop, node_.system, nullptr, nullptr, nullptr};
    parts.relay = [this](UniqueFd pipe, Output::Stream stream, auto seen, auto ended) {
        return node_.output->relay(std::move(pipe), stream, std::move(seen), std::move(ended));
    };
    parts.failure_of = [this](int node) {
        const rdzv::StoreReply reply = server_->ask_store(rdzv::store_op::TryGet{failure_key(node)});
        const auto* value = std::get_if<rdzv::Value>(&reply);
        return value != nullptr ? printable(value->value.view()) : std::string();
    };
    parts.on_failure = [this, &start](const std::vector<StartFailure>& failures) {
        if (finished()) return;
        std::vector<std::string> names;
        for (const StartFailure& one : failures) {
            names.push_back(start.hosts[static_cast<std::size_t>(one.node)].name);
            log_.error("{} cannot take part: {}", names.back(), one.why);
        }
        controller_.start_failed(fmt::format("{} of {} hosts cannot take part: {}", names.size(),
                                             start.hosts.size(), join_first(names, kNamedHosts)));
    };
    Result<std::string> order = seal_order(start.order, node_.token.token);
    if (!order) return order.error();
    (void)server_->ask_store(rdzv::store_op::Set{std::string(kOrderKey), rdzv::Blob(*std::move(order))});
    start.call.endpoints =
        endpoints_of_head(start.order.head, spec_.rendezvous.listen_on, server_->bound().port);
    Result<std::unique_ptr<RemoteAgents>> others =
        start_hosts(std::move(parts), start, node_.token.token, spec_.start.timeout);
    if (!others) return others.error();
    others_ = *std::move(others);
    return {};
}

// ---- messages from and to nodes

void Head::on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) {
    if (moved_)
        return static_cast<void>(
            server_->send(agent, rdzv::Successor{moved_->host, moved_->addresses, moved_->port}));
    if (const Status joined = controller_.agent_joined(agent, hello); !joined)
        return refuse(agent, joined.error());
    if (others_ && hello.node_rank) others_->joined(*hello.node_rank);
    const bool sends_output = node_.setup.start && node_.setup.start->order.sends_output;
    if (sends_output && hello.instance != node_.hello.instance) senders_.insert(agent);
}

void Head::refuse(rdzv::AgentId agent, const Error& why) {
    const bool is_news = !finished();
    for (const std::string_view line : split(why.what, '\n')) {
        if (is_news) log_.warning("{}", line);
    }
    server_->refuse_agent(agent, why);
}

void Head::on_agent_lost(rdzv::AgentId agent, const Error& why) {
    survey_.agent_lost(agent);
    send(exchange_.node_lost(agent));
    // No process closed the connection: ssh, or what else started the agent, does not see the loss either.
    const bool is_silent = why.code == Errc::Timeout || why.sys == ETIMEDOUT || why.sys == EHOSTUNREACH;
    if (const std::optional<int> node = controller_.node_rank_of(agent); others_ && is_silent && node)
        others_->fell_silent(*node);
    controller_.agent_lost(agent, why);
    node_.output->end_sent(agent);
    if (senders_.erase(agent) > 0 && senders_.empty() && waits_for_senders_) node_.loop->stop();
}

void Head::on_agent_message(rdzv::AgentId agent, const rdzv::FromAgent& message) {
    std::visit([&](const auto& one) { hear(agent, one); }, message);
}

void Head::hear(rdzv::AgentId agent, const rdzv::WorkerExited& exited) {
    node_.observation->node_says(exited, controller_.host_of(agent));
    send(exchange_.rank_ended(exited.generation, exited.rank));
    controller_.agent_message(agent, exited);
}

void Head::hear(rdzv::AgentId agent, const rdzv::GenerationEnded& ended) {
    node_.observation->node_says(ended, controller_.host_of(agent));
    controller_.agent_message(agent, ended);
}

void Head::send(rdzv::AgentId agent, const rdzv::ToAgent& message) {
    // A head on a host of its own has no agent that would get this message.
    const auto* start = std::get_if<rdzv::StartGeneration>(&message);
    if (is_apart() && start != nullptr && start->group_rank == 0) {
        node_.log.set_generation(start->generation);
        node_.observation->generation_started(*start);
    }
    server_->send(agent, message);
}

void Head::begin_generation(std::uint64_t generation) {
    server_->begin_generation(generation);
    if (!node_.pmix) return;
    std::vector<PmixExchange::Node> nodes;
    for (WorldNode& node : controller_.world())
        nodes.push_back({node.agent, std::move(node.host), node.first_rank, node.workers});
    send(exchange_.begin(node_.guards.id, generation, std::move(nodes)));
}

// ---- one head after the other

/// Also listens on the lost head's port, so that late nodes find this head. Returns how others can join.
std::string Head::listen_for_late_comers(const std::vector<std::string>& own_addresses) {
    const std::optional<Endpoint> endpoint = shared_endpoint(spec_);
    if (!endpoint || node_.setup.meeting) return "no others can come";
    const Status listens = server_->listen_also({spec_.rendezvous.listen_on, endpoint->port});
    if (!listens) return fmt::format("no others can come: {}", listens.error().what);
    return fmt::format(
        "others can come with --rdzv-endpoint {}",
        to_string(Endpoint{own_addresses.empty() ? node_.host : own_addresses.front(), endpoint->port}));
}

void Head::tell_lost_head(std::vector<std::string> own_addresses) {
    const std::optional<Endpoint> endpoint = shared_endpoint(spec_);
    if (!endpoint || node_.setup.meeting) return;
    const Duration pause = std::clamp<Duration>(spec_.rendezvous.last_call / 4, std::chrono::milliseconds(50),
                                                std::chrono::milliseconds(500));
    rdzv::DialOptions where;
    where.controllers = {*endpoint};
    where.credentials = {spec_.rendezvous.run_id, node_.token.token};
    where.hello.role = rdzv::Role::Tool;
    where.hello.name = "head on " + node_.host;
    where.connecting = pause;
    where.handshake = heartbeats_of(spec_.rendezvous).timeout;
    where.tls = node_.tls;
    const rdzv::JobMoved here{node_.host, std::move(own_addresses), server_->bound().port, node_.guards.id};
    const auto told = [this, there = to_string(*endpoint)] {
        log_.info("told the ddprun that listens at {} that the job goes on here", there);
    };
    notifier_ = std::make_unique<MovedNotifier>(
        MovedNotifier::Parts{*node_.loop, std::move(where), here, pause, told});
}

/// This process was started as the head of a job that goes on under another head.
void Head::on_job_moved(const rdzv::JobMoved& moved) {
    if (moved.instance == node_.guards.id)
        return node_.loop->post([this] { notifier_.reset(); });  // this process listens there, too
    if (moved_ || finished()) return;
    const bool can_join = !is_apart() && !node_.setup.start && !node_.pmix && !moved.addresses.empty();
    if (!controller_.meet_successor({moved.host, moved.addresses, moved.port}, can_join)) return;
    moved_ = moved;
    when_written(kFarewell / 10, [this] { node_.loop->stop(); });
}

// ---- the end

/// PBS may end what started the agents before their last lines have come. An agent that sends its output
/// leaves when all of it has been shown.
void Head::stop(Duration timeout) {
    if (!others_) return node_.loop->stop();
    others_->finish(timeout, [this] {
        if (senders_.empty()) return node_.loop->stop();
        waits_for_senders_ = true;
        node_.loop->call_after(kFarewell / 2, [this] { node_.loop->stop(); });
    });
}

int Head::report_end() {
    JobEnd end = controller_.end();
    node_.observation->finished(end);
    end.loss = node_.output->loss();
    end.log_directory = node_.output->attempt_directory();
    if (std::string note = note_of_walltime(end); !note.empty()) end.notes.push_back(std::move(note));
    const std::optional<BatchJob> batch = find_batch_job(process_environment);
    if (batch && batch->scheduler == Scheduler::Pbs) {
        if (std::string note = note_of_returned_host(end); !note.empty())
            end.notes.push_back(std::move(note));
    }
    if (const WorkerEnd* cause = root_cause(end)) {
        std::string note = explain_python(*cause, node_.setup.program.name, node_.setup.program.how);
        if (!note.empty()) end.notes.push_back(std::move(note));
    }
    if (!spec_.report_file.empty()) {
        const Status written = write_file_atomically(spec_.report_file, render_report_json(end), 0644);
        if (!written) node_.log.warning("--report: {}", written.error().what);
    }
    const int code = exit_code(end);
    if (code != 0) {
        const WorkerEnd* cause = root_cause(end.workers);
        const bool is_here = cause != nullptr && cause->host == node_.host;
        tell_launcher_above(
            node_.log,
            {.report = is_here ? node_.agent->error_report(cause->rank) : "", .message = headline(end)},
            cause, code);
    }
    node_.output->say_last(render_report(end, terminal_width()));
    end_ = std::move(end);
    return code;
}

/// The report's note when the walltime has ended the job; "" otherwise.
std::string Head::note_of_walltime(const JobEnd& end) const {
    const std::optional<TimePoint> over = walltime_.end();
    return over && was_ended_from_outside(end) ? walltime_note(*over - MonotonicClock::now()) : "";
}

void Head::put_back() {
    if (!run_ || !end_) return;
    run_->finish(*end_, !note_of_walltime(*end_).empty(),
                 [](const std::string& line) { ddprun::print(stderr, "ddprun: {}\n", printable(line)); });
}

}  // namespace ddprun
