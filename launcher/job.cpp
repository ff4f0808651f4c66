#include "launcher/job.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "env/event_loop.h"
#include "env/file.h"
#include "env/hmac.h"
#include "env/log.h"
#include "env/print.h"
#include "env/socket.h"
#include "env/system.h"
#include "env/text.h"
#include "launcher/agent.h"
#include "launcher/controller.h"
#include "launcher/descriptors.h"
#include "launcher/exit_codes.h"
#include "launcher/hang_watch.h"
#include "launcher/head.h"
#include "launcher/inquiry.h"
#include "launcher/job_cgroup.h"
#include "launcher/job_questions.h"
#include "launcher/launch.h"
#include "launcher/log_directory.h"
#include "launcher/master_port.h"
#include "launcher/nccl_ras.h"
#include "launcher/observation.h"
#include "launcher/output.h"
#include "launcher/report.h"
#include "launcher/walltime.h"
#include "launcher/walltime_watch.h"
#include "launcher/warden.h"
#include "rendezvous/agent_link.h"
#include "rendezvous/server.h"

namespace ddprun {

namespace {

/// How long the last log lines may take to reach a slow console, and the last messages to reach other nodes.
constexpr Duration kFarewell = std::chrono::seconds(10);

int terminal_width() {
    winsize size{};
    return ::ioctl(2, TIOCGWINSZ, &size) == 0 && size.ws_col > 40 ? size.ws_col : 100;
}

/// What all nodes have to agree on, as text, so that a disagreement can be shown.
std::string common_spec(const JobSpec& spec) {
    const HeartbeatSpec heartbeat = heartbeat_of(spec.rendezvous);
    return fmt::format("--nnodes={}:{} --rdzv-id={} --max-restarts={}, heartbeats every {}, lost after {}", spec.nodes.min,
                       spec.nodes.max, spec.rendezvous.run_id, spec.restart.max_restarts,
                       format_duration(heartbeat.interval), format_duration(heartbeat.timeout));
}

/// The job's secret: given by whoever starts the nodes, or made here for a job of one node.
/// Nodes started by hand without one share only the job's id.
Result<std::string> job_token(const JobSpec& spec, os::Log& log) {
    if (spec.nodes.max == 1) return random_hex(16);
    if (const std::optional<std::string> given = process_environment("DDPRUN_TOKEN"); given && !given->empty()) return *given;
    log.warning("DDPRUN_TOKEN is not set: whoever knows the job id '{}' and reaches the port can join; "
                "set it to the same secret on all nodes", spec.rendezvous.run_id);
    return to_hex(hmac_sha256("ddprun", spec.rendezvous.run_id));
}

/// Every worker needs a few descriptors here; the soft limit is often 1024. Workers get the old limit back.
struct DescriptorLimit {
    std::uint64_t before = 0;  ///< 0: not known
    std::uint64_t now = std::numeric_limits<std::uint64_t>::max();
};
DescriptorLimit raise_descriptor_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
    DescriptorLimit result{limit.rlim_cur, limit.rlim_max};
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) result.now = result.before;
    return result;
}

OwnCgroup look_for_own_cgroup() {
    constexpr std::size_t kMaxText = 4 << 20;  // hosts of many containers have thousands of mounts
    return find_own_cgroup(read_file("/proc/self/cgroup", kMaxText).value_or(""),
                           read_file("/proc/self/mountinfo", kMaxText).value_or(""));
}

/// As a scheduler ends a job: by a signal to ddprun, or to a worker.
bool was_ended_from_outside(const JobEnd& end) {
    const WorkerEnd* cause = root_cause(end.workers);
    return end.stopped_by_signal || end.preempted || (cause != nullptr && cause->signaled && (cause->status == SIGTERM || cause->status == SIGKILL));
}

class Job final : public rdzv::ServerHandler, public rdzv::AgentLinkHandler {
  public:
    explicit Job(JobSetup setup)
        : setup_(std::move(setup)), host_(host_name()), log_({host_, "agent", std::nullopt}, log_options(setup_)) {}

    Result<int> run();

  private:
    static os::LogOptions log_options(const JobSetup& setup) {
        os::LogOptions options;
        options.level = os::parse_log_level(setup.log_level.empty() ? "info" : setup.log_level).value_or(os::LogLevel::Info);
        if (setup.spec.quiet) options.level = os::LogLevel::Error;
        return options;
    }

    Status build();
    Status build_guards(const std::string& name);
    Status contend_for_head(const HeadChoice& choice);
    Status build_head(const HeadChoice& choice);
    Status build_agent(const Endpoint& controller);
    Status build_observation();
    void plan_walltime_notice(TimePoint end);
    void build_questions();
    [[nodiscard]] std::optional<Endpoint> ras_address() const;
    void on_signal(const signalfd_siginfo& info);
    void act_on(int signal, SignalAction action);
    void suspend();
    void controller_done();
    void leave(int code);
    int say_how_it_ended();

    void on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) override;
    void on_agent_message(rdzv::AgentId agent, const rdzv::Message& message) override;
    void on_agent_lost(rdzv::AgentId agent, const std::string& why) override;
    void on_log(const std::string& line) override { log_.warning("{}", line); }

    void on_connected() override {}
    void on_message(const rdzv::Message& message) override;
    void on_lost(const Error& why) override;

    JobSetup setup_;
    std::string host_;
    os::Log log_;
    std::optional<os::Log> job_log_;
    std::string token_;
    std::uint64_t open_files_ = 0;            ///< the soft limit that workers get back
    std::string marker_;
    os::LinuxSystem system_;
    std::unique_ptr<Warden> warden_;
    std::unique_ptr<JobCgroup> cgroup_;       ///< null: none can be had. Goes before the warden, which watches over it
    std::unique_ptr<os::EventLoop> loop_;
    MasterPort master_port_;
    std::unique_ptr<rdzv::Server> server_;    ///< on the head only, as the controller
    std::unique_ptr<Controller> controller_;
    std::unique_ptr<Output> output_;
    std::unique_ptr<Agent> agent_;
    std::unique_ptr<rdzv::AgentLink> link_;
    std::unique_ptr<Observation> observation_;
    std::unique_ptr<WalltimeWatch> walltime_;  ///< on the head only: one question to the scheduler, not one per node
    std::unique_ptr<Inquiry> inquiry_;
    std::unique_ptr<JobQuestions> questions_;
    std::unique_ptr<HangWatch> hang_watch_;   ///< on the head, with --hang-timeout
    std::optional<int> exit_code_;            ///< said by the controller, on a node that is not the head
    std::string failure_;
    TimePoint farewell_ = kNever;             ///< until when other nodes may take our last message
};

Status Job::build() {
    const DescriptorLimit limit = raise_descriptor_limit();
    open_files_ = limit.before;
    const Status room = check_descriptor_limit(setup_.spec.output, setup_.workers,
                                               static_cast<int>(open_descriptors().size()), limit.now);
    if (!room) return room;
    if (const Status status = os::become_subreaper(); !status) return status;
    const Result<std::string> id = random_hex(8);
    if (!id) return id.error();
    marker_ = "DDPRUN_JOB=" + *id;
    if (const Status guarded = build_guards("ddprun-" + *id); !guarded) return guarded;

    Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create(handled_signals());
    if (!loop) return loop.error();
    loop_ = std::move(*loop);
    loop_->on_signal([this](const signalfd_siginfo& info) { on_signal(info); });

    Result<std::string> token = job_token(setup_.spec, log_);
    if (!token) return token.error();
    token_ = std::move(*token);
    const Result<HeadChoice> choice = choose_head(setup_.spec, look_at_host(shared_endpoint(setup_.spec)));
    if (!choice) return choice.error();
    if (!choice->is_head) {
        log_.info("the controller is at {} ({})", to_string(choice->endpoint), choice->why);
        return build_agent(choice->endpoint);
    }
    const Status head = contend_for_head(*choice);
    if (!head && choice->contested && head.error().sys == EADDRINUSE) {
        const Endpoint endpoint = *shared_endpoint(setup_.spec);
        log_.info("port {} is taken on this host: joining the controller there", endpoint.port);
        return build_agent(endpoint);
    }
    if (!head) return head;
    return build_agent({"127.0.0.1", server_->bound().port});
}

/// Two that begin to listen at the same moment are both refused by the kernel, and nobody listens: whoever finds nobody
/// there tries again, after a while of its own.
Status Job::contend_for_head(const HeadChoice& choice) {
    constexpr int kTries = 20;
    for (int attempt = 1;; ++attempt) {
        const Status head = build_head(choice);
        if (head || !choice.contested || head.error().sys != EADDRINUSE || attempt == kTries) return head;
        if (connect_tcp(*shared_endpoint(setup_.spec), MonotonicClock::now() + std::chrono::seconds(1))) return head;
        std::this_thread::sleep_for(std::chrono::milliseconds(1 + (::getpid() + attempt) % 16));
    }
}

/// The warden first: it removes the cgroup if we are killed after we have made it.
Status Job::build_guards(const std::string& name) {
    OwnCgroup own;
    if (setup_.spec.use_cgroup) own = look_for_own_cgroup();
    else own.why = "--cgroup none";
    const std::string directory = own.directory.empty() ? "" : own.directory + "/" + name;
    Result<std::unique_ptr<Warden>> warden = Warden::start(marker_, directory, setup_.workers);
    if (!warden) return warden.error();
    warden_ = std::move(*warden);

    if (!directory.empty()) {
        Result<std::unique_ptr<JobCgroup>> cgroup = JobCgroup::create(directory);
        if (cgroup) cgroup_ = std::move(*cgroup);
        else own.why = cgroup.error().what;
    }
    if (cgroup_) log_.debug("the workers live in the cgroup {}", directory);
    else log_.debug("the workers live in our own cgroup: {}", own.why);
    return {};
}

Status Job::build_head(const HeadChoice& choice) {
    const JobSpec& spec = setup_.spec;
    if (spec.rendezvous.master_port && !shared_endpoint(spec)) {
        if (const Status free = MasterPort::check(*spec.rendezvous.master_port); !free) return free;
    }
    rdzv::ServerOptions options;
    options.credentials = {spec.rendezvous.run_id, token_};
    options.where = choice.endpoint;
    options.heartbeat_interval = heartbeat_of(spec.rendezvous).interval;
    options.heartbeat_timeout = heartbeat_of(spec.rendezvous).timeout;
    Result<std::unique_ptr<rdzv::Server>> server = rdzv::Server::create(*loop_, std::move(options), *this);
    if (!server) return server.error();
    server_ = std::move(*server);

    job_log_ = log_.with_component("job");
    if (spec.nodes.max > 1) {
        job_log_->info("controller on port {} ({}), waiting for {} nodes", server_->bound().port, choice.why, spec.nodes.min);
    }
    ControllerConfig config;
    config.spec = spec;
    config.program = setup_.program.name;
    config.random = static_cast<double>(::getpid() % 1000) / 1000;
    config.agreed = common_spec(spec);
    config.master = [this](const rdzv::AgentHello& first) -> Result<MasterAddress> {
        const RendezvousSpec& rendezvous = setup_.spec.rendezvous;
        const bool is_here = first.host == host_ && first.pid == ::getpid();
        const std::string host = master_host(setup_.spec, is_here, first.addresses);
        // With several nodes a given --master-port is where the controller itself listens.
        if (rendezvous.master_port && !shared_endpoint(setup_.spec)) return MasterAddress{host, *rendezvous.master_port};
        const Result<int> port = master_port_.reserve();
        if (!port) return port.error();
        return MasterAddress{host, *port};
    };
    controller_ = std::make_unique<Controller>(
        *loop_, *job_log_, std::move(config),
        [this](rdzv::AgentId agent, const rdzv::Message& message) { server_->send(agent, message); },
        [this] { controller_done(); });
    controller_->on_generation([this](std::uint64_t generation) { server_->begin_generation(generation); });
    return {};
}

Status Job::build_agent(const Endpoint& controller) {
    const JobSpec& spec = setup_.spec;
    output_ = std::make_unique<Output>(*loop_, prepare_log_directory(spec, log_), 1, 2);

    AgentConfig config;
    config.spec = spec;
    config.program = setup_.program;
    config.machine = setup_.machine;
    config.host = host_;
    config.store = "tcp:" + to_string(controller);
    config.token = token_;
    config.job_marker = marker_;
    config.environment = std::move(setup_.environment);
    config.open_files = open_files_;
    config.cgroup = cgroup_.get();
    agent_ = std::make_unique<Agent>(*loop_, system_, *output_, warden_.get(), log_, std::move(config),
                                     [this](const rdzv::Message& message) {
                                         observation_->agent_says(message);
                                         link_->send(message);
                                     });

    rdzv::AgentHello hello;
    hello.host = host_;
    hello.node_rank = spec.rendezvous.node_rank;
    // The port that workers get as MASTER_PORT is held here: rank 0 has to be here too, whoever joins first.
    if (!hello.node_rank && controller_) hello.node_rank = 0;
    if (spec.rendezvous.local_addr) hello.addresses = {*spec.rendezvous.local_addr};
    hello.slots = setup_.workers;
    hello.pid = ::getpid();
    hello.version = DDPRUN_VERSION;
    hello.spec_hash = common_spec(spec);
    hello.role = spec.role;
    rdzv::AgentLinkOptions options;
    options.controller = controller;
    options.credentials = {spec.rendezvous.run_id, token_};
    options.name = "agent on " + host_;
    options.hello = std::move(hello);
    options.heartbeat_interval = heartbeat_of(spec.rendezvous).interval;
    options.heartbeat_timeout = heartbeat_of(spec.rendezvous).timeout;
    options.connect_by = deadline_after(MonotonicClock::now(), spec.rendezvous.join_timeout);
    link_ = std::make_unique<rdzv::AgentLink>(*loop_, std::move(options), *this);
    return build_observation();
}

Status Job::build_observation() {
    Observation::Parts parts{*loop_, log_, setup_.spec, *agent_, *output_, controller_.get(), marker_.substr(marker_.find('=') + 1),
                             setup_.program.name, host_};
    observation_ = std::make_unique<Observation>(std::move(parts));
    if (controller_) controller_->on_event([this](const JobEvent& event) { observation_->decided(event); });
    if (const Status open = observation_->open(); !open) return open;
    build_questions();
    return {};
}

/// As NCCL in the workers reads its variables: any of its processes tells of the whole job.
std::optional<Endpoint> Job::ras_address() const {
    return ras_endpoint(agent_->variable(0, "NCCL_RAS_ENABLE"), agent_->variable(0, "NCCL_RAS_ADDR"));
}

/// What a running job can be asked, and what the job itself asks of its nodes.
void Job::build_questions() {
    Inquiry::Parts parts{*loop_, [this](const rdzv::Message& message) { return link_->send(message); }, nullptr, nullptr};
    if (controller_) {
        parts.to_agent = [this](std::uint64_t agent, const rdzv::Message& message) { return server_->send(agent, message); };
        parts.world = [this] { return controller_->world(); };
    }
    inquiry_ = std::make_unique<Inquiry>(std::move(parts));
    answer_hang_looks(*inquiry_, *agent_, host_);
    questions_ = std::make_unique<JobQuestions>(JobQuestions::Parts{
        *loop_, system_, setup_.spec, *agent_, *observation_, *inquiry_, host_,
        [this](const std::string& why) { controller_->preempt(SIGTERM, why); }, [this](int signal) { controller_->forward(signal); }});
    if (controller_ && setup_.spec.hang_timeout > Duration::zero()) {
        hang_watch_ = std::make_unique<HangWatch>(*loop_, *job_log_, *controller_, *inquiry_, setup_.spec.hang_timeout, [this] { return ras_address(); },
                                                  [this](const HangVerdict& verdict) { controller_->hang_found(verdict.what, verdict.culprit); });
    }
}

Result<int> Job::run() {
    if (const Status built = build(); !built) return built.error();
    if (controller_) {
        walltime_ = std::make_unique<WalltimeWatch>(*loop_, system_, log_);
        walltime_->begin([this](TimePoint end) { plan_walltime_notice(end); });
        controller_->begin();
    }
    if (const Status ran = loop_->run(); !ran) return ran.error();
    return say_how_it_ended();
}

void Job::plan_walltime_notice(TimePoint end) {
    const Duration notice = setup_.spec.walltime_notice;
    if (notice == Duration::zero()) return;
    loop_->call_at(end - notice, [this, end] {
        if (controller_->finished()) return;
        const Duration left = std::max(Duration::zero(), end - MonotonicClock::now());
        controller_->preempt(SIGTERM, fmt::format("walltime in {}", format_duration(std::chrono::round<std::chrono::seconds>(left))));
    });
}

// ---- signals

void Job::on_signal(const signalfd_siginfo& info) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) return agent_->on_child_exits();
    const auto found = setup_.spec.signals.find(signal);
    const SignalAction action = found == setup_.spec.signals.end() ? SignalAction::Ignore : found->second;
    if (action != SignalAction::Ignore) observation_->signalled(signal, action);
    act_on(signal, action);
}

void Job::act_on(int signal, SignalAction action) {
    switch (action) {
        case SignalAction::Ignore: return;
        case SignalAction::Forward:
            if (controller_) controller_->forward(signal);
            else agent_->forward_signal(signal);
            if (signal == SIGTSTP) suspend();
            return;
        case SignalAction::Stop:
            if (controller_) return controller_->stop(signal);
            if (!link_->is_connected()) return leave(static_cast<int>(ExitCode::TryAgain));
            link_->send(rdzv::Notice{"stop", std::to_string(signal)});
            return;
        case SignalAction::Preempt:
            if (controller_) return controller_->preempt(signal, signal_name(signal));
            link_->send(rdzv::Notice{"preempt", std::to_string(signal)});
            return;
    }
}

/// Ctrl-Z: the workers have been stopped; now ourselves, as a shell expects. Its `fg` sends SIGCONT.
void Job::suspend() {
    agent_->forward_signal(SIGTSTP);
    ::kill(::getpid(), SIGSTOP);
}

// ---- what peers say

void Job::on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) {
    if (const Status joined = controller_->agent_joined(agent, hello); !joined) server_->refuse_agent(agent, joined.error());
}

void Job::on_agent_lost(rdzv::AgentId agent, const std::string& why) {
    inquiry_->agent_lost(agent);
    controller_->agent_lost(agent, why);
}

void Job::on_agent_message(rdzv::AgentId agent, const rdzv::Message& message) {
    if (const auto* question = std::get_if<rdzv::Question>(&message)) return inquiry_->from_agent(agent, *question);
    if (const auto* answer = std::get_if<rdzv::Answer>(&message)) return inquiry_->from_agent(agent, *answer);
    observation_->node_says(message, controller_->host_of(agent));
    controller_->agent_message(agent, message);
}

void Job::on_message(const rdzv::Message& message) {
    if (const auto* start = std::get_if<rdzv::StartGeneration>(&message)) {
        log_.set_generation(start->generation);
        observation_->generation_started(*start);
        agent_->handle(*start);
    } else if (const auto* stop = std::get_if<rdzv::StopGeneration>(&message)) {
        agent_->handle(*stop);
    } else if (const auto* notice = std::get_if<rdzv::Notice>(&message)) {
        agent_->handle(*notice);
    } else if (const auto* question = std::get_if<rdzv::Question>(&message)) {
        inquiry_->from_controller(*question);
    } else if (const auto* answer = std::get_if<rdzv::Answer>(&message)) {
        inquiry_->from_controller(*answer);
    } else if (const auto* shutdown = std::get_if<rdzv::Shutdown>(&message)) {
        if (controller_) return;
        failure_ = shutdown->why;
        leave(shutdown->exit_code);
    }
}

void Job::on_lost(const Error& why) {
    if (exit_code_ || (controller_ && controller_->finished())) return;
    failure_ = "the controller: " + why.what;
    log_.error("{}; killing the workers of this node", failure_);
    agent_->kill_all();
    leave(static_cast<int>(ExitCode::Unavailable));
}

// ---- the end

void Job::controller_done() {
    // Agents elsewhere still have to hear it; ours is idle.
    if (farewell_ == kNever) {
        farewell_ = deadline_after(MonotonicClock::now(), kFarewell);
        return loop_->post([this] { controller_done(); });  // behind the writing of what was said just now
    }
    if (server_->queued_bytes() == 0 || MonotonicClock::now() > farewell_) return loop_->stop();
    loop_->call_after(std::chrono::milliseconds(1), [this] { controller_done(); });
}

/// Ends this node's part; workers that still run are waited for.
void Job::leave(int code) {
    exit_code_ = code;
    if (agent_->idle()) return loop_->stop();
    agent_->kill_all();
    loop_->call_after(std::chrono::milliseconds(5), [this, code] { leave(code); });
}

int Job::say_how_it_ended() {
    output_->flush(deadline_after(MonotonicClock::now(), kFarewell));
    if (!controller_) {
        if (!failure_.empty()) log_.error("{}", failure_);
        const int code = exit_code_.value_or(static_cast<int>(ExitCode::Internal));
        observation_->finished(code, failure_);
        return code;
    }
    JobEnd end = controller_->end();
    observation_->finished(end);
    end.loss = output_->loss();
    end.log_directory = output_->attempt_directory();
    if (const std::optional<TimePoint> over = walltime_->end(); over && was_ended_from_outside(end)) {
        if (std::string note = walltime_note(*over - MonotonicClock::now()); !note.empty()) end.notes.push_back(std::move(note));
    }
    if (!setup_.spec.report_file.empty()) {
        const Status written = write_file_atomically(setup_.spec.report_file, render_report_json(end), 0644);
        if (!written) log_.warning("--report: {}", written.error().what);
    }
    ddprun::print(stderr, "{}", render_report(end, terminal_width()));
    return exit_code(end);
}

}  // namespace

Result<int> run_job(JobSetup setup) { return Job(std::move(setup)).run(); }

}  // namespace ddprun
