#include "launcher/node/lifelines.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "env/io/socket.h"
#include "env/lifeline.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxStacks = 512 * 1024;  ///< of one worker, until take_stacks()
constexpr int kPacketsAtOnce = 64;              ///< a worker that floods us must not keep us from the others

bool is_of_one_process(std::string_view name) { return name == "DDPRUN_TOKEN" || name.ends_with("_FD"); }

/// Takes the number at the beginning of `text`, and the space after it.
Result<std::uint64_t> take_number(std::string_view& text) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const Result<std::uint64_t> number = parse_uint(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    return number;
}

}  // namespace

void Lifelines::tell(int local_rank, std::string_view packet) const {
    const Worker& worker = workers_.at(local_rank);
    if (worker.lifeline) send_packet(worker.lifeline.get(), packet, -1, MSG_DONTWAIT);
}

void Lifelines::send_generation(int local_rank, const WorkerEnv& env) const {
    std::string packet(1, lifeline::kGeneration);
    for (const auto& [name, value] : to_environment(env)) {
        if (is_of_one_process(name)) continue;
        if (packet.size() > 1) packet += '\n';
        packet += name + '=' + value;
    }
    const UniqueFd& lifeline = workers_.at(local_rank).lifeline;
    if (!lifeline || send_packet(lifeline.get(), packet, workers_.segment->fd(), MSG_DONTWAIT) < 0)
        log_.debug("rank {} does not read its lifeline", workers_.rank_of(local_rank));
}

void Lifelines::listen(int local_rank) {
    const int fd = workers_.at(local_rank).lifeline.get();
    const Status watched = loop_.watch(fd, EPOLLIN, [this, local_rank](std::uint32_t) { read(local_rank); });
    if (!watched)
        log_.warning("rank {}: no lifeline: {}", workers_.rank_of(local_rank), watched.error().what);
}

void Lifelines::close(Worker& worker) {
    if (!worker.lifeline) return;
    loop_.unwatch(worker.lifeline.get());
    worker.lifeline.reset();
}

void Lifelines::close_all() {
    for (Worker& worker : workers_.all) close(worker);
}

void Lifelines::read(int local_rank) {
    Worker& worker = workers_.at(local_rank);
    for (int i = 0; i < kPacketsAtOnce && worker.lifeline; ++i) {
        char packet[lifeline::kMaxPacket];
        const ssize_t n = ::recv(worker.lifeline.get(), packet, sizeof packet, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        // The worker has ended before it had read all from us. What it has said comes after this error.
        if (n < 0 && errno == ECONNRESET) continue;
        if (n <= 0) return close(worker);
        hear(local_rank, packet[0], {packet + 1, static_cast<std::size_t>(n) - 1});
    }
}

void Lifelines::hear(int local_rank, char letter, std::string_view text) {
    if (hear_of_recovery(local_rank, letter, text)) return;
    std::string& stacks = workers_.at(local_rank).stacks;
    if (letter == lifeline::kHeartbeat || letter == lifeline::kReady) {
        RankLine& line = workers_.segment->line(local_rank);
        line.progress_ns.store(MonotonicClock::now().time_since_epoch().count(), std::memory_order_relaxed);
        if (const Result<std::uint64_t> steps = parse_uint(text))
            line.step.store(*steps, std::memory_order_relaxed);
    } else if (letter == lifeline::kStack && stacks.size() < kMaxStacks) {
        stacks.append(text);
    }
}

/// False: the packet is not about recovery.
bool Lifelines::hear_of_recovery(int local_rank, char letter, std::string_view text) {
    if (letter == lifeline::kReady) return hear_ready(local_rank, text);
    if (letter == lifeline::kCome) {
        if (const Result<std::uint64_t> generation = take_number(text))
            feed_(agent_event::Came{local_rank, *generation});
        return true;
    }
    if (letter == lifeline::kLetGo) {
        hear_let_go(local_rank, text);
        return true;
    }
    if (letter != lifeline::kFinished) return false;
    if (const Result<std::uint64_t> generation = take_number(text))
        feed_(agent_event::StageReached{local_rank, AgentState::Stage::Finished, *generation});
    return true;
}

bool Lifelines::hear_ready(int local_rank, std::string_view text) {
    constexpr std::string_view kInPlace = "in-place ", kRestart = "restart ";
    if (text.starts_with(kRestart)) {
        feed_(agent_event::Refused{local_rank, std::string(text.substr(kRestart.size()))});
        return true;
    }
    if (!text.starts_with(kInPlace)) return false;
    text.remove_prefix(kInPlace.size());
    const Result<std::uint64_t> generation = take_number(text);
    if (!generation) return true;
    feed_(agent_event::StageReached{local_rank, AgentState::Stage::Announced});
    // Not its steps when the last worker has joined: by then it may have done some more.
    const Result<std::uint64_t> steps = take_number(text);
    const std::uint64_t told =
        workers_.tells_by_letters(local_rank) ? 0 : workers_.segment->line(local_rank).step.load();
    workers_.at(local_rank).began_at = steps ? static_cast<std::int64_t>(told > 0 ? told : *steps) : -1;
    if (*generation > 0) feed_(agent_event::StageReached{local_rank, AgentState::Stage::Joined, *generation});
    return true;
}

void Lifelines::hear_let_go(int local_rank, std::string_view text) {
    const Result<std::uint64_t> generation = take_number(text);
    const Result<std::uint64_t> steps = take_number(text);
    if (!generation || !steps) return;
    if (RankLine& line = workers_.segment->line(local_rank); workers_.tells_by_letters(local_rank))
        line.step.store(std::max(line.step.load(), *steps));
    const std::string when =
        workers_.abort_set == TimePoint{}
            ? ""
            : ", " + format_duration(MonotonicClock::now() - workers_.abort_set) + " after it was told";
    log_.debug("rank {} has left generation {} at step {}{}: {}", workers_.rank_of(local_rank), *generation,
               *steps, when, printable(text));
    feed_(agent_event::LetGo{local_rank, *generation, printable(text)});
}

std::string Lifelines::take_stacks(int local_rank) {
    if (local_rank >= workers_.size()) return {};
    read(local_rank);
    return std::exchange(workers_.at(local_rank).stacks, {});
}

}  // namespace ddprun
