#include "launcher/job.h"

#include <fmt/core.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/nodes/meeting_point.h"
#include "env/nodes/pmix_source.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/exit_codes.h"
#include "launcher/guard/descriptors.h"
#include "launcher/hang/nccl_ras.h"
#include "launcher/output/log_files.h"
#include "launcher/plan/seating.h"
#include "launcher/signals.h"

namespace ddprun {
namespace {

/// How long other nodes may keep us from being suspended.
constexpr Duration kSuspension = std::chrono::seconds(1);

/// A file system may hold up a node for so long before the others give it up.
constexpr Duration kLongestBlockingCall = std::chrono::minutes(1);

/// True when the controller is on loopback, so that nothing leaves this host.
bool stays_here(const Endpoint& controller) { return controller.host == "127.0.0.1"; }

HeadChoice head_of(const JobMeeting& meeting) { return {meeting.is_head, meeting.controller, meeting.why}; }

/// Where it was said which node is the head, its addresses matter only to one that listens on one of them.
std::optional<Endpoint> endpoint_to_look_up(const JobSpec& spec) {
    return spec.rendezvous.is_host && spec.rendezvous.listen_on.empty() ? std::nullopt
                                                                        : shared_endpoint(spec);
}

HeadChoice head_at(const std::vector<Endpoint>& controllers) {
    return {false, controllers.front(), "the job goes on there"};
}
Result<JobToken> token_of(const JobSetup& setup) {
    if (setup.meeting)
        return JobToken{setup.meeting->token, setup.meeting->warning, setup.meeting->when_refused};
    return setup.token.empty() ? choose_job_token(setup.spec, process_environment)
                               : Result<JobToken>(JobToken{setup.token, "", ""});
}

}  // namespace

rdzv::Terms terms_of(const JobSetup& setup, bool has_pmix) {
    const JobSpec& spec = setup.spec;
    const rdzv::Heartbeats heartbeat = heartbeats_of(spec.rendezvous);
    rdzv::Terms terms{fmt::format("ddprun={}", DDPRUN_VERSION),
                      fmt::format("--nnodes={}:{}", spec.nodes.min, spec.nodes.max),
                      fmt::format("--max-restarts={}{}", spec.restart.max_restarts,
                                  spec.restart.window ? "/" + format_duration(*spec.restart.window) : ""),
                      fmt::format("heartbeats=every {}", format_duration(heartbeat.interval)),
                      fmt::format("lost after={}", format_duration(heartbeat.timeout)),
                      fmt::format("--pmix={}", has_pmix ? "on" : "off"),
                      fmt::format("--tls={}", spec.rendezvous.tls ? "on" : "off"),
                      fmt::format("program of role {}={}", spec.role,
                                  std::filesystem::path(setup.program.name).filename().string())};
    if (spec.fabric) terms.push_back(fmt::format("--fabric={}", name_of(*spec.fabric)));
    return terms;
}

std::string command_of(const ResolvedProgram& program, std::string_view token) {
    const std::vector<std::string>& all = program.arguments;
    const auto script = std::find(all.begin(), all.end(), program.name);  // behind a Python and its options
    const auto own = script != all.end() ? script + 1 : all.begin() + (all.empty() ? 0 : 1);
    const Digest digest = hmac_sha256(token, join({own, all.end()}, std::string_view("\0", 1)));
    return fmt::format("{} (digest of its arguments: {})",
                       std::filesystem::path(program.name).filename().string(), to_hex(digest).substr(0, 8));
}

os::LogOptions Job::log_options(const JobSetup& setup) {
    os::LogOptions options;
    options.level =
        os::parse_log_level(setup.log_level.empty() ? "info" : setup.log_level).value_or(os::LogLevel::Info);
    if (setup.spec.quiet) options.level = os::LogLevel::Error;
    return options;
}

Status Job::build() {
    const DescriptorLimit limit = raise_descriptor_limit();
    open_files_ = setup_.open_files != 0 ? setup_.open_files : limit.before;
    const Status room = check_descriptor_limit(setup_.spec.output, setup_.workers,
                                               static_cast<int>(open_descriptors().size()), limit.now);
    if (!room) return room;
    // What can be refused is refused before anything is touched.
    const bool is_settled = setup_.meeting || !setup_.job_at.empty();
    const HostFacts facts = is_settled ? HostFacts{} : look_at_host(endpoint_to_look_up(setup_.spec));
    if (!facts.unanswered.empty()) log_.warning("{}", facts.unanswered);
    const Result<HeadChoice> choice = setup_.meeting           ? head_of(*setup_.meeting)
                                      : !setup_.job_at.empty() ? head_at(setup_.job_at)
                                                               : choose_head(setup_.spec, facts);
    if (!choice) return choice.error();
    Result<JobToken> token = token_of(setup_);
    if (!token) return token.error();
    token_ = *std::move(token);
    if (choice->is_head) {
        if (const Status report = check_report_file(setup_.spec); !report) return report;
        if (const Status run = begin_run(RequeueRun::Head::First); !run) return run;
    }
    // Not through the log: --quiet does not hide who else can join.
    if (!token_.warning.empty()) ddprun::print(stderr, "ddprun: {}\n", token_.warning);
    if (const Status status = os::become_subreaper(); !status) return status;
    Result<std::string> id = random_hex(8);
    if (!id) return id.error();
    id_ = *std::move(id);
    mark_ = make_job_mark(id_, own_lock_limit());
    pmix_wish_ = decide_pmix(setup_.spec, setup_.program.path);
    const bool is_lone_worker = setup_.workers == 1 && setup_.spec.nodes.max == 1;
    if (choice->is_head && !is_lone_worker && !pmix_wish_.warning.empty())
        log_.warning("{}", pmix_wish_.warning);
    if (const Status guarded = build_guards(); !guarded) return guarded;

    Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create(handled_signals());
    if (!loop) return loop.error();
    loop_ = std::move(*loop);
    loop_->on_signal([this](const signalfd_siginfo& info) { on_signal(info); });
    if (const Status opened = open_way_to_store(); !opened) return opened;
    if (const Status served = build_pmix(); !served) return served;

    if (const Status watched = watch_starter(); !watched) return watched;
    if (!choice->is_head) {
        // Of the ranks of an outer launcher the first speaks for all. Where lines go to the head by the
        // session, there is none yet.
        if (!setup_.spec.outer_rank && !setup_.sends_output)
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
    if (const Status agent = build_agent(own_endpoint(setup_.spec.rendezvous, server_->bound().port)); !agent)
        return agent;
    return setup_.start ? build_start() : Status();
}

/// The warden first: it removes the cgroup if we are killed after we have made it.
Status Job::build_guards() {
    OwnCgroup own;
    if (setup_.spec.use_cgroup) own = look_for_own_cgroup();
    else own.why = "--cgroup none";
    if (!own.directory.empty()) {
        for (const std::string& name : remove_abandoned_cgroups(own.directory)) {
            log_.info("a ddprun that was killed had left the cgroup {}/{}; ended what was in it",
                      own.directory, name);
        }
    }
    const std::string directory = own.directory.empty() ? "" : own.directory + "/" + job_cgroup_name(id_);
    const std::string files =
        pmix_wish_.wanted ? place_of_job_directories() + "/" + job_directory_name(id_) : "";
    Result<std::unique_ptr<Warden>> warden =
        Warden::start(mark_, directory, setup_.workers, files, setup_.start ? setup_.start->secret_file : "");
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

/// A socket for this host's workers, in the job's directory until they can have it without a name. With PMIx
/// the directory stays: MPI has files, too, and the warden removes them if we are killed.
Status Job::open_way_to_store() {
    const std::string place = place_of_job_directories();
    for (const std::string& name : remove_abandoned_job_directories(place))
        log_.info("a ddprun that was killed had left {}/{}; removed it", place, name);
    Result<std::unique_ptr<JobDirectory>> files = JobDirectory::create(place + "/" + job_directory_name(id_));
    if (!files) return files.error().with("a place for the workers' way to the store (TMPDIR names another)");
    const std::string path = (*files)->path() + "/store";
    Result<UnixListener> listener = listen_unix(path);
    if (!listener) return listener.error().with("the workers' way to the store");
    ::unlink(path.c_str());
    store_way_ = *std::move(listener);
    if (pmix_wish_.wanted) files_ = *std::move(files);
    return {};
}

/// The workers' PMIx server, where one is wanted. Error: only where the user insists on it.
Status Job::build_pmix() {
    if (!pmix_wish_.wanted) return {};
    const auto begin = [&]() -> Status {
        PmixServer::Parts parts{*loop_,
                                log_,
                                host_,
                                id_,
                                files_->path(),
                                [this](rdzv::FromAgent message) { return link_->send(std::move(message)); },
                                [this](int local_rank) { agent_->worker_aborted(local_rank); }};
        Result<std::unique_ptr<PmixServer>> server =
            PmixServer::start(process_environment("DDPRUN_PMIX_LIBRARY").value_or(""), std::move(parts));
        if (!server) return server.error();
        pmix_ = std::move(*server);
        return {};
    };
    const Status begun = begin();
    if (begun) log_.debug("PMIx server of the workers: {}", pmix_wish_.why);
    if (begun) return {};
    files_.reset();
    if (setup_.spec.pmix == PmixUse::On) return begun.error().with("--pmix on");
    log_.warning(
        "{}, but there is no PMIx server for it ({}): its ranks would not find each other; {}, or say --pmix off",
        pmix_wish_.why, begun.error().what,
        built_with_pmix() ? "install libpmix" : "install libpmix-dev and build ddprun again");
    return {};
}

/// MPI behind a script or in Python is seen only where it is loaded: in the memory of the head's first
/// worker, a while after its start.
void Job::look_for_mpi(std::size_t nth) {
    const JobSpec& spec = setup_.spec;
    const bool may_lack_server =
        !pmix_ && spec.pmix == PmixUse::Auto && !spec.pass_mpi_env && pmix_wish_.warning.empty();
    const bool may_be_several = setup_.workers > 1 || spec.nodes.max > 1;
    if (!controller_ || !may_lack_server || !may_be_several || agent_->state().generation != 1) return;
    constexpr std::array<std::chrono::seconds, 3> kLooks = {std::chrono::seconds(1), std::chrono::seconds(5),
                                                            std::chrono::seconds(30)};
    constexpr std::size_t kMaxMaps = std::size_t{16} << 20;
    if (nth == kLooks.size()) return;
    loop_->call_after(kLooks[nth], [this, nth] {
        const std::vector<AgentState::Worker>& workers = agent_->state().workers;
        if (workers.empty() || workers.front().pid == 0 || workers.front().state == WorkerState::Ended)
            return;
        const Result<std::string> maps =
            read_file(fmt::format("/proc/{}/maps", workers.front().pid), kMaxMaps);
        const std::string line = maps ? explain_loaded_mpi(*maps) : "";
        if (line.empty()) return look_for_mpi(nth + 1);
        log_.warning("{}", line);
    });
}

/// What started us is gone: as if it had asked us to end. Before any worker has run the head names who is
/// missing.
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
        link_->send(rdzv::Notice{
            "remark", "what started this ddprun has ended"});  // by which our lines went to the head
        act_on(SIGTERM, SignalAction::Stop);
    });
}

Status Job::build_agent(const Endpoint& controller) {
    const JobSpec& spec = setup_.spec;
    if (spec.rendezvous.tls) {
        Result<std::shared_ptr<const rdzv::TlsContext>> tls = rdzv::TlsContext::for_client();
        if (!tls) return tls.error().with("--tls");
        tls_ = *std::move(tls);
    }
    if (setup_.sends_output) {
        OutputSender::Parts parts{
            *loop_, rdzv::kOutputWindow, [this](Output::Stream stream, std::string bytes) {
                return link_->send(
                    rdzv::OutputPiece{stream == Output::Stream::Out ? 1 : 2, rdzv::Blob(std::move(bytes))});
            }};
        Result<std::unique_ptr<OutputSender>> sender = OutputSender::create(std::move(parts));
        if (!sender) return sender.error();
        sender_ = *std::move(sender);
    }
    output_ = std::make_unique<Output>(
        *loop_, is_apart() ? without_files(spec.output) : prepare_log_directory(spec, log_),
        OutputRanks{.here = setup_.workers,
                    .is_whole_job = spec.nodes.max == 1,
                    .is_merged = setup_.start || setup_.is_started},
        sender_ ? sender_->console(Output::Stream::Out) : 1,
        sender_ ? sender_->console(Output::Stream::Err) : 2);
    output_->on_shown(
        [this](rdzv::AgentId agent, std::uint64_t bytes) { server_->send(agent, rdzv::OutputShown{bytes}); });
    log_.write_through([this](std::string_view line) { return output_->say(line); });

    AgentConfig config;
    config.spec = spec;
    config.program = setup_.program;
    config.machine = setup_.machine;
    config.host = host_;
    config.store = store_way_.inode.get();
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
    hello.instance = id_;
    hello.version = DDPRUN_VERSION;
    hello.terms = terms_of(setup_, pmix_ != nullptr);
    hello.command = command_of(setup_.program, token_.token);
    hello.role = spec.role;
    hello.seats = seats_of(spec, setup_.machine, setup_.workers);
    if (wants_fabric(spec) || spec.nodes.max > 1) hello.fabric = name_of(setup_.machine.fabric.fabric);
    if (!controller_) build_heir();
    if (const Status relays = controller_ ? Status() : build_relay(); !relays) return relays;
    std::vector<Endpoint> controllers =
        setup_.job_at.empty() ? std::vector<Endpoint>{controller} : setup_.job_at;
    std::copy_if(setup_.head_elsewhere.begin(), setup_.head_elsewhere.end(), std::back_inserter(controllers),
                 [&](const Endpoint& other) { return other != controller; });
    join(std::move(controllers), deadline_after(MonotonicClock::now(), spec.rendezvous.join_timeout));
    return build_observation();
}

/// Not on the head, whose server the workers reach themselves.
Status Job::build_relay() {
    rdzv::StoreRelay::Parts parts{*loop_, [this] { return link_.get(); },
                                  [this](const std::string& line) { on_log(line); }};
    Result<std::unique_ptr<rdzv::StoreRelay>> relay = rdzv::StoreRelay::serve(
        std::move(parts), std::move(store_way_.fd), {setup_.spec.rendezvous.run_id, token_.token});
    if (!relay) return relay.error();
    relay_ = *std::move(relay);
    return {};
}

void Job::join(std::vector<Endpoint> controllers, TimePoint by) {
    head_ = controllers.front();
    head_places_ = controllers.size();
    rdzv::AgentLinkOptions options;
    if (!std::all_of(controllers.begin(), controllers.end(), stays_here)) options.tls = tls_;
    options.controllers = std::move(controllers);
    options.credentials = {setup_.spec.rendezvous.run_id, token_.token};
    options.name = "agent on " + host_;
    options.when_token_differs = token_.when_refused;
    options.hello = hello_;
    const bool has_others = setup_.spec.nodes.max > 1 && !setup_.spec.rendezvous.local_addr;
    if (has_others)
        options.other_addresses =
            reachable_addresses(list_interfaces(), process_environment("NCCL_SOCKET_IFNAME").value_or(""));
    options.heartbeats = heartbeats_of(setup_.spec.rendezvous);
    options.is_ours = server_ != nullptr;
    options.connect_by = by;
    has_joined_ = false;
    link_ = std::make_unique<rdzv::AgentLink>(*loop_, std::move(options), *this);
}

Status Job::build_observation() {
    Observation::Parts parts{
        *loop_, log_, setup_.spec, *agent_, *output_, controller_.get(), id_, setup_.program.name, host_};
    observation_ = std::make_unique<Observation>(std::move(parts));
    if (controller_) controller_->on_event([this](const JobEvent& event) { observation_->decided(event); });
    if (const Status open =
            observation_->open([this](const ControlRequest& request, const RequestReply& reply) {
                inquiry_->ask_job(request, reply);
            });
        !open)
        return open;
    build_questions();
    return {};
}

/// The other nodes hear from this one, and its warden does, while a file system holds up the loop's thread.
void Job::keep_alive() {
    const rdzv::Heartbeats limits = heartbeats_of(setup_.spec.rendezvous);
    const auto beat = [this] {
        warden_->note_alive();
        if (server_) server_->keep_alive();
        if (link_) link_->keep_alive();
    };
    Result<std::unique_ptr<os::Keepalive>> keepalive =
        os::Keepalive::start({limits.interval, kLongestBlockingCall}, beat);
    if (!keepalive)
        return log_.warning("a file system that hangs will make this node silent: {}",
                            keepalive.error().what);
    keepalive_ = *std::move(keepalive);
    loop_->set_keepalive(keepalive_.get());
    // Later than the others give this node up, and before their next generation begins.
    warden_->watch_for_stalls(limits.timeout + limits.interval);
    note_alive();
}

void Job::note_alive() {
    const Duration span = warden_->note_alive();
    if (controller_ && span > heartbeats_of(setup_.spec.rendezvous).timeout) controller_->stood_still();
    loop_->call_after(heartbeats_of(setup_.spec.rendezvous).interval, [this] { note_alive(); });
}

/// As NCCL in the workers reads its variables: any of its processes tells of the whole job.
std::optional<Endpoint> Job::ras_address() const {
    return ras_endpoint(agent_->variable(0, "NCCL_RAS_ENABLE"), agent_->variable(0, "NCCL_RAS_ADDR"));
}

/// What a running job can be asked. Built once: a question may be open when this node becomes the head.
void Job::build_questions() {
    Inquiry::Parts parts{*loop_, [this](rdzv::FromAgent message) { return link_->send(std::move(message)); },
                         nullptr, nullptr};
    inquiry_ = std::make_unique<Inquiry>(std::move(parts));
    answer_hang_looks(*inquiry_, *agent_, host_);
    questions_ = std::make_unique<JobQuestions>(
        JobQuestions::Parts{*loop_, system_, setup_.spec, *agent_, *observation_, *inquiry_, host_,
                            [this](const std::string& why) { controller_->preempt(SIGTERM, why); },
                            [this](int signal) { controller_->forward(signal); }});
    if (controller_) begin_asking_nodes();
}

/// What the head asks its nodes: for others, and for itself to find hangs.
void Job::begin_asking_nodes() {
    inquiry_->becomes_head([this](rdzv::AgentId agent,
                                  rdzv::ToAgent message) { return server_->send(agent, std::move(message)); },
                           [this] { return controller_->world(); });
    if (setup_.spec.hang_timeout == Duration::zero()) return;
    hang_watch_ = std::make_unique<HangWatch>(
        *loop_, *job_log_, *controller_, *inquiry_, setup_.spec.hang_timeout,
        [this] { return ras_address(); },
        [this](const HangVerdict& verdict) { controller_->hang_found(verdict.what, verdict.culprit); });
}

Result<int> Job::run() {
    if (const Status built = build(); !built) {
        if (output_) flush_output();
        return built.error();
    }
    if (setup_.spec.nodes.max > 1) keep_alive();
    if (controller_) begin_control();
    if (const Status ran = loop_->run(); !ran) {
        warden_->end_all();  // no end of a worker is seen any more
        flush_output();
        return ran.error();
    }
    if (moved_) {
        flush_output();
        return 0;
    }
    const int code = say_how_it_ended();
    flush_output();
    end_run();
    return code;
}

// ---- signals

void Job::on_signal(const signalfd_siginfo& info) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD && others_) others_->children_ended();
    if (signal == SIGCHLD) return agent_->on_child_exits();
    const auto found = setup_.spec.signals.find(signal);
    const SignalAction action = found == setup_.spec.signals.end() ? SignalAction::Ignore : found->second;
    if (action != SignalAction::Ignore) observation_->signalled(signal, action);
    if (moved_ && (action == SignalAction::Stop || action == SignalAction::Preempt)) {
        moved_.reset();
        return leave(static_cast<int>(ExitCode::TryAgain));
    }
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
            return ask_to_end("stop", signal);
        case SignalAction::Preempt:
            if (controller_) return controller_->preempt(signal, signal_name(signal));
            return ask_to_end("preempt", signal);
    }
}

/// The controller decides. Where there is none at the moment, this node leaves; so it does when that one is
/// lost before it has answered: nobody else knows what was asked.
void Job::ask_to_end(const char* how, int signal) {
    if (!link_->is_connected() || (heir_ && heir_->is_orphan()))
        return leave(static_cast<int>(ExitCode::TryAgain));
    has_asked_to_end_ = true;
    link_->send(rdzv::Notice{how, std::to_string(signal)});
}

/// Ctrl-Z: the workers have been stopped; now ourselves, as a shell expects, once the other nodes have been
/// told. Its `fg` sends SIGCONT.
void Job::suspend() {
    agent_->forward_signal(SIGTSTP, SignalFrom::Here);
    const auto stop = [] { ::kill(::getpid(), SIGSTOP); };
    if (controller_) server_->when_written(kSuspension, stop);
    else stop();
}

// ---- what the controller says

void Job::on_message(const rdzv::ToAgent& message) {
    std::visit([this](const auto& one) { obey(one); }, message);
}

void Job::obey(const rdzv::StartGeneration& start) {
    observe(start);
    if (heir_) heir_->generation_began();
    hello_.kept_place = start.place;
    hello_.kept_generation = start.generation;
    hello_.kept_restarts = start.restart_count;
    agent_->handle(start);
}

void Job::observe(const rdzv::StartGeneration& start) {
    log_.set_generation(start.generation);
    observation_->generation_started(start);
}

void Job::obey(const rdzv::Shutdown& shutdown) {
    if (controller_) return;
    failure_ = shutdown.why;
    const bool is_fixed = setup_.spec.nodes.min == setup_.spec.nodes.max;
    if (shutdown.exit_code != 0 || agent_->generation() > 0 || !is_fixed) return leave(shutdown.exit_code);
    // Not 0: whoever meant another job than the one that had this endpoint has to notice.
    failure_ = fmt::format("the job '{}' at {} ended without a need for this spare: '{}' did not run here",
                           setup_.spec.rendezvous.run_id, to_string(head_), hello_.command);
    leave(static_cast<int>(ExitCode::Unavailable));
}

void Job::on_connected() {
    has_joined_ = true;
    head_address_ = link_->controller();
    if (head_places_ > 1) head_ = head_address_;
    if (sender_) sender_->begin();
}

void Job::on_lost(const Error& why) {
    if (relay_) relay_->on_lost(fmt::format("the head at {} is lost ({})", to_string(head_), why.what));
    if (exit_code_ || (controller_ && controller_->finished())) return;
    const bool is_gone = why.code == Errc::Closed || why.code == Errc::Timeout;
    const bool follows = heir_ && !heir_->successor().empty() && !heir_->is_orphan() && !has_asked_to_end_;
    if (!controller_ && is_gone && follows) return lose_head(why);
    if (can_rejoin(why)) return rejoin(why);
    failure_ = "the controller: " + why.what;
    if (stays_here(head_) && why.sys == ENETUNREACH)
        failure_ += " (this host's loopback interface is down: ip link set lo up)";
    is_failure_said_ = !agent_->idle();
    if (is_failure_said_) log_.error("{}; killing the workers of this node", failure_);
    leave(static_cast<int>(has_asked_to_end_ ? ExitCode::TryAgain : ExitCode::Unavailable));
}

/// A head that says that this node was taken for lost lives, and may still need the node. A head that fell
/// silent may come back, as one that was stopped does; without a restart left it ends the job then, and
/// nobody waits for it here.
bool Job::can_rejoin(const Error& why) const {
    if (controller_ || has_asked_to_end_) return false;
    const bool is_silent = why.code == Errc::Timeout || rdzv::outage_of(why) == rdzv::Outage::Unreachable;
    const bool has_restarts =
        setup_.spec.restart.max_restarts > 0 || setup_.spec.nodes.min < setup_.spec.nodes.max;
    return why.code == Errc::StaleGeneration || (is_silent && has_joined_ && has_restarts);
}

/// The workers belong to a generation that is over for the other nodes: they are killed, and this node joins
/// as a new one. No grace: the other nodes may have begun the next generation.
void Job::rejoin(const Error& why) {
    log_.warning("the controller: {}; {}joining again", why.what,
                 agent_->idle() ? "" : "killing the workers of this node and ");
    if (heir_ && heir_->is_orphan()) head_ = lost_head_;
    if (heir_) heir_->rejoin();
    // A standby does not count what its head has lost, so this node is not to be taken for that one.
    hello_.rejoins = std::exchange(hello_.instance, fmt::format("{}.{}", id_, ++joins_));
    rejoins_ = true;
    if (agent_->idle()) join_again();
    else agent_->kill_all();  // its last word has us join
}

void Job::join_again() {
    rejoins_ = false;
    loop_->post([this] {
        if (!exit_code_) join({head_}, deadline_after(loop_->now(), return_timeout(setup_.spec.rendezvous)));
    });
}

}  // namespace ddprun
