#include "launcher/node/workers.h"

#include <algorithm>

#include "env/io/proc.h"

namespace ddprun {

pid_t NodeWorkers::running_pid(int local_rank) const {
    const AgentState::Worker& worker = state_of(local_rank);
    return worker.state == WorkerState::Ended ? 0 : worker.pid;
}

std::int64_t NodeWorkers::steps_of(int local_rank) const {
    const RankLine& line = segment->line(local_rank);
    if (const std::uint64_t told = line.step.load(); told > 0) return static_cast<std::int64_t>(told);
    return std::max<std::int64_t>(kept ? kept->commits(local_rank) : -1, line.joined.load() != 0 ? 0 : -1);
}

std::int64_t NodeWorkers::most_steps() const {
    std::int64_t most = -1;
    for (int i = 0; i < size(); ++i) most = std::max(most, steps_of(i));
    return most;
}

bool NodeWorkers::tells_by_letters(int local_rank) const { return !kept || kept->commits(local_rank) < 0; }

std::optional<CommittedTime> NodeWorkers::committed_time(int local_rank) const {
    if (tells_by_letters(local_rank)) return std::nullopt;
    return CommittedTime{steps_of(local_rank), kept->commits(local_rank), kept->useful(local_rank)};
}

CommittedTime NodeWorkers::most_committed() const {
    CommittedTime most;
    for (int i = 0; i < size(); ++i) most.raise_to(committed_time(i).value_or(CommittedTime{}));
    return most;
}

Duration NodeWorkers::slowest_unit(int local_rank) const {
    return kept ? Duration(kept->line(local_rank).slowest_ns.load()) : Duration::zero();
}

std::vector<AgentState::Progress> NodeWorkers::progress() const {
    std::vector<AgentState::Progress> progress;
    if (!kept || !state.is_under_way()) return progress;
    for (int i = 0; i < size(); ++i) {
        const RankLine& line = segment->line(i);
        const std::optional<ProcStat> stat = proc_stat_of(state_of(i).pid);
        progress.push_back(
            {line.joined.load() != 0, stat && stat->is_stopped(),
             line.started_seq.load() + line.finished_seq.load() + kept->line(i).transferred.load(),
             slowest_unit(i)});
    }
    return progress;
}

int NodeWorkers::missing_at_start() const {
    if (!segment || state.is_recovering) return -1;
    int joined = 0, missing = -1;
    for (int i = 0; i < segment->size(); ++i) {
        if (segment->line(i).joined.load() != 0) ++joined;
        else missing = i;
    }
    return joined > 0 ? missing : -1;
}

bool NodeWorkers::has_never_joined(int local_rank) const {
    return order.world_size > 1 && segment && state_of(local_rank).stage < AgentState::Stage::Joined &&
           segment->line(local_rank).joined == 0;
}

void NodeWorkers::end_joining(int rank) {
    if (absent_rank < 0) absent_rank = rank;
    segment->abort(rank);
}

}  // namespace ddprun
