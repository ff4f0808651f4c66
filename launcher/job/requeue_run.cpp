#include "launcher/job/requeue_run.h"

#include <fmt/core.h>
#include <unistd.h>

#include <filesystem>

#include "env/io/file.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/talk/scheduler_command.h"
#include "pbs/qstat.h"

namespace ddprun {
namespace {

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
