#include "launcher/head/job_record.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>

#include "launcher/ends/explain.h"

namespace ddprun {
namespace {

CommittedTime committed_by(const std::vector<WorkerEnd>& ends) {
    CommittedTime most;
    for (const WorkerEnd& end : ends) {
        if (end.commits >= 0) most.raise_to({end.steps, end.commits, Duration(end.useful_ns)});
    }
    return most;
}

}  // namespace

std::string one_line(const WorkerEnd& end) {
    return fmt::format("rank {} on {}, {}", end.rank, end.host, describe_end(end));
}

const WorkerEnd& JobRecord::add(const rdzv::WorkerExited& report, int node, const std::string& host,
                                bool has_saved) {
    WorkerEnd end{report, node, host, MonotonicClock::now(), std::nullopt, ++order_};
    if (report.error_age_ns >= 0) end.error_reported = end.ended - Duration(report.error_age_ns);
    if (end.meaning.empty()) end.meaning = explain_end(end);
    end.by_us = end.by_us || has_saved;
    ends_.push_back(std::move(end));
    return ends_.back();
}

FailureFacts JobRecord::facts_of(const WorkerEnd& end) {
    // A worker that does not count its steps is taken to have made progress.
    const bool progressed = end.steps < 0 || end.steps > steps_before_;
    if (end.failed() && !end.by_us) steps_before_ = std::max(steps_before_, end.steps);
    return {!end.exec_failure.empty(), end.signaled, end.status, progressed, end.meaning};
}

/// All ends are searched only when this one can be the cause: a large job has many.
bool JobRecord::precedes_known_failure(const WorkerEnd& end, const JobState& state) {
    if (end.by_us || !end.error_reported || *end.error_reported >= oldest_report_) return false;
    oldest_report_ = *end.error_reported;
    const bool after_a_failure =
        state.phase == JobState::Phase::Stopping && !state.end.stopped_by && !state.end.preempted;
    if (!after_a_failure || root_cause(ends_, state.end.failure_decided) != &end) return false;
    // An exception that all ranks throw is logged once, whichever rank was the first.
    const WorkerEnd* known = root_cause(std::span(ends_).first(ends_.size() - 1), state.end.failure_decided);
    return known == nullptr || !failed_alike(*known, end);
}

void JobRecord::begin_generation() {
    committed_.push_back(committed_by(ends_));
    ends_.clear();
    notes_.clear();
    recovered();
}

void JobRecord::answer_ends() {
    std::ranges::move(ends_, std::back_inserter(answered_ends_));
    ends_.clear();
}

void JobRecord::recovered() {
    answered_ends_.clear();
    oldest_report_ = TimePoint::max();
}

void JobRecord::stop_generation(bool is_failure) {
    if (is_failure) ends_.insert(ends_.begin(), answered_ends_.begin(), answered_ends_.end());
    answered_ends_.clear();
}

JobTime JobRecord::time_with(const CommittedTime& latest, const LostTime& lost) const {
    std::vector<CommittedTime> starts = committed_;
    starts.push_back(latest);
    return add_up(starts, lost);
}

JobEnd JobRecord::end(const JobState& state) const {
    JobEnd end;
    end.generation = static_cast<int>(state.generation);
    end.restarts_used = state.restarts_used;
    end.recoveries = state.recovery.recoveries;
    end.time = time_with(committed_by(ends_), state.end.lost);
    end.stopped_by_signal = state.end.stopped_by;
    end.preempted = state.end.preempted;
    end.hung = state.end.hung;
    end.out_of_time = state.end.out_of_time;
    end.failure = state.end.failure;
    end.failure_decided = state.end.failure_decided;
    end.steps = state.history.furthest_step;
    end.workers = ends_;
    end.notes = notes_;
    end.lost_hosts = lost_hosts_;
    return end;
}

}  // namespace ddprun
