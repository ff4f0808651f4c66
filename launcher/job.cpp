#include "launcher/job.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/line_budget.h"
#include "env/nodes/batch_job.h"
#include "env/nodes/exchange.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/ask/hang_watch.h"
#include "launcher/ask/inquiry.h"
#include "launcher/ask/job_questions.h"
#include "launcher/ask/observation.h"
#include "launcher/batch/requeue_run.h"
#include "launcher/exit_codes.h"
#include "launcher/guard/descriptors.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/guard/job_directory.h"
#include "launcher/guard/warden.h"
#include "launcher/hang/nccl_ras.h"
#include "launcher/output/log_files.h"
#include "launcher/output/output.h"
#include "launcher/plan/seating.h"
#include "launcher/pmix/exchange.h"
#include "launcher/pmix/server.h"
#include "launcher/pmix/wish.h"
#include "launcher/report/error_file.h"
#include "launcher/report/report.h"
#include "launcher/report/walltime.h"
#include "launcher/report/walltime_watch.h"
#include "launcher/signals.h"
#include "launcher/start/host_starter.h"
#include "launcher/start/start_facts.h"
#include "launcher/supervise/agent.h"
#include "launcher/supervise/controller.h"
#include "launcher/supervise/head.h"
#include "launcher/supervise/heir.h"
#include "launcher/supervise/job_token.h"
#include "rendezvous/agent/agent_link.h"
#include "rendezvous/server.h"

namespace ddprun {

namespace {

/// How long the last messages may take to reach other nodes.
constexpr Duration kFarewell = std::chrono::seconds(10);
/// How long other nodes may keep us from being suspended.
constexpr Duration kSuspension = std::chrono::seconds(1);
/// With --requeue, where no --walltime-notice is given: for a checkpoint, and for the scheduler's answer.
constexpr Duration kRequeueNotice = std::chrono::minutes(2);
/// How often signals are looked at while nobody reads the last lines.
constexpr Duration kFlushLook = std::chrono::milliseconds(100);

int terminal_width() {
    winsize size{};
    return ::ioctl(2, TIOCGWINSZ, &size) == 0 && size.ws_col > 40 ? size.ws_col : 100;
}

/// What all nodes have to agree on. Programs are compared by their names: they may lie elsewhere on each node; and per role.
rdzv::Terms terms_of(const JobSetup& setup, bool has_pmix) {
    const JobSpec& spec = setup.spec;
    const rdzv::Heartbeats heartbeat = heartbeats_of(spec.rendezvous);
    rdzv::Terms terms{fmt::format("ddprun={}", DDPRUN_VERSION),
                      fmt::format("--nnodes={}:{}", spec.nodes.min, spec.nodes.max),
                      fmt::format("--max-restarts={}", spec.restart.max_restarts),
                      fmt::format("heartbeats=every {}", format_duration(heartbeat.interval)),
                      fmt::format("lost after={}", format_duration(heartbeat.timeout)),
                      fmt::format("--pmix={}", has_pmix ? "on" : "off"),
                      fmt::format("program of role {}={}", spec.role, std::filesystem::path(setup.program.name).filename().string())};
    if (spec.fabric) terms.push_back(fmt::format("--fabric={}", name_of(*spec.fabric)));
    return terms;
}

/// By node rank, for the names of those who are missing: whom we start, or the allocation where our own rank goes by it.
std::vector<std::string> hosts_by_rank(const JobSetup& setup, const std::string& own_name) {
    std::vector<AllocatedHost> hosts;
    if (setup.start) {
        hosts = setup.start->hosts;
    } else if (setup.spec.nodes.max == 1) {
        return {};
    } else if (const Result<StartFacts> facts = look_for_hosts(setup.spec.start); facts && facts->allocation) {
        hosts = facts->allocation->hosts;
        const auto rank = static_cast<std::size_t>(setup.spec.rendezvous.node_rank.value_or(0));
        if (rank >= hosts.size() || !is_same_host(hosts[rank].name, own_name)) hosts.clear();
    }
    std::vector<std::string> names;
    for (const AllocatedHost& host : hosts) names.push_back(host.name);
    return names;
}

/// As a scheduler ends a job: by a signal to ddprun, or to a worker.
bool was_ended_from_outside(const JobEnd& end) {
    const WorkerEnd* cause = root_cause(end);
    return end.stopped_by_signal || end.preempted || (cause != nullptr && cause->signaled && (cause->status == SIGTERM || cause->status == SIGKILL));
}

/// Of a head that is no node: log files lie where the workers are.
OutputSpec without_files(OutputSpec output) {
    output.log_dir.clear();
    output.redirects = output.tee = {};
    output.stdout_filters.clear();
    output.stderr_filters.clear();
    return output;
}

HeadChoice head_of(const JobMeeting& meeting) { return {meeting.is_head, meeting.controller, meeting.why}; }
Result<JobToken> token_of(const JobSetup& setup) {
    if (setup.meeting) return JobToken{setup.meeting->token, setup.meeting->warning, setup.meeting->when_refused};
    return setup.token.empty() ? choose_job_token(setup.spec, process_environment) : Result<JobToken>(JobToken{setup.token, "", ""});
}

class Job final : public rdzv::ServerHandler, public rdzv::AgentLinkHandler {
  public:
    explicit Job(JobSetup setup)
        : setup_(std::move(setup)), host_(host_name()), log_({host_, "agent", std::nullopt}, log_options(setup_)) {}

    ~Job() override {
        pmix_.reset();  // it speaks with the agent and the link to its last moment
        log_.write_through(nullptr);
    }
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    Result<int> run();

  private:
    static os::LogOptions log_options(const JobSetup& setup) {
        os::LogOptions options;
        options.level = os::parse_log_level(setup.log_level.empty() ? "info" : setup.log_level).value_or(os::LogLevel::Info);
        if (setup.spec.quiet) options.level = os::LogLevel::Error;
        return options;
    }

    Status build();
    Status build_guards();
    Status build_pmix();
    Status begin_run();
    void end_run();
    Status contend_for_head(const HeadChoice& choice);
    Status build_head(const HeadChoice& choice);
    Status choose_store();
    [[nodiscard]] rdzv::ServerOptions server_options() const;
    Status listen(rdzv::ServerOptions options);
    void build_controller();
    void build_heir();
    void join(const Endpoint& controller, TimePoint by);
    Result<std::uint16_t> listen_as_standby();
    void lose_head(const Error& why);
    void take_over(JobState state, const std::string& why);
    void give_up_without_head(const std::string& why);
    void begin_control();
    /// This is the head, and no node: its agent has no workers and joins nothing.
    [[nodiscard]] bool is_apart() const { return controller_ && setup_.spec.rendezvous.head_is_apart; }
    /// With several nodes a given --master-port is where the controller itself listens, unless they met elsewhere.
    [[nodiscard]] bool listens_at_master_port() const { return shared_endpoint(setup_.spec).has_value() && !setup_.meeting; }
    Status build_agent(const Endpoint& controller);
    Status build_observation();
    void walltime_is_known(TimePoint end);
    void walltime_is_unknown(const std::string& why);
    Status build_start();
    RemoteAgents::Parts parts_of_start();
    Status start(RemoteAgents::Parts parts);
    void not_started(std::string_view node_and_why);
    Status watch_starter();
    void build_questions();
    [[nodiscard]] std::optional<Endpoint> ras_address() const;
    void on_signal(const signalfd_siginfo& info);
    void act_on(int signal, SignalAction action);
    void suspend();
    void agent_says(rdzv::FromAgent message);
    void controller_done();
    void leave(int code);
    void stop_after_others(Duration patience);
    int say_how_it_ended();
    void tell_launcher_above(LauncherFailure failure, const WorkerEnd* cause, int code);
    void flush_output();

    void on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) override;
    void on_agent_message(rdzv::AgentId agent, const rdzv::FromAgent& message) override;
    void hear(rdzv::AgentId agent, const rdzv::WorkersStarted& started) { controller_->agent_message(agent, started); }
    void hear(rdzv::AgentId agent, const rdzv::WorkerExited& exited);
    void hear(rdzv::AgentId agent, const rdzv::GenerationDrained& drained);
    void hear(rdzv::AgentId agent, const rdzv::StandbyListens& listens) { controller_->agent_message(agent, listens); }
    void hear(rdzv::AgentId agent, const rdzv::Notice& notice) {
        if (notice.kind == "not-started") return not_started(notice.text);
        controller_->agent_message(agent, notice);
    }
    void hear(rdzv::AgentId agent, const rdzv::Question& question) { inquiry_->from_agent(agent, question); }
    void hear(rdzv::AgentId agent, const rdzv::Answer& answer) { inquiry_->from_agent(agent, answer); }
    void hear(rdzv::AgentId agent, const rdzv::FenceEntered& fence) { pass_on(exchange_.entered(agent, fence)); }
    void hear(rdzv::AgentId agent, const rdzv::ModexRequest& request) { pass_on(exchange_.asked(agent, request)); }
    void hear(rdzv::AgentId agent, const rdzv::ModexReply& reply) { pass_on(exchange_.answered(agent, reply)); }
    void pass_on(const PmixExchange::Messages& messages);
    void on_agent_lost(rdzv::AgentId agent, const Error& why) override;
    void on_log(const std::string& line) override;
    void say_of_connections(const std::optional<std::string>& line);

    void on_detail(const std::string& line) override { log_.debug("{}", line); }
    void on_connected() override;
    void on_message(const rdzv::ToAgent& message) override;
    void obey(const rdzv::StartGeneration& start);
    void observe(const rdzv::StartGeneration& start);
    void obey(const rdzv::StopGeneration& stop) { agent_->handle(stop); }
    void obey(const rdzv::Shutdown& shutdown);
    void obey(const rdzv::Notice& notice) { agent_->handle(notice); }
    void obey(const rdzv::Legacy& legacy) {
        if (heir_) heir_->obey(legacy);
    }
    void obey(const rdzv::Successor& successor) {
        if (heir_) heir_->obey(successor);
    }
    void obey(const rdzv::Question& question) { inquiry_->from_controller(question); }
    void obey(const rdzv::Answer& answer) { inquiry_->from_controller(answer); }
    template <class OfPmix>
    void obey(const OfPmix& message) {
        if (pmix_) pmix_->handle(message);
    }
    void on_lost(const Error& why) override;

    JobSetup setup_;
    std::string host_;
    os::Log log_;
    std::optional<os::Log> job_log_;
    JobToken token_;
    std::uint64_t open_files_ = 0;            ///< the soft limit that workers get back
    std::string id_;
    JobMark mark_;
    os::LinuxSystem system_;
    std::unique_ptr<Warden> warden_;
    std::unique_ptr<JobCgroup> cgroup_;       ///< null: none can be had. Goes before the warden, which watches over it
    PmixWish pmix_wish_;
    std::unique_ptr<JobDirectory> files_;     ///< null: the workers have no PMIx server
    std::unique_ptr<os::EventLoop> loop_;
    std::unique_ptr<PmixServer> pmix_;        ///< null as well
    PmixExchange exchange_;                   ///< on the head, of all nodes' PMIx servers
    MasterPort master_port_;
    std::unique_ptr<rdzv::Server> server_;    ///< on the head, and on the standby
    std::unique_ptr<Controller> controller_;  ///< on the head only
    std::unique_ptr<Heir> heir_;              ///< elsewhere; null: this node ends with the head
    std::map<rdzv::AgentId, rdzv::AgentHello> early_;  ///< have come to the standby, which is not the head yet
    Endpoint head_;                           ///< where the controller is, for agents
    rdzv::AgentHello hello_;                  ///< what this node says of itself
    bool has_succeeded_ = false;              ///< this head was the standby
    bool serves_torch_ = false;               ///< on the head
    std::unique_ptr<Output> output_;
    std::unique_ptr<Agent> agent_;
    std::unique_ptr<rdzv::AgentLink> link_;    ///< null: a head that is no node
    std::unique_ptr<Observation> observation_;
    os::EventLoop::TimerId notice_timer_ = 0;  ///< of --walltime-notice
    std::unique_ptr<WalltimeWatch> walltime_;  ///< on the head only: one question to the scheduler, not one per node
    std::optional<RequeueRun> run_;            ///< on the head, where the job is put back into its queue
    std::optional<JobEnd> ended_;              ///< of the job, on the head
    std::unique_ptr<Inquiry> inquiry_;
    std::unique_ptr<JobQuestions> questions_;
    std::unique_ptr<HangWatch> hang_watch_;   ///< on the head, with --hang-timeout
    std::unique_ptr<RemoteAgents> others_;    ///< on a node that starts others
    std::optional<int> exit_code_;            ///< of a node that leaves before, or without, a controller that is its own
    std::string failure_;
    LineBudget connection_lines_{"connections"};  ///< whoever reaches the port can cause them
    bool sum_is_due_ = false;
};

Status Job::build() {
    const DescriptorLimit limit = raise_descriptor_limit();
    open_files_ = limit.before;
    const Status room = check_descriptor_limit(setup_.spec.output, setup_.workers,
                                               static_cast<int>(open_descriptors().size()), limit.now);
    if (!room) return room;
    // What can be refused is refused before anything is touched.
    const Result<HeadChoice> choice = setup_.meeting ? head_of(*setup_.meeting) : choose_head(setup_.spec, look_at_host(shared_endpoint(setup_.spec)));
    if (!choice) return choice.error();
    Result<JobToken> token = token_of(setup_);
    if (!token) return token.error();
    token_ = *std::move(token);
    if (choice->is_head) {
        if (const Status run = begin_run(); !run) return run;
    }
    // Not through the log: --quiet does not hide who else can join.
    if (!token_.warning.empty()) ddprun::print(stderr, "ddprun: {}\n", token_.warning);
    if (const Status status = os::become_subreaper(); !status) return status;
    Result<std::string> id = random_hex(8);
    if (!id) return id.error();
    id_ = *std::move(id);
    mark_ = make_job_mark(id_, own_lock_limit());
    const bool is_looked_at = setup_.spec.pmix == PmixUse::Auto;
    pmix_wish_ = decide_pmix(setup_.spec.pmix, is_looked_at ? needed_libraries_of(setup_.program.path) : std::vector<std::string>{},
                             setup_.spec.pass_mpi_env);
    if (const Status guarded = build_guards(); !guarded) return guarded;

    Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create(handled_signals());
    if (!loop) return loop.error();
    loop_ = std::move(*loop);
    loop_->on_signal([this](const signalfd_siginfo& info) { on_signal(info); });
    if (const Status served = build_pmix(); !served) return served;

    if (const Status watched = watch_starter(); !watched) return watched;
    if (!choice->is_head) {
        // Of the ranks of an outer launcher the first speaks for all.
        if (!setup_.spec.outer_rank) log_.info("the controller is at {} ({})", to_string(choice->endpoint), choice->why);
        return build_agent(choice->endpoint);
    }
    const Status head = contend_for_head(*choice);
    if (!head && choice->contested && head.error().sys == EADDRINUSE) {
        const Endpoint endpoint = *shared_endpoint(setup_.spec);
        log_.info("port {} is taken on this host: joining the controller there", endpoint.port);
        return build_agent(endpoint);
    }
    if (!head) return head;
    if (const Status agent = build_agent({"127.0.0.1", server_->bound().port}); !agent) return agent;
    return setup_.start ? build_start() : Status();
}

RemoteAgents::Parts Job::parts_of_start() {
    RemoteAgents::Parts parts{*loop_, system_, nullptr, [](int) { return std::string(); }, nullptr, nullptr};
    parts.relay = [this](UniqueFd pipe, RemoteAgents::Console console, auto seen, auto ended) {
        const Output::Stream stream = console == RemoteAgents::Console::Out ? Output::Stream::Out : Output::Stream::Err;
        return output_->relay(std::move(pipe), stream, std::move(seen), std::move(ended));
    };
    return parts;
}

/// The head's part in starting the other nodes.
Status Job::build_start() {
    RemoteAgents::Parts parts = parts_of_start();
    parts.failure_of = [this](int node) {
        const rdzv::StoreReply reply = server_->ask_store(rdzv::store_op::TryGet{failure_key(node)});
        const auto* value = std::get_if<rdzv::Value>(&reply);
        return value != nullptr ? printable(value->value.view()) : std::string();
    };
    parts.on_failure = [this](const std::vector<StartFailure>& failures) {
        if (controller_->finished()) return;
        for (const StartFailure& one : failures) job_log_->error("{} cannot take part: {}", one.host, one.why);
        controller_->start_failed(render_start_failures(failures, setup_.start->hosts.size()));
    };
    (void)server_->ask_store(rdzv::store_op::Set{std::string(kOrderKey), rdzv::Blob(encode(setup_.start->order))});
    setup_.start->endpoints = endpoints_of_head(setup_.start->order.head, server_->bound().port);
    return start(std::move(parts));
}

Status Job::start(RemoteAgents::Parts parts) {
    Result<std::unique_ptr<RemoteAgents>> others = start_hosts(std::move(parts), *setup_.start, token_.token, setup_.spec.start.timeout);
    if (!others) return others.error();
    others_ = *std::move(others);
    return {};
}

/// As a node that the head has started: its share of the others, once it can tell the head of them.
void Job::on_connected() {
    if (controller_ || !setup_.start) return;
    RemoteAgents::Parts parts = parts_of_start();
    parts.tell_head = [this](int node, const std::string& why) {
        link_->send(rdzv::Notice{"not-started", fmt::format("{} {} (started from {})", node, why, host_)});
    };
    if (const Status started = start(std::move(parts)); !started) log_.error("{}", started.error().what);
}

/// Of a node that was to start others.
void Job::not_started(std::string_view node_and_why) {
    const std::size_t space = node_and_why.find(' ');
    const Result<std::int64_t> node = parse_int(node_and_why.substr(0, space));
    if (others_ && node && space != node_and_why.npos) others_->fail(static_cast<int>(*node), printable(node_and_why.substr(space + 1)));
}

/// What started us is gone: as if it had asked us to end. Before any worker has run the head names who is missing.
Status Job::watch_starter() {
    if (!setup_.has_lifeline) return {};
    return loop_->watch(0, EPOLLIN, [this](std::uint32_t) {
        char ignored[256];
        const ssize_t n = ::read(0, ignored, sizeof ignored);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
        loop_->unwatch(0);
        if (agent_->state().generation == 0) {
            failure_ = "what started this ddprun has ended";
            return leave(static_cast<int>(ExitCode::Unavailable));
        }
        log_.info("what started this ddprun has ended: stopping");
        act_on(SIGTERM, SignalAction::Stop);
    });
}

/// What a batch job's last run has left.
Status Job::begin_run() {
    Result<std::optional<RequeueRun>> run =
        RequeueRun::begin(setup_.spec.requeue, setup_.spec.output.log_dir, [this](const std::string& line) { log_.info("{}", line); });
    if (!run) return run.error();
    run_ = *std::move(run);
    if (run_ && setup_.spec.walltime_notice == Duration::zero()) setup_.spec.walltime_notice = kRequeueNotice;
    return {};
}

/// The last act: a scheduler may end us for it.
void Job::end_run() {
    if (!run_ || !ended_) return;
    const bool at_walltime = was_ended_from_outside(*ended_) && walltime_->end() && !walltime_note(*walltime_->end() - MonotonicClock::now()).empty();
    run_->finish(*ended_, at_walltime, [](const std::string& line) { ddprun::print(stderr, "ddprun: {}\n", printable(line)); });
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
Status Job::build_guards() {
    OwnCgroup own;
    if (setup_.spec.use_cgroup) own = look_for_own_cgroup();
    else own.why = "--cgroup none";
    if (!own.directory.empty()) {
        for (const std::string& name : remove_abandoned_cgroups(own.directory)) {
            log_.info("a ddprun that was killed had left the cgroup {}/{}; ended what was in it", own.directory, name);
        }
    }
    const std::string directory = own.directory.empty() ? "" : own.directory + "/" + job_cgroup_name(id_);
    const std::string files = pmix_wish_.wanted ? place_of_job_directories() + "/" + job_directory_name(id_) : "";
    Result<std::unique_ptr<Warden>> warden = Warden::start(mark_, directory, setup_.workers, files);
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

/// The workers' PMIx server, where one is wanted. A directory for MPI's files comes first: the warden removes it if we are
/// killed. Error: only where the user insists on it.
Status Job::build_pmix() {
    if (!pmix_wish_.wanted) return {};
    const std::string place = place_of_job_directories();
    for (const std::string& name : remove_abandoned_job_directories(place)) log_.info("a ddprun that was killed had left {}/{}; removed it", place, name);
    const auto begin = [&]() -> Status {
        Result<std::unique_ptr<JobDirectory>> files = JobDirectory::create(place + "/" + job_directory_name(id_));
        if (!files) return files.error();
        files_ = std::move(*files);
        PmixServer::Parts parts{*loop_, log_, host_, id_, files_->path(), [this](rdzv::FromAgent message) { return link_->send(std::move(message)); },
                                [this](int local_rank) { agent_->worker_aborted(local_rank); }};
        Result<std::unique_ptr<PmixServer>> server = PmixServer::start(process_environment("DDPRUN_PMIX_LIBRARY").value_or(""), std::move(parts));
        if (!server) return server.error();
        pmix_ = std::move(*server);
        return {};
    };
    const Status begun = begin();
    if (begun) log_.debug("PMIx server of the workers: {}", pmix_wish_.why);
    if (begun) return {};
    files_.reset();
    if (setup_.spec.pmix == PmixUse::On) return begun.error().with("--pmix on");
    log_.warning("{}, but there is no PMIx server for it ({}): its ranks would not find each other; install libpmix, or say --pmix off",
                 pmix_wish_.why, begun.error().what);
    return {};
}

Status Job::build_head(const HeadChoice& choice) {
    const JobSpec& spec = setup_.spec;
    if (const Status chosen = choose_store(); !chosen) return chosen;
    if (spec.rendezvous.master_port && !listens_at_master_port()) {
        if (const Status free = MasterPort::check(*spec.rendezvous.master_port); !free) return free;
    }
    rdzv::ServerOptions options = server_options();
    options.where = choice.endpoint;
    if (serves_torch_ && spec.nodes.max == 1) options.where.port = static_cast<std::uint16_t>(spec.rendezvous.master_port.value_or(0));
    if (setup_.meeting) options.listener = std::move(setup_.meeting->listener);
    if (const Status listens = listen(std::move(options)); !listens) return listens;
    build_controller();
    if (spec.nodes.max > 1) {
        job_log_->info("controller on port {} ({}), waiting for {} nodes", server_->bound().port, choice.why, spec.nodes.min);
    }
    return {};
}

rdzv::ServerOptions Job::server_options() const {
    rdzv::ServerOptions options;
    options.credentials = {setup_.spec.rendezvous.run_id, token_.token};
    options.serves_torch = serves_torch_;
    options.heartbeats = heartbeats_of(setup_.spec.rendezvous);
    return options;
}

Status Job::listen(rdzv::ServerOptions options) {
    Result<std::unique_ptr<rdzv::Server>> server = rdzv::Server::create(*loop_, std::move(options), *this);
    if (!server) return server.error();
    server_ = std::move(*server);
    return {};
}

/// Whether PyTorch's workers get their store from us.
Status Job::choose_store() {
    const Result<TorchStoreChoice> store = choose_torch_store(setup_.spec, is_run_by_python(setup_.program));
    if (!store) return store.error();
    log_.debug("the store of PyTorch's workers is {}: {}", store->is_served ? "ours" : "theirs", store->why);
    serves_torch_ = store->is_served;
    return {};
}

void Job::build_controller() {
    const JobSpec& spec = setup_.spec;
    job_log_ = log_.with_component("job");
    ControllerConfig config;
    config.spec = spec;
    config.program = setup_.program.name;
    config.can_be_succeeded = spec.nodes.max > 1 && !setup_.start && !spec.outer_rank;
    config.random = static_cast<double>(::getpid() % 1000) / 1000;
    config.own_host = host_;
    config.hosts = hosts_by_rank(setup_, host_);
    if (!spec.rendezvous.head_is_apart) config.own_pid = ::getpid();
    config.terms = terms_of(setup_, pmix_ != nullptr);
    if (!spec.rendezvous.head_is_apart || spec.fabric) config.fabric = describe_fabric(setup_.machine.fabric, process_environment);
    config.in_batch_job = find_batch_job(process_environment).has_value();
    config.master = [this](const rdzv::AgentHello& first) -> Result<MasterAddress> {
        const RendezvousSpec& rendezvous = setup_.spec.rendezvous;
        const bool is_here = first.host == host_ && first.pid == ::getpid() && !has_succeeded_;
        if (serves_torch_) return MasterAddress{has_succeeded_ ? hello_.addresses.front() : master_host(setup_.spec, true, {}), server_->bound().port, true};
        const std::string host = master_host(setup_.spec, is_here, first.addresses);
        if (rendezvous.master_port && !listens_at_master_port()) return MasterAddress{host, *rendezvous.master_port};
        const Result<int> port = master_port_.reserve();
        if (!port) return port.error();
        return MasterAddress{host, *port};
    };
    controller_ = std::make_unique<Controller>(
        *loop_, *job_log_, std::move(config),
        [this](rdzv::AgentId agent, const rdzv::ToAgent& message) {
            if (const auto* start = std::get_if<rdzv::StartGeneration>(&message); start && !link_ && start->group_rank == 0) observe(*start);
            server_->send(agent, message);
        },
        [this] { controller_done(); });
    controller_->on_generation([this](std::uint64_t generation) {
        server_->begin_generation(generation);
        if (!pmix_) return;
        std::vector<PmixExchange::Node> nodes;
        for (WorldNode& node : controller_->world()) nodes.push_back({node.agent, std::move(node.host), node.first_rank, node.workers});
        pass_on(exchange_.begin(id_, generation, std::move(nodes)));
    });
}

Status Job::build_agent(const Endpoint& controller) {
    const JobSpec& spec = setup_.spec;
    output_ = std::make_unique<Output>(*loop_, is_apart() ? without_files(spec.output) : prepare_log_directory(spec, log_),
                                       OutputRanks{.here = setup_.workers, .is_whole_job = spec.nodes.max == 1, .is_merged = setup_.start || setup_.is_started}, 1, 2);
    log_.write_through([this](std::string_view line) { return output_->say(line); });

    AgentConfig config;
    config.spec = spec;
    config.program = setup_.program;
    config.machine = setup_.machine;
    config.host = host_;
    config.store = "tcp:" + to_string(controller);
    config.token = token_.token;
    config.mark = mark_;
    config.environment = std::move(setup_.environment);
    config.open_files = open_files_;
    if (spec.pass_mpi_env) config.passed_descriptor = descriptor_of_launcher(process_environment);
    config.cgroup = cgroup_.get();
    config.pmix = pmix_.get();
    agent_ = std::make_unique<Agent>(*loop_, system_, *output_, warden_.get(), log_, std::move(config),
                                     [this](rdzv::FromAgent message) { agent_says(std::move(message)); });
    if (is_apart()) return build_observation();

    rdzv::AgentHello& hello = hello_;
    hello.host = host_;
    hello.node_rank = spec.rendezvous.node_rank;
    // The port that workers get as MASTER_PORT is held here: rank 0 has to be here too, whoever joins first.
    if (!hello.node_rank && controller_) hello.node_rank = 0;
    if (spec.rendezvous.local_addr) hello.addresses = {*spec.rendezvous.local_addr};
    hello.slots = setup_.workers;
    hello.pid = ::getpid();
    hello.version = DDPRUN_VERSION;
    hello.terms = terms_of(setup_, pmix_ != nullptr);
    hello.role = spec.role;
    hello.seats = seats_of(spec, setup_.machine, setup_.workers);
    if (wants_fabric(spec) || spec.nodes.max > 1) hello.fabric = name_of(setup_.machine.fabric.fabric);
    if (!controller_) build_heir();
    join(controller, deadline_after(MonotonicClock::now(), spec.rendezvous.join_timeout));
    return build_observation();
}

/// Becomes part of the job at its controller, the first one or another.
void Job::join(const Endpoint& controller, TimePoint by) {
    head_ = controller;
    rdzv::AgentLinkOptions options;
    options.controller = controller;
    options.credentials = {setup_.spec.rendezvous.run_id, token_.token};
    options.name = "agent on " + host_;
    options.when_token_differs = token_.when_refused;
    options.hello = hello_;
    options.heartbeats = heartbeats_of(setup_.spec.rendezvous);
    options.is_ours = server_ != nullptr;
    options.connect_by = by;
    link_ = std::make_unique<rdzv::AgentLink>(*loop_, std::move(options), *this);
}

Status Job::build_observation() {
    Observation::Parts parts{*loop_, log_, setup_.spec, *agent_, *output_, controller_.get(), id_,
                             setup_.program.name, host_};
    observation_ = std::make_unique<Observation>(std::move(parts));
    if (controller_) controller_->on_event([this](const JobEvent& event) { observation_->decided(event); });
    if (const Status open = observation_->open([this](const ControlRequest& request, const RequestReply& reply) { inquiry_->ask_job(request, reply); }); !open) return open;
    build_questions();
    return {};
}

/// As NCCL in the workers reads its variables: any of its processes tells of the whole job.
std::optional<Endpoint> Job::ras_address() const {
    return ras_endpoint(agent_->variable(0, "NCCL_RAS_ENABLE"), agent_->variable(0, "NCCL_RAS_ADDR"));
}

/// What a running job can be asked, and what the job itself asks of its nodes.
void Job::build_questions() {
    Inquiry::Parts parts{*loop_, [this](rdzv::FromAgent message) { return link_->send(std::move(message)); }, nullptr, nullptr};
    if (controller_) {
        parts.to_agent = [this](rdzv::AgentId agent, rdzv::ToAgent message) { return server_->send(agent, std::move(message)); };
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
    if (const Status built = build(); !built) {
        if (output_) flush_output();
        return built.error();
    }
    if (controller_) begin_control();
    if (const Status ran = loop_->run(); !ran) {
        warden_->end_all();  // no end of a worker is seen any more
        flush_output();
        return ran.error();
    }
    const int code = say_how_it_ended();
    flush_output();
    end_run();
    return code;
}

void Job::begin_control() {
    walltime_ = std::make_unique<WalltimeWatch>(*loop_, system_, log_);
    walltime_->begin(setup_.spec.walltime_notice, [this](TimePoint end) { walltime_is_known(end); }, [this](const std::string& why) { walltime_is_unknown(why); });
    controller_->begin();
}

// ---- without the head

/// Whoever was started by the head ends with it.
void Job::build_heir() {
    const JobSpec& spec = setup_.spec;
    if (setup_.is_started || setup_.has_lifeline || spec.outer_rank) return;
    Heir::Parts parts{*loop_, log_, {}, nullptr, nullptr, nullptr, nullptr, nullptr};
    parts.patience = spec.failure_grace + heartbeats_of(spec.rendezvous).timeout;
    parts.listen = [this] { return listen_as_standby(); };
    parts.say = [this](rdzv::FromAgent message) { link_->send(std::move(message)); };
    parts.go_to = [this](const Endpoint& controller, TimePoint by) {
        agent_->set_store("tcp:" + to_string(controller));
        if (hello_.addresses.empty()) hello_.addresses = heir_->own_addresses();
        join(controller, by);
    };
    parts.take_over = [this](JobState state, const std::string& why) { take_over(std::move(state), why); };
    parts.give_up = [this](const std::string& why) { give_up_without_head(why); };
    heir_ = std::make_unique<Heir>(std::move(parts));
}

Result<std::uint16_t> Job::listen_as_standby() {
    if (const Status chosen = choose_store(); !chosen) return chosen.error();
    rdzv::ServerOptions options = server_options();
    options.where = {"", 0};
    if (const Status listens = listen(std::move(options)); !listens) return listens.error();
    return server_->bound().port;
}

/// This node's workers are stopped, as survivors of any failure; when none is left the job goes on elsewhere.
void Job::lose_head(const Error& why) {
    constexpr Duration kRefusal = std::chrono::milliseconds(100);  // a host that lives refuses at once
    const Result<UniqueFd> again = connect_tcp(head_, MonotonicClock::now() + kRefusal);
    const bool is_dead = !again && again.error().sys == ECONNREFUSED;
    const std::string lost = fmt::format("the head at {} is lost ({})", to_string(head_), why.what);
    log_.warning("{}; this node's workers are stopped, the job goes on under {}", lost, heir_->successor());
    heir_->head_lost(lost, is_dead);
    rdzv::StopGeneration stop;
    stop.generation = agent_->generation();
    stop.grace_ns = setup_.spec.failure_grace.count();
    stop.failed_rank = 0;
    stop.why = lost;
    agent_->handle(stop);
    if (agent_->idle()) heir_->drained();
}

void Job::take_over(JobState state, const std::string& why) {
    has_succeeded_ = true;
    build_controller();
    job_log_->warning("this node is the head from now on; {} nodes are here", early_.size());
    observation_->becomes_head(*controller_);
    controller_->on_event([this](const JobEvent& event) { observation_->decided(event); });
    build_questions();
    begin_control();
    for (const auto& [agent, hello] : std::exchange(early_, {})) on_agent_joined(agent, hello);
    controller_->succeed(std::move(state), why);
}

void Job::give_up_without_head(const std::string& why) {
    for (const auto& [agent, hello] : std::exchange(early_, {})) server_->refuse_agent(agent, {Errc::Refused, why, 0});
    failure_ = why;
    server_->when_written(kFarewell, [this] { leave(static_cast<int>(ExitCode::Unavailable)); });
}

void Job::walltime_is_unknown(const std::string& why) {
    const Duration notice = setup_.spec.walltime_notice;
    if (notice == Duration::zero()) return log_.debug("the walltime is not known: {}", why);
    log_.warning("--walltime-notice={}: no notice will be given: {}", format_duration(notice), why);
}

void Job::walltime_is_known(TimePoint end) {
    const Duration notice = setup_.spec.walltime_notice;
    const TimePoint time_up = end == kNever ? kNever : end - notice;
    controller_->walltime_known(time_up);
    loop_->cancel(notice_timer_);
    if (notice == Duration::zero() || time_up == kNever) return;
    notice_timer_ = loop_->call_at(time_up, [this, end] {
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
            else agent_->forward_signal(signal, SignalFrom::Here);
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

/// Ctrl-Z: the workers have been stopped; now ourselves, as a shell expects, once the other nodes have been told. Its `fg`
/// sends SIGCONT.
void Job::suspend() {
    agent_->forward_signal(SIGTSTP, SignalFrom::Here);
    const auto stop = [] { ::kill(::getpid(), SIGSTOP); };
    if (controller_) server_->when_written(kSuspension, stop);
    else stop();
}

// ---- what peers say

void Job::on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) {
    if (!controller_) {
        early_.emplace(agent, hello);
        return heir_->arrived(agent);
    }
    const Status joined = controller_->agent_joined(agent, hello);
    if (!joined) {
        for (const std::string_view line : split(joined.error().what, '\n')) job_log_->warning("{}", line);
        return server_->refuse_agent(agent, joined.error());
    }
    if (others_ && hello.node_rank) others_->joined(*hello.node_rank);
}

void Job::on_agent_lost(rdzv::AgentId agent, const Error& why) {
    if (!controller_) {
        early_.erase(agent);
        return heir_->gone(agent);
    }
    inquiry_->agent_lost(agent);
    pass_on(exchange_.node_lost(agent));
    controller_->agent_lost(agent, why);
}

void Job::on_agent_message(rdzv::AgentId agent, const rdzv::FromAgent& message) {
    if (controller_) std::visit([&](const auto& one) { hear(agent, one); }, message);
}

void Job::hear(rdzv::AgentId agent, const rdzv::WorkerExited& exited) {
    observation_->node_says(exited, controller_->host_of(agent));
    pass_on(exchange_.rank_ended(exited.generation, exited.rank));
    controller_->agent_message(agent, exited);
}

void Job::hear(rdzv::AgentId agent, const rdzv::GenerationDrained& drained) {
    observation_->node_says(drained, controller_->host_of(agent));
    controller_->agent_message(agent, drained);
}

void Job::pass_on(const PmixExchange::Messages& messages) {
    for (const PmixExchange::Outgoing& one : messages) server_->send(one.agent, one.message);
}

void Job::on_log(const std::string& line) {
    say_of_connections(connection_lines_.take(line, loop_->now()));
    if (sum_is_due_ || connection_lines_.due() == kNever) return;
    sum_is_due_ = true;
    loop_->call_at(connection_lines_.due(), [this] {
        sum_is_due_ = false;
        say_of_connections(connection_lines_.sum_up(loop_->now()));
    });
}

void Job::say_of_connections(const std::optional<std::string>& line) {
    if (line) log_.warning("{}", *line);
}

void Job::on_message(const rdzv::ToAgent& message) {
    std::visit([this](const auto& one) { obey(one); }, message);
}

void Job::obey(const rdzv::StartGeneration& start) {
    observe(start);
    if (heir_) heir_->generation_began();
    hello_.kept_rank = start.group_rank;
    agent_->handle(start);
}

void Job::observe(const rdzv::StartGeneration& start) {
    log_.set_generation(start.generation);
    observation_->generation_started(start);
}

void Job::obey(const rdzv::Shutdown& shutdown) {
    if (controller_) return;
    failure_ = shutdown.why;
    leave(shutdown.exit_code);
}

void Job::on_lost(const Error& why) {
    if (exit_code_ || (controller_ && controller_->finished())) return;
    const bool is_gone = why.code == Errc::Closed || why.code == Errc::Timeout;
    if (!controller_ && is_gone && heir_ && !heir_->successor().empty() && !heir_->is_orphan()) return lose_head(why);
    failure_ = "the controller: " + why.what;
    if (!agent_->idle()) log_.error("{}; killing the workers of this node", failure_);
    leave(static_cast<int>(ExitCode::Unavailable));
}

// ---- the end

void Job::controller_done() {
    // Agents elsewhere still have to hear it; ours is idle. Then come their last lines, through what started them.
    server_->when_written(kFarewell, [this] { stop_after_others(kFarewell); });
}

void Job::stop_after_others(Duration patience) {
    if (!others_) return loop_->stop();
    others_->finish(patience, [this] { loop_->stop(); });
}

/// Ends this node's part; workers that still run are waited for.
void Job::leave(int code) {
    exit_code_ = code;
    if (agent_->idle()) stop_after_others(kFarewell / 2);
    else agent_->kill_all();  // its last word stops the loop
}

void Job::agent_says(rdzv::FromAgent message) {
    observation_->agent_says(message);
    const bool is_last = std::holds_alternative<rdzv::GenerationDrained>(message);
    link_->send(std::move(message));
    if (exit_code_ && is_last) stop_after_others(kFarewell / 2);
    if (is_last && heir_) heir_->drained();
}

int Job::say_how_it_ended() {
    output_->flush(deadline_after(MonotonicClock::now(), kFlushLook));  // what is lost there stands in the report
    say_of_connections(connection_lines_.total());
    if (!controller_ || exit_code_) {  // a head without a link to itself has left, too
        if (!failure_.empty()) {
            for (const std::string_view line : split(failure_, '\n')) log_.error("{}", line);
        }
        const int code = exit_code_.value_or(static_cast<int>(ExitCode::Internal));
        observation_->finished(code, failure_);
        const std::optional<rdzv::WorkerExited>& first = agent_->first_failure();
        std::optional<WorkerEnd> cause;
        if (first) cause = WorkerEnd{*first, 0, host_, {}, std::nullopt, 0};
        if (code != 0) tell_launcher_above({.message = failure_}, cause ? &*cause : nullptr, code);
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
    const int code = exit_code(end);
    if (code != 0) tell_launcher_above({.message = headline(end)}, root_cause(end.workers), code);
    output_->say_last(render_report(end, terminal_width()));
    ended_ = std::move(end);
    return code;
}

/// Of a worker its own report where it is on this node, else what is known of it.
void Job::tell_launcher_above(LauncherFailure failure, const WorkerEnd* cause, int code) {
    failure.unix_seconds = ::time(nullptr);
    failure.error_code = code;
    if (cause != nullptr) {
        failure.message = fmt::format("rank {} on {}: {}", cause->rank, cause->host, describe_end(*cause));
        failure.trace = cause->error_file;
        if (cause->host == host_) failure.report = agent_->error_report(cause->rank);
        if (cause->exec_failure.empty() && !cause->stopped_failing) failure.error_code = cause->signaled ? -cause->status : cause->status;
    }
    if (const Status left = leave_error_file(process_environment, failure); !left) {
        log_.warning("TORCHELASTIC_ERROR_FILE: {}; ignoring", left.error().what);
    }
}

/// As any program, we wait for who reads us; but a signal that asks us to end is obeyed, which nobody hears any more.
void Job::flush_output() {
    const auto asked_to_end = [] {
        sigset_t pending;
        ::sigpending(&pending);
        const auto is_pending = [&](int signal) { return ::sigismember(&pending, signal) == 1; };
        return is_pending(SIGTERM) || is_pending(SIGINT) || is_pending(SIGHUP) || is_pending(SIGQUIT);
    };
    const TimePoint soon = deadline_after(MonotonicClock::now(), kFarewell);
    bool is_said = false;
    do {
        output_->flush(deadline_after(MonotonicClock::now(), kFlushLook));
        if (is_said || output_->files_are_written() || MonotonicClock::now() < soon) continue;
        is_said = true;
        log_.warning("the job has ended, but its log files are not written yet (a disk that hangs?); waiting for them, a signal ends that");
    } while (!output_->flushed() && !asked_to_end());
}

}  // namespace

Result<int> run_job(JobSetup setup) { return Job(std::move(setup)).run(); }

}  // namespace ddprun
