#include "launcher/job/node.h"

#include <fmt/core.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "env/os/keepalive.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/ends/error_file.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// The longest time that other nodes delay our suspension.
constexpr Duration kSuspension = std::chrono::seconds(1);

/// The longest time that a file system may block a node before the others give the node up.
constexpr Duration kLongestBlockingCall = std::chrono::minutes(1);

/// How long the end waits for the console; output lost by then is named in the report.
constexpr Duration kFlushLook = std::chrono::milliseconds(100);

}  // namespace

Node::~Node() {
    if (parts_.loop) parts_.loop->set_keepalive(nullptr);
    keepalive_.reset();
    parts_.pmix.reset();  // the PMIx server uses the agent and the link until its end
    parts_.guards.begin_end();
    parts_.log.write_through(nullptr);
}

Status Node::build() {
    // Refuse what can be refused before anything is created.
    const Status room = check_descriptor_limit(
        spec_.output, setup_.workers, static_cast<int>(open_descriptors().size()), setup_.descriptors.now);
    if (!room) return room;
    Result<HeadChoice> choice = choose_head();
    if (!choice) return choice.error();
    if (const Status chosen = choose_token(); !chosen) return chosen;
    std::optional<RequeueRun> run;
    if (choice->is_head) {
        if (const Status possible = check_places(spec_); !possible) return possible;
        Result<std::optional<RequeueRun>> begun = begin_run(RequeueRun::Head::First);
        if (!begun) return begun.error();
        run = *std::move(begun);
    }
    // Not through the log: --quiet must not hide a warning about who can join.
    if (!parts_.token.warning.empty()) ddprun::print(stderr, "ddprun: {}\n", parts_.token.warning);
    if (const Status guarded = parts_.build_guards(choice->is_head); !guarded) return guarded;
    if (const Status looped = build_loop(); !looped) return looped;
    if (const Status served = parts_.build_pmix(); !served) return served;
    if (const Status watched = watch_starter(); !watched) return watched;

    Result<std::unique_ptr<Standby>> standby = listen_if_head(*choice);
    if (!standby) return standby.error();
    if (const Status built = build_node(choice->is_head); !built) return built;
    return choice->is_head ? begin_as_head(**standby, choice->why, std::move(run)) : follow(choice->endpoint);
}

Status Node::choose_token() {
    Result<JobToken> token = setup_.token ? *setup_.token : choose_job_token(spec_, process_environment);
    if (!token) return token.error();
    parts_.token = *std::move(token);
    return {};
}

Status Node::build_loop() {
    Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create(handled_signals());
    if (!loop) return loop.error();
    parts_.loop = *std::move(loop);
    parts_.loop->on_signal([this](const signalfd_siginfo& info) { on_signal(info); });
    parts_.connections = std::make_unique<ConnectionLog>(*parts_.loop, parts_.log);
    parts_.send = [this](rdzv::FromAgent message) { return link_->send(std::move(message)); };
    return {};
}

/// Builds what every node has beside its guards: output, agent, answers to questions, and the link to the
/// head.
Status Node::build_node(bool is_head) {
    const bool is_apart = is_head && spec_.rendezvous.head_is_apart;
    if (const Status output = parts_.build_output(is_apart); !output) return output;
    parts_.build_agent([this](rdzv::FromAgent message) { agent_says(std::move(message)); });
    const Status observed = parts_.build_observation([this](JobStatus& status) {
        if (!head_) return;
        const CommittedTime latest = parts_.agent->most_committed();
        const Controller& controller = head_->controller();
        add_job(status, controller.state(), controller.time_with(latest), latest.time, spec_.recover.mode);
    });
    if (!observed) return observed;
    if (const Status known = parts_.build_hello(is_head); !known) return known;
    HeadLink::Ways ways;
    ways.take_over = [this](Standby& listening, const std::string& why, Inheritance inherited) {
        take_over(listening, why, std::move(inherited));
    };
    ways.give_up = [this](const std::string& why) {
        failure_ = why;
        leave(ExitCode::Unavailable);
    };
    ways.leave = [this](const std::optional<Error>& lost, ExitCode code) {
        lost ? lose_controller(*lost, code) : leave(code);
    };
    ways.end = [this](const rdzv::Shutdown& shutdown) { end(shutdown); };
    link_ = std::make_unique<HeadLink>(parts_, is_head, *this, std::move(ways));
    parts_.agent->on_left([this] { link_->workers_left(); });
    return {};
}

Status Node::begin_as_head(Standby& listening, const std::string& why, std::optional<RequeueRun> run) {
    const Endpoint own = own_endpoint(spec_.rendezvous, listening.server->bound().port);
    head_ = std::make_unique<Head>(parts_, listening, why, std::move(run), std::nullopt);
    if (!spec_.rendezvous.head_is_apart) link_->join(own, true);
    return head_->start_others();
}

Status Node::follow(const Endpoint& head) {
    if (const Status relays = link_->relay_store(); !relays) return relays;
    link_->join(head, false);
    return {};
}

/// Takes the choice made earlier, or decides by the command line and the resolver's answer for the endpoint.
Result<HeadChoice> Node::choose_head() {
    if (setup_.head) return *setup_.head;
    // Where the user said which node is the head, the endpoint's addresses matter only to a node with
    // --iface.
    const RendezvousSpec& rendezvous = spec_.rendezvous;
    const bool is_said = rendezvous.is_host && rendezvous.listen_on.empty();
    const HostFacts facts = detect_host(is_said ? std::nullopt : shared_endpoint(spec_));
    if (!facts.unanswered.empty()) parts_.log.warning("{}", facts.unanswered);
    return ddprun::choose_head(spec_, facts);
}

/// Returns null where another process is the head: then `choice` says so, also if the taken port showed it.
Result<std::unique_ptr<Standby>> Node::listen_if_head(HeadChoice& choice) {
    if (choice.is_head) {
        Result<std::unique_ptr<Standby>> seat = Standby::listen_first(parts_, choice);
        if (seat || !choice.contested || seat.error().sys != EADDRINUSE) return seat;
        choice = {false, *shared_endpoint(spec_), ""};
        parts_.log.info("port {} is taken on this host: joining the controller there", choice.endpoint.port);
    } else if (!spec_.outer_rank && !setup_.sends_output()) {
        // Only the first rank of an outer launcher prints this. Nor is it printed where lines go to the head,
        // as there is no session yet.
        parts_.log.info("the controller is at {} ({})", to_string(choice.endpoint), choice.why);
    }
    return std::unique_ptr<Standby>();
}

/// Stops as after SIGTERM when our starter has ended. Before any worker has run the node leaves, and the head
/// names it as missing.
Status Node::watch_starter() {
    if (!setup_.has_lifeline()) return {};
    return parts_.loop->watch(0, EPOLLIN, [this](std::uint32_t) {
        char ignored[256];
        const ssize_t n = ::read(0, ignored, sizeof ignored);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
        parts_.loop->unwatch(0);
        if (parts_.agent->state().generation == 0) {
            failure_ = "the program that started this ddprun has exited";
            return leave(ExitCode::Unavailable);
        }
        parts_.log.info("the program that started this ddprun has exited: stopping");
        // The starter carried our lines.
        link_->send(rdzv::Remark{"the program that started this ddprun has exited"});
        act_on(SIGTERM, SignalAction::Stop);
    });
}

/// Reads what a batch job's last run has left.
Result<std::optional<RequeueRun>> Node::begin_run(RequeueRun::Head head) {
    std::vector<std::string> lines;  // the log may use a connection
    Result<std::optional<RequeueRun>> run = [&] {
        const os::BlockingCall uses_files(parts_.loop ? parts_.loop->keepalive() : nullptr);
        return RequeueRun::begin(spec_.requeue, spec_.output.log_dir, head,
                                 [&](const std::string& line) { lines.push_back(line); });
    }();
    for (const std::string& line : lines) parts_.log.info("{}", line);
    return run;
}

void Node::take_over(Standby& standby, const std::string& why, Inheritance inherited) {
    Result<std::optional<RequeueRun>> run = begin_run(RequeueRun::Head::Successor);
    if (!run) parts_.log.warning("{}; the job will not be put back into its queue", run.error().what);
    head_ = std::make_unique<Head>(parts_, standby, why, run ? *std::move(run) : std::nullopt,
                                   std::move(inherited));
}

/// Starts a thread that sends heartbeats to the other nodes and the warden while a file system blocks the
/// loop's thread.
void Node::keep_alive() {
    const rdzv::Heartbeats limits = heartbeats_of(spec_.rendezvous);
    const auto beat = [this] {
        parts_.guards.warden->note_alive();
        if (head_) head_->keep_alive();
        link_->keep_alive();
    };
    Result<std::unique_ptr<os::Keepalive>> keepalive =
        os::Keepalive::start({limits.interval, kLongestBlockingCall}, beat);
    if (!keepalive)
        return parts_.log.warning("a file system that hangs will make this node silent: {}",
                                  keepalive.error().what);
    keepalive_ = *std::move(keepalive);
    parts_.loop->set_keepalive(keepalive_.get());
    // The warden acts after the others have given this node up, and before their next generation begins.
    parts_.guards.warden->watch_for_stalls(limits.timeout + limits.interval);
    note_alive();
}

void Node::note_alive() {
    const rdzv::Heartbeats limits = heartbeats_of(spec_.rendezvous);
    const Duration span = parts_.guards.warden->note_alive();
    if (head_ && span > limits.timeout) head_->controller().stood_still();
    parts_.loop->call_after(limits.interval, [this] { note_alive(); });
}

Result<std::optional<int>> Node::run() {
    if (const Status built = build(); !built) {
        if (parts_.output) flush_output();
        return built.error();
    }
    if (spec_.nodes.max > 1) keep_alive();
    if (spec_.nodes.max > 1 && wants_fabric(spec_))
        own_name_.emplace([host = parts_.host] { return resolve({host, 0}, 0); });
    if (const Status ran = parts_.loop->run(); !ran) {
        parts_.guards.warden->end_all();  // the loop no longer sees a worker's end
        flush_output();
        return ran.error();
    }
    if (head_ && head_->moved() && !exit_code_) {
        flush_output();
        setup_.meeting.reset();
        setup_.token = {parts_.token.token, "", ""};
        setup_.head_elsewhere.clear();
        for (const std::string& address : head_->moved()->addresses)
            setup_.head_elsewhere.push_back({address, static_cast<std::uint16_t>(head_->moved()->port)});
        setup_.head = {false, setup_.head_elsewhere.front(), "the job goes on there"};
        return std::optional<int>();
    }
    const int code = report_end();
    flush_output();
    if (head_) head_->put_back();
    return std::optional(code);
}

// ---- signals

void Node::on_signal(const signalfd_siginfo& info) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD && head_) head_->children_ended();
    if (signal == SIGCHLD) return parts_.agent->on_child_exits();
    const auto found = spec_.signals.find(signal);
    const SignalAction action = found == spec_.signals.end() ? SignalAction::Ignore : found->second;
    if (action != SignalAction::Ignore) parts_.observation->signalled(signal, action);
    act_on(signal, action);
}

void Node::act_on(int signal, SignalAction action) {
    const bool is_stop = action == SignalAction::Stop;
    switch (action) {
        case SignalAction::Ignore: return;
        case SignalAction::Forward:
            if (head_) head_->controller().forward(signal);
            else parts_.agent->forward_signal(signal, SignalFrom::Here);
            if (signal == SIGTSTP) suspend();
            return;
        case SignalAction::Stop:
        case SignalAction::Preempt: break;
    }
    if (head_ && head_->moved()) return leave(ExitCode::TryAgain);
    if (head_ && is_stop) return head_->controller().stop(signal);
    if (head_) return head_->controller().preempt(signal, signal_name(signal));
    link_->ask_to_end({signal, !is_stop});
}

/// Ctrl-Z: stops the workers, then ourselves, as a shell expects, once the other nodes have been told. The
/// shell's `fg` sends SIGCONT.
void Node::suspend() {
    parts_.agent->forward_signal(SIGTSTP, SignalFrom::Here);
    const auto stop = [] { ::kill(::getpid(), SIGSTOP); };
    if (head_) head_->when_written(kSuspension, stop);
    else stop();
}

// ---- messages of the agent and the controller

void Node::agent_says(rdzv::FromAgent message) {
    if (std::holds_alternative<rdzv::WorkersStarted>(message)) {
        parts_.observation->workers_started();
        look_for_mpi_of_workers();
    }
    if (!head_)  // the head hears of all nodes, its own too
        std::visit([this](const auto& one) { parts_.observation->node_says(one, parts_.host); }, message);
    const bool is_last = std::holds_alternative<rdzv::GenerationEnded>(message);
    link_->send(std::move(message));
    if (is_last && exit_code_) stop();
    else if (is_last) link_->workers_ended();
}

/// Looks once per job, in the memory of the head's first worker.
void Node::look_for_mpi_of_workers() {
    const bool may_lack_server = !parts_.pmix && spec_.pmix == PmixUse::Auto && !spec_.pass_mpi_env &&
                                 parts_.pmix_wish.warning.empty();
    const bool may_be_several = setup_.workers > 1 || spec_.nodes.max > 1;
    if (!head_ || !may_lack_server || !may_be_several || parts_.agent->state().generation != 1) return;
    look_for_mpi(*parts_.loop, parts_.log, [this] {
        const std::vector<AgentState::Worker>& workers = parts_.agent->state().workers;
        return workers.empty() || workers.front().state == WorkerState::Ended ? 0 : workers.front().pid;
    });
}

void Node::obey(const rdzv::StartGeneration& start) {
    if (exit_code_) return;  // this node leaves, and its workers end
    if (own_name_) name_network();
    parts_.log.set_generation(start.generation);
    parts_.observation->generation_started(start);
    link_->generation_began(start);
    parts_.agent->handle(start);
}

/// Tells gloo by which interface the other nodes are reached. The resolver is not waited for.
void Node::name_network() {
    if (std::optional<Result<SocketAddresses>> answer = own_name_->wait(MonotonicClock::now())) {
        const SocketAddresses found = (*std::move(answer)).value_or({});
        for (const SocketAddress& one : found) own_name_at_.push_back(numeric_host(*one.get()));
    }
    const std::string reached = head_ ? head_->reached_at() : link_->own_address();
    parts_.agent->reach_others_by(reached, own_name_at_);
}

void Node::end(const rdzv::Shutdown& shutdown) {
    failure_ = shutdown.why;
    const bool is_fixed = spec_.nodes.min == spec_.nodes.max;
    if (shutdown.exit_code != 0 || parts_.agent->generation() > 0 || !is_fixed)
        return leave(static_cast<ExitCode>(shutdown.exit_code));
    // Not 0: a user who meant another job than the one at this endpoint has to notice.
    failure_ = fmt::format("the job '{}' at {} ended without a need for this spare: '{}' did not run here",
                           spec_.rendezvous.run_id, to_string(link_->head()), parts_.hello.command);
    leave(ExitCode::Unavailable);
}

void Node::on_connected() {
    link_->connected();
    if (parts_.sender) parts_.sender->begin();
}

void Node::on_lost(const Error& why) {
    link_->end_requests(why);
    if (!exit_code_ && !(head_ && head_->finished())) link_->lost(why);
}

void Node::lose_controller(const Error& why, ExitCode code) {
    failure_ = "the controller: " + why.what;
    if (link_->head_stays_here() && why.sys == ENETUNREACH)
        failure_ += " (this host's loopback interface is down: ip link set lo up)";
    is_failure_said_ = !parts_.agent->idle();
    if (is_failure_said_) parts_.log.error("{}; killing the workers of this node", failure_);
    leave(code);
}

// ---- the end

/// Ends this node's part; waits for workers that still run.
void Node::leave(ExitCode code) {
    exit_code_ = static_cast<int>(code);
    // Its GenerationEnded stops the loop.
    if (parts_.agent->idle()) stop();
    else if (parts_.agent->state().is_left()) link_->end_workers(failure_);
    else parts_.agent->kill_all();
}

void Node::stop() {
    if (head_) head_->stop(kFarewell / 2);
    else parts_.loop->stop();
}

int Node::report_end() {
    parts_.output->flush(deadline_after(MonotonicClock::now(), kFlushLook));  // the report names lost output
    parts_.connections->sum_up();
    if (head_ && !exit_code_) return head_->report_end();
    // A head without a link to itself has left the job, too.
    if (!failure_.empty() && !is_failure_said_) {
        for (const std::string_view line : split(failure_, '\n')) parts_.log.error("{}", line);
    }
    const int code = exit_code_.value_or(static_cast<int>(ExitCode::Internal));
    parts_.observation->finished(code, failure_);
    std::optional<WorkerEnd> cause;
    if (const std::optional<rdzv::WorkerExited>& first = parts_.agent->first_failure())
        cause = WorkerEnd{*first, 0, parts_.host, {}, std::nullopt, 0};
    if (code != 0)
        tell_launcher_above(
            parts_.log, {.report = cause ? parts_.agent->error_report(cause->rank) : "", .message = failure_},
            cause ? &*cause : nullptr, code);
    return code;
}

void Node::flush_output() {
    write_last_output(*parts_.output, parts_.sender.get(), *parts_.loop, parts_.log, kFarewell,
                      [this] { return link_ && link_->is_connected(); });
}

}  // namespace ddprun
