#include "launcher/node/agent.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "env/io/socket.h"
#include "env/lifeline.h"
#include "env/text.h"
#include "launcher/machine/gpu/nvml.h"
#include "launcher/node/worker_memory.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxStacks = 512 * 1024;  ///< of one worker, until take_stacks()
constexpr Duration kScalarPause = std::chrono::seconds(1);
constexpr std::size_t kScalarsInMessage = 1024;

}  // namespace

Agent::Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log,
             AgentConfig config, Send send)
    : loop_(loop),
      system_(system),
      output_(output),
      warden_(warden),
      log_(log),
      config_(std::move(config)),
      send_(std::move(send)),
      null_(::open("/dev/null", O_RDWR | O_CLOEXEC)),
      gpu_release_(loop, system, log) {}

Agent::~Agent() {
    for (const Worker& worker : workers_) {
        if (worker.lifeline) loop_.unwatch(worker.lifeline.get());
    }
    loop_.cancel(deadline_timer_);
    loop_.cancel(watch_timer_);
    loop_.cancel(rehearsal_timer_);
    loop_.cancel(scalars_timer_);
}

void Agent::feed(const AgentEvent& event) {
    const bool was_left = state_.is_left();
    const std::vector<AgentAction> actions = step(state_, event, MonotonicClock::now());
    const bool is_left = state_.is_left();
    for (const AgentAction& action : actions) {
        std::visit([this](const auto& one) { perform(one); }, action);
    }
    if (is_left && !was_left) left_handler_();
}

void Agent::perform(const agent_action::SetDeadline& action) {
    loop_.cancel(deadline_timer_);
    deadline_timer_ = 0;
    if (action.when == kNever) return;
    deadline_timer_ = loop_.call_at(action.when, [this] { feed(agent_event::DeadlinePassed{progress()}); });
}

// ---- orders of the controller

void Agent::handle(const rdzv::StartGeneration& order) {
    const bool goes_on = state_.is_under_way() || state_.phase == AgentState::Phase::Stopping;
    if (order.in_place && goes_on && kept_) return recover(order);
    const bool are_ending =
        state_.phase == AgentState::Phase::Killing || state_.phase == AgentState::Phase::Sweeping;
    if (order.in_place && are_ending) {  // the head hears of their end under the number that it knows
        order_.generation = state_.generation = order.generation;
        return;
    }
    remember_last_workers();
    if (const Status prepared = prepare(order); !prepared) return fail_start(prepared.error().what);
    const bool await_gpus =
        !last_workers_.empty() && config_.spec.gpu_memory_wait > Duration::zero() && nvml::may_be_there();
    feed(agent_event::StartRequested{order.generation, static_cast<int>(workers_.size()), await_gpus,
                                     kept_ ? config_.spec.recover.within : Duration::zero(), order.in_place,
                                     Duration(order.start_limit_ns)});
}

/// Keeps the older workers where the last generation was stopped before it had any (while it waited for the
/// GPUs).
void Agent::remember_last_workers() {
    std::vector<pid_t> pids;
    for (const AgentState::Worker& worker : state_.workers) {
        if (worker.pid != 0) pids.push_back(worker.pid);
    }
    if (!pids.empty()) last_workers_ = std::move(pids);
}

/// Reports that this node cannot start its workers, for a reason that is not theirs.
void Agent::fail_start(const std::string& why) {
    rdzv::WorkerExited failure{};
    failure.generation = order_.generation;
    failure.rank = order_.first_rank;
    failure.status = 1;
    failure.exec_failure = why;
    send_(failure);
    rdzv::GenerationEnded ended{};
    ended.generation = order_.generation;
    send_(ended);
}

void Agent::handle(const rdzv::StopGeneration& order) {
    if (order.generation != order_.generation) return;
    stop_begins();
    if (segment_ && order.failed_rank >= 0) segment_->abort(order.failed_rank);
    if (const int missing = missing_at_start(); missing >= 0) segment_->abort(order_.first_rank + missing);
    if (segment_) segment_->decide_stop(order.stop_at);
    if (const int alive = state_.alive(); alive > 0 && state_.phase == AgentState::Phase::Running) {
        log_.info("stopping {} worker{}: {}", alive, alive == 1 ? "" : "s", order.why);
    }
    if (order.signal == SIGKILL) return kill_all();
    feed(agent_event::StopRequested{order.signal, Duration(order.grace_ns), order.failed_rank >= 0});
    if (order.signal == SIGTERM && order.failed_rank >= 0) end_waiting_for_agreement();
}

/// The local rank that the others wait for, as not all have joined libddp's first group; -1: none. It has
/// nothing to save, and they would wait until the grace is over.
int Agent::missing_at_start() const {
    if (!segment_ || state_.is_recovering) return -1;
    int joined = 0, missing = -1;
    for (int i = 0; i < segment_->size(); ++i) {
        if (segment_->line(i).joined.load() != 0) ++joined;
        else missing = i;
    }
    return joined > 0 ? missing : -1;
}

/// Ends workers that take SIGTERM for the beginning of an agreed stop, which does not come after a failure.
void Agent::end_waiting_for_agreement() {
    for (std::size_t i = 0; segment_ && i < state_.workers.size(); ++i) {
        const AgentState::Worker& worker = state_.workers[i];
        const bool waits = segment_->line(static_cast<int>(i)).outlives_term.load() != 0;
        if (waits && worker.pid != 0 && worker.state == WorkerState::Stopping)
            (void)system_.signal_process(worker.pid, SIGKILL);
    }
}

/// Notes the time: a worker that reports an error from now on does so because of us (its collectives end, its
/// peers are signalled first).
void Agent::stop_begins() {
    const TimePoint now = MonotonicClock::now();
    for (Worker& worker : workers_) worker.stop_asked = std::min(worker.stop_asked, now);
    if (config_.pmix != nullptr) config_.pmix->end_waiting("the workers are being stopped");
}

void Agent::handle(const rdzv::StopProposal& proposal) {
    if (proposal.generation != order_.generation || !segment_) return;
    if (proposal.step > 0) segment_->propose_stop(proposal.step, proposal.why);
    rdzv::StepsDone done{order_.generation, proposal.step, state_.phase == AgentState::Phase::Running, 0};
    for (std::size_t i = 0; done.listens && i < state_.workers.size(); ++i) {
        if (state_.workers[i].state == WorkerState::Ended) continue;
        const std::uint64_t asked = segment_->line(static_cast<int>(i)).asked.load(std::memory_order_acquire);
        done.listens = asked > 0;
        if (done.listens) done.highest = std::max(done.highest, asked - 1);
    }
    send_(done);
}

void Agent::handle(const rdzv::Notice& notice) {
    if (notice.kind == "signal") {
        if (const Result<std::int64_t> signal = parse_int(notice.text))
            forward_signal(static_cast<int>(*signal), SignalFrom::Head);
        return;
    }
    if (notice.kind == "waiting") return log_.info("{}", printable(notice.text));
    if (notice.kind == "kill") return kill_failed(notice.text);
    if (notice.kind == "lost" && segment_) {
        segment_->abort(static_cast<int>(parse_int(notice.text).value_or(0)));
        return feed(agent_event::NoneFollows{});
    }
    if (notice.kind == "absent" && segment_)
        return end_joining(static_cast<int>(parse_int(notice.text).value_or(0)));
    if (notice.kind != "preempt") return;
    const std::string packet = lifeline::kPreempt + notice.text.substr(0, lifeline::kMaxPacket - 1);
    for (int i = 0; i < static_cast<int>(workers_.size()); ++i) tell(i, packet);
}

std::optional<std::string> Agent::variable(int local_rank, std::string_view name) const {
    const auto index = static_cast<std::size_t>(local_rank);
    if (index < workers_.size()) {
        const WorkerPlan& plan = workers_[index].plan;
        for (const auto& [key, value] : plan.environment) {
            if (key == name) return value;
        }
        if (std::find(plan.removed.begin(), plan.removed.end(), name) != plan.removed.end())
            return std::nullopt;
    }
    const std::string start = std::string(name) + '=';
    for (const std::string& entry : config_.environment) {
        if (entry.starts_with(start)) return entry.substr(start.size());
    }
    return std::nullopt;
}

void Agent::kill_all() {
    stop_begins();
    feed(agent_event::KillRequested{});
}

void Agent::forward_signal(int signal, SignalFrom from) {
    if (!forwarded_.is_new(signal, from, loop_.now())) return;
    for (const AgentState::Worker& worker : state_.workers) {
        if (worker.pid != 0 && worker.state != WorkerState::Ended)
            (void)system_.signal_group(worker.pid, signal);
    }
}

bool Agent::signal_worker(int local_rank, int signal) {
    const AgentState::Worker& worker = state_.workers[static_cast<std::size_t>(local_rank)];
    if (worker.pid == 0 || worker.state == WorkerState::Ended) return false;
    return system_.signal_group(worker.pid, signal).has_value();
}

// ---- scalars

/// Only rank 0's: the other ranks usually have the same curves.
bool Agent::reads_scalars() const {
    return !config_.spec.tensorboard.empty() && order_.first_rank == 0 && segment_ != nullptr &&
           segment_->scalars(0) != nullptr;
}

void Agent::send_scalars_later() {
    loop_.cancel(scalars_timer_);
    scalars_timer_ = loop_.call_after(kScalarPause, [this] {
        send_scalars();
        send_scalars_later();
    });
}

void Agent::send_scalars() {
    for (std::size_t sent = 0; sent < kScalarRecords; sent += kScalarsInMessage) {
        const std::vector<ToldScalar> scalars = take_scalars(*segment_->scalars(0), kScalarsInMessage);
        if (!scalars.empty())
            send_(rdzv::WorkerScalars{order_.generation, rdzv::Blob(encode_scalars(scalars))});
        if (scalars.size() < kScalarsInMessage) return;
    }
}

// ---- lifelines

/// Sends a packet to a worker; one that does not read its lifeline misses it.
void Agent::tell(int local_rank, std::string_view packet) const {
    const Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    if (worker.lifeline) send_packet(worker.lifeline.get(), packet, -1, MSG_DONTWAIT);
}

void Agent::listen_to_lifeline(int local_rank) {
    const int fd = workers_[static_cast<std::size_t>(local_rank)].lifeline.get();
    const Status watched =
        loop_.watch(fd, EPOLLIN, [this, local_rank](std::uint32_t) { read_lifeline(local_rank); });
    if (!watched)
        log_.warning("rank {}: no lifeline: {}", order_.first_rank + local_rank, watched.error().what);
}

void Agent::read_lifeline(int local_rank) {
    Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    constexpr int kPacketsAtOnce = 64;  // a worker that floods us must not keep us from the others
    for (int i = 0; i < kPacketsAtOnce && worker.lifeline; ++i) {
        char packet[lifeline::kMaxPacket];
        const ssize_t n = ::recv(worker.lifeline.get(), packet, sizeof packet, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        // The worker has ended before it had read all from us. What it has said comes after this error.
        if (n < 0 && errno == ECONNRESET) continue;
        if (n <= 0) {
            loop_.unwatch(worker.lifeline.get());
            worker.lifeline.reset();
            return;
        }
        hear(local_rank, packet[0], {packet + 1, static_cast<std::size_t>(n) - 1});
    }
}

void Agent::hear(int local_rank, char letter, std::string_view text) {
    if (hear_of_recovery(local_rank, letter, text)) return;
    Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    if (letter == lifeline::kHeartbeat || letter == lifeline::kReady) {
        RankLine& line = segment_->line(local_rank);
        line.progress_ns.store(MonotonicClock::now().time_since_epoch().count(), std::memory_order_relaxed);
        if (const Result<std::uint64_t> steps = parse_uint(text))
            line.step.store(*steps, std::memory_order_relaxed);
    } else if (letter == lifeline::kStack && worker.stacks.size() < kMaxStacks) {
        worker.stacks.append(text);
    }
}

std::string Agent::take_stacks(int local_rank) {
    if (local_rank >= static_cast<int>(workers_.size())) return {};
    read_lifeline(local_rank);
    return std::exchange(workers_[static_cast<std::size_t>(local_rank)].stacks, {});
}

}  // namespace ddprun
