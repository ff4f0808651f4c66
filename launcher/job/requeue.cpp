#include "launcher/job/requeue.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/text.h"
#include "launcher/head/job_state.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

bool made_progress(const RunState& before, const RunEnd& end) {
    // A worker that uses libddp without reporting steps stays at step 0.
    if (end.steps > 0 || before.last_step > 0) return end.steps > before.last_step;
    return end.ran >= kProgressAge;
}

/// The reason why the job is not put back; "" when it is.
std::string obstacle_to(const RequeueSpec& spec, const RunState& state, const RunEnd& end,
                        const std::string& stop_file) {
    using enum RunEnd::Kind;
    if (end.kind == Stopped) return fmt::format("it was stopped by {}, not by its walltime", end.what);
    if (end.kind == Final) return end.what;
    if (!stop_file.empty()) return fmt::format("{} is there", stop_file);
    if (state.run > spec.limit)
        return fmt::format("all {} requeues are used up (--requeue-limit)", spec.limit);
    const bool progressed = state.runs_without_progress == 0;
    if (end.kind == Failed && !progressed)
        return fmt::format("it failed without any progress in this run: {}", end.what);
    if (state.runs_without_progress >= kStuckRuns)
        return fmt::format("{} runs in a row made no progress", state.runs_without_progress);
    return "";
}

/// The manual remedy for an element of a PBS array, which cannot depend on its own last run. A range needs
/// two ends: 3-4:2 is 3.
std::string alone_by_hand(std::string_view element) {
    const std::size_t begin = element.find('[') + 1;
    const Result<std::int64_t> index =
        parse_int_between(element.substr(begin, element.find(']', begin) - begin), 0, INT32_MAX);
    const std::string range = index ? fmt::format("{}-{}:2", *index, *index + 1) : "N-M:2";
    return fmt::format(
        "PBS puts no element of an array back alone ({}); when it has ended: qsub -J {} SCRIPT", element,
        range);
}

}  // namespace

RunEnd run_end(const JobEnd& end, bool at_walltime) {
    RunEnd result;
    result.generation = end.generation;
    result.restarts_used = end.restarts_used;
    result.steps = end.steps;
    result.ran = end.wall;
    result.what = headline(end);
    const WorkerEnd* cause = root_cause(end);
    const FailureFacts facts =
        cause == nullptr ? FailureFacts{}
                         : FailureFacts{!cause->exec_failure.empty(), cause->signaled, cause->status, true};
    const std::string final = cause == nullptr ? "" : permanent_failure(facts);
    using enum RunEnd::Kind;
    if (exit_code(end) == static_cast<int>(ExitCode::Success)) result.kind = Succeeded;
    else if (!final.empty()) result.kind = Final, result.what = final;
    else if (end.preempted || end.out_of_time || at_walltime) result.kind = TimeUp;
    else if (end.stopped_by_signal) result.kind = Stopped, result.what = signal_name(*end.stopped_by_signal);
    else if (exit_code(end) == static_cast<int>(ExitCode::TryAgain)) result.kind = Unfinished;
    return result;
}

RequeueDecision decide_requeue(const RequeueSpec& spec, RunState state, const RunEnd& end,
                               const std::string& stop_file) {
    state.generation = end.generation;
    state.restarts_used = end.restarts_used;
    state.runs_without_progress = made_progress(state, end) ? 0 : state.runs_without_progress + 1;
    state.last_step = std::max(state.last_step, end.steps);

    RequeueDecision decision;
    if (end.kind != RunEnd::Kind::Succeeded) decision.why = obstacle_to(spec, state, end, stop_file);
    decision.requeue = end.kind != RunEnd::Kind::Succeeded && decision.why.empty();
    if (decision.requeue) {
        const std::string reason = end.kind == RunEnd::Kind::TimeUp ? "its time is up" : end.what;
        decision.why = fmt::format("{}; run {} of at most {}", reason, state.run + 1, spec.limit + 1);
    }
    state.phase = decision.requeue ? "queued" : "ended";
    state.why = decision.why;
    decision.state = std::move(state);
    return decision;
}

Result<RequeueWay> requeue_way(const std::optional<BatchJob>& job, const std::string& script) {
    const auto cannot = [](std::string why) { return Error{Errc::InvalidArgument, std::move(why), 0}; };
    if (!job) return cannot("this is no job of PBS or Slurm");
    if (job->scheduler == Scheduler::Lsf)
        return cannot("LSF does it by itself, where the queue has REQUEUE_EXIT_VALUES=75");
    if (!job->is_script) return cannot("this is an interactive job, not a job script's");
    if (job->scheduler == Scheduler::Slurm) return RequeueWay{{"scontrol", "requeue", job->id}, ""};
    if (job->is_array_element) return cannot(alone_by_hand(job->id));
    if (script.empty())
        return cannot(
            "PBS keeps a copy of the job script only; give the path of your own: --requeue-script FILE");
    // The new job waits for the end of this one, whatever its exit code.
    return RequeueWay{{"qsub", "-W", "depend=afterany:" + job->id, script}, job->submitted_in};
}

}  // namespace ddprun
