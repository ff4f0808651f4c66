#include "launcher/ends/useful_time.h"

#include <algorithm>

namespace ddprun {

void CommittedTime::raise_to(const CommittedTime& other) {
    steps = std::max(steps, other.steps);
    commits = std::max(commits, other.commits);
    time = std::max(time, other.time);
}

JobTime add_up(const std::vector<CommittedTime>& starts, LostTime lost) {
    JobTime job{std::nullopt, lost};
    std::optional<std::int64_t> next_start;
    for (auto start = starts.rbegin(); start != starts.rend(); ++start) {
        if (start->commits <= 0) continue;
        const std::int64_t end = start->steps > 0 ? start->steps : start->commits;
        // Below 0 where evaluations, which are commits too, make more commits than steps.
        const std::int64_t begin = end - start->commits;
        const std::int64_t kept =
            next_start ? std::clamp<std::int64_t>(*next_start - begin, 0, start->commits) : start->commits;
        const double part = static_cast<double>(kept) / static_cast<double>(start->commits);
        const Duration useful(static_cast<Duration::rep>(static_cast<double>(start->time.count()) * part));
        job.useful = job.useful.value_or(Duration::zero()) + useful;
        job.lost.restarts += start->time - useful;
        next_start = std::min(next_start.value_or(begin), begin);
    }
    return job;
}

}  // namespace ddprun
