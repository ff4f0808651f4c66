#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launcher/ends/report.h"
#include "launcher/head/job_state.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// What the head knows of the workers that have ended, for its decisions and for the job's report.
class JobRecord {
  public:
    /// Adds a worker's end. The reference is valid until the next call. `has_saved`: it ended after a request
    /// to stop, as asked.
    const WorkerEnd& add(const rdzv::WorkerExited& report, int node, const std::string& host, bool has_saved);
    /// The facts for the decision about this end, which is the last one added.
    FailureFacts facts_of(const WorkerEnd& end);
    /// True when this end, the last one added and reported after a failure, came before it and is another
    /// failure than the logged one.
    bool precedes_known_failure(const WorkerEnd& end, const JobState& state);

    /// All workers are started again.
    void begin_generation();
    /// A recovery in place answers the ends so far. Until it is over they are the cause if it fails.
    void answer_ends();
    void recovered();
    /// The generation is stopped. Answered ends explain only a stop that a failure has caused.
    void stop_generation(bool is_failure);
    void take_over(const JobState& state) { steps_before_ = state.history.furthest_step; }

    void note(const std::vector<std::string>& notes) {
        notes_.insert(notes_.end(), notes.begin(), notes.end());
    }
    void lose_host(const std::string& host) { lost_hosts_.push_back(host); }

    /// The number of workers of this generation that have ended.
    [[nodiscard]] std::size_t ended() const { return ends_.size(); }
    /// The job's time, if the workers that were started last have committed `latest`.
    [[nodiscard]] JobTime time_with(const CommittedTime& latest, const LostTime& lost) const;
    /// How the job ended, as far as the state and the ends of workers tell it.
    [[nodiscard]] JobEnd end(const JobState& state) const;

  private:
    std::vector<WorkerEnd> ends_;           ///< of the current generation, in order
    std::vector<WorkerEnd> answered_ends_;  ///< of earlier ones: see answer_ends()
    std::vector<CommittedTime> committed_;  ///< by earlier starts of all ranks
    std::vector<std::string> notes_;
    std::vector<std::string> lost_hosts_;
    std::uint64_t order_ = 0;
    TimePoint oldest_report_ = TimePoint::max();  ///< of the errors in `ends_`
    std::int64_t steps_before_ = -1;              ///< the most steps of any failed worker
};

/// "rank 5 on node02, signal 9 (SIGKILL)".
std::string one_line(const WorkerEnd& end);

}  // namespace ddprun
