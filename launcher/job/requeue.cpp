#include "launcher/job/requeue.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "env/describe.h"
#include "env/io/file.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/head/job_state.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"
#include "launcher/talk/scheduler_command.h"
#include "pbs/qstat.h"

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

constexpr Duration kRequeueTimeout = std::chrono::seconds(60);
constexpr std::size_t kMostStateBytes = 64 * 1024;
constexpr const char* kStopFile = "ddprun.stop";

std::string absolute(const std::string& path, const std::string& base) {
    return path.empty() || base.empty() ? path
                                        : (std::filesystem::path(base) / path).lexically_normal().string();
}

/// A state that cannot be read is logged, and the count begins anew.
std::optional<RunState> read_state(const std::string& path, const RequeueRun::Say& say) {
    if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
    const Result<std::string> text = read_regular_file(path, kMostStateBytes);
    const Result<RunState> state = text ? parse_run_state(*text) : Result<RunState>(text.error());
    if (state) return *state;
    say(fmt::format("--requeue: {}: {}; counting from run 1", path, state.error().what));
    return std::nullopt;
}

}  // namespace

static void describe(Visitor& v, RunState& state) {
    v("job", state.job);
    v("first_job", state.first_job);
    v("run", state.run);
    v("generation", state.generation);
    v("restarts_used", state.restarts_used);
    v("last_step", state.last_step);
    v("runs_without_progress", state.runs_without_progress);
    v("phase", state.phase);
    v("why", state.why);
}

std::string render_run_state(RunState state) {
    JsonWriter json(2);
    json("version", 1);
    describe(json, state);
    return std::move(json).text() + '\n';
}

Result<RunState> parse_run_state(std::string_view text) {
    JsonReader json(text, Strictness::Tolerant);
    RunState state;
    int version = 0;
    json("version", version);
    describe(json, state);
    if (const Status read = json.end(); !read) return read.error();
    if (version != 1) return Error::invalid("not a state of version 1");
    if (state.run < 1 || state.run >= 1'000'000)
        return Error::invalid(fmt::format("run {} is out of range", state.run));
    return state;
}

std::string run_state_path(const std::string& directory, std::string_view job) {
    return fmt::format("{}/ddprun-{}.json", directory, file_name_of(job));
}

RunState next_run(const std::optional<RunState>& before, const std::string& job) {
    RunState state = before.value_or(RunState{});
    if (before) ++state.run;
    state.job = job;
    if (state.first_job.empty()) state.first_job = job;
    state.generation = 0;
    state.restarts_used = 0;
    state.phase = "running";
    state.why.clear();
    return state;
}

RunState same_run(const std::optional<RunState>& before, const std::string& job) {
    return before && before->job == job ? *before : next_run(before, job);
}

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

Result<std::optional<RequeueRun>> RequeueRun::begin(const RequeueSpec& spec, const std::string& log_directory,
                                                    Head head, const Say& say) {
    using Mode = RequeueSpec::Mode;
    if (spec.mode == Mode::No) return std::optional<RequeueRun>();
    const std::optional<BatchJob> job = find_batch_job(process_environment);
    const std::string script = absolute(spec.script, job ? job->submitted_in : "");
    Result<RequeueWay> way = requeue_way(job, script);
    if (way && !script.empty() && ::access(script.c_str(), R_OK) != 0)
        way = Error::system("--requeue-script: " + script);
    if (!way && spec.mode == Mode::Self)
        return Error{Errc::InvalidArgument, "--requeue=self: " + way.error().what, 0};
    if (!way) {
        if (job)
            say(fmt::format("--requeue=auto: this job will not be put back by ddprun: {}", way.error().what));
        return std::optional<RequeueRun>();
    }
    std::string directory = !log_directory.empty()       ? log_directory
                            : !job->submitted_in.empty() ? job->submitted_in
                                                         : ".";
    if (const Status made = make_directories(directory); !made) return made.error().with("--requeue");
    const std::string path = run_state_path(directory, job->id);
    const std::optional<RunState> before = read_state(path, say);
    RequeueRun run(spec, *std::move(way), std::move(directory),
                   head == Head::First ? next_run(before, job->id) : same_run(before, job->id));
    say(fmt::format("run {} of job {} (at most {}); state in {}", run.state_.run, job->id, spec.limit + 1,
                    path));
    run.keep(run.state_, say);
    return std::optional<RequeueRun>(std::move(run));
}

void RequeueRun::keep(const RunState& state, const Say& say) const {
    const Status kept =
        write_file_atomically(run_state_path(directory_, state.job), render_run_state(state), 0644);
    if (!kept) say(fmt::format("--requeue: the next run will not know of this one: {}", kept.error().what));
}

void RequeueRun::finish(const JobEnd& end, bool at_walltime, const Say& say) {
    const std::string stop = directory_ + "/" + kStopFile;
    RequeueDecision decision = decide_requeue(spec_, state_, run_end(end, at_walltime),
                                              ::access(stop.c_str(), F_OK) == 0 ? stop : "");
    if (decision.requeue) return put_back(std::move(decision), say);
    if (decision.why.empty()) {
        ::unlink(run_state_path(directory_, state_.job).c_str());  // no next run follows
        return;
    }
    keep(decision.state, say);
    say(fmt::format("not put back into the queue: {}", decision.why));
}

void RequeueRun::put_back(RequeueDecision decision, const Say& say) {
    // Slurm ends us and runs the same job again as soon as it gets the command: write the state before.
    keep(decision.state, say);
    say(fmt::format("putting the job back into the queue: {} (to end this: touch {}/{})", decision.why,
                    directory_, kStopFile));
    const Result<ToolEnd> outcome = run_scheduler_command(way_.command, kRequeueTimeout, way_.directory);
    const bool done = outcome && outcome->exit_code == 0;
    if (!done) {
        decision.state.phase = "ended";
        decision.state.why = outcome ? describe_refusal(way_.command[0], *outcome) : outcome.error().what;
        keep(decision.state, say);
        return say(fmt::format("the job could not be put back: {}", decision.state.why));
    }
    if (way_.command[0] != "qsub") return;
    const Result<std::string> next = pbs::parse_submitted(outcome->out);
    if (!next)
        return say(fmt::format("the job was put back, but its next run will not know of this one: {}",
                               next.error().what));
    // The file is named after its reader, the next job, which waits for our end.
    const std::string ours = run_state_path(directory_, state_.job);
    decision.state.job = *next;
    keep(decision.state, say);
    ::unlink(ours.c_str());
    say(fmt::format("the next run is job {}", *next));
}

}  // namespace ddprun
