#include "launcher/job.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <ctime>

#include "env/io/file.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/exit_codes.h"
#include "launcher/report/explain.h"
#include "launcher/report/walltime.h"
#include "launcher/signals.h"

namespace ddprun {
namespace {

/// With --requeue, where no --walltime-notice is given: for a checkpoint, and for the scheduler's answer.
constexpr Duration kRequeueNotice = std::chrono::minutes(2);
/// How often signals are looked at while nobody reads the last lines.
constexpr Duration kFlushLook = std::chrono::milliseconds(100);

/// Columns of the terminal that the report is written to; nullopt: it is none, or it does not say its width.
std::optional<int> terminal_width() {
    winsize size{};
    if (::ioctl(2, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
    return size.ws_col;
}

/// As a scheduler ends a job: by a signal to ddprun, or to a worker.
bool was_ended_from_outside(const JobEnd& end) {
    const WorkerEnd* cause = root_cause(end);
    return end.stopped_by_signal || end.preempted ||
           (cause != nullptr && cause->signaled && (cause->status == SIGTERM || cause->status == SIGKILL));
}

}  // namespace

/// What a batch job's last run has left.
Status Job::begin_run(RequeueRun::Head head) {
    Result<std::optional<RequeueRun>> run =
        RequeueRun::begin(setup_.spec.requeue, setup_.spec.output.log_dir, head,
                          [this](const std::string& line) { log_.info("{}", line); });
    if (!run) return run.error();
    run_ = *std::move(run);
    if (run_ && setup_.spec.walltime_notice == Duration::zero()) setup_.spec.walltime_notice = kRequeueNotice;
    return {};
}

/// The last act: a scheduler may end us for it.
void Job::end_run() {
    if (!run_ || !ended_) return;
    const bool at_walltime = was_ended_from_outside(*ended_) && walltime_->end() &&
                             !walltime_note(*walltime_->end() - MonotonicClock::now()).empty();
    run_->finish(*ended_, at_walltime,
                 [](const std::string& line) { ddprun::print(stderr, "ddprun: {}\n", printable(line)); });
}

void Job::controller_done() {
    // Agents elsewhere still have to hear it; ours is idle. Then come their last lines, through what started
    // them.
    server_->when_written(kFarewell, [this] { stop_after_others(kFarewell); });
}

void Job::stop_after_others(Duration patience) {
    if (!others_) return loop_->stop();
    others_->finish(patience, [this] { stop_after_senders(kFarewell / 2); });
}

/// PBS may end what started the others before their last lines have come; who sends its lines goes when all
/// have been shown.
void Job::stop_after_senders(Duration patience) {
    if (senders_.empty()) return loop_->stop();
    waits_for_senders_ = true;
    loop_->call_after(patience, [this] { loop_->stop(); });
}

/// Ends this node's part; workers that still run are waited for.
void Job::leave(int code) {
    exit_code_ = code;
    if (agent_->idle()) stop_after_others(kFarewell / 2);
    else agent_->kill_all();  // its last word stops the loop
}

void Job::agent_says(rdzv::FromAgent message) {
    observation_->agent_says(message);
    if (std::holds_alternative<rdzv::WorkersStarted>(message)) look_for_mpi(0);
    const bool is_last = std::holds_alternative<rdzv::GenerationEnded>(message);
    link_->send(std::move(message));
    if (exit_code_ && is_last) stop_after_others(kFarewell / 2);
    if (is_last && heir_) heir_->workers_ended();
    if (is_last && rejoins_) join_again();
}

int Job::say_how_it_ended() {
    output_->flush(
        deadline_after(MonotonicClock::now(), kFlushLook));  // what is lost there stands in the report
    say_of_connections(connection_lines_.total());
    if (!controller_ || exit_code_) {  // a head without a link to itself has left, too
        if (!failure_.empty() && !is_failure_said_) {
            for (const std::string_view line : split(failure_, '\n')) log_.error("{}", line);
        }
        const int code = exit_code_.value_or(static_cast<int>(ExitCode::Internal));
        observation_->finished(code, failure_);
        const std::optional<rdzv::WorkerExited>& first = agent_->first_failure();
        std::optional<WorkerEnd> cause;
        if (first) cause = WorkerEnd{*first, 0, host_, {}, std::nullopt, 0};
        if (code != 0) tell_launcher_above({.message = failure_}, cause ? &*cause : nullptr, code);
        return code;
    }
    JobEnd end = controller_->end();
    observation_->finished(end);
    end.loss = output_->loss();
    end.log_directory = output_->attempt_directory();
    if (const std::optional<TimePoint> over = walltime_->end(); over && was_ended_from_outside(end)) {
        if (std::string note = walltime_note(*over - MonotonicClock::now()); !note.empty())
            end.notes.push_back(std::move(note));
    }
    if (const WorkerEnd* cause = root_cause(end)) {
        std::string note = explain_python(*cause, setup_.program.name, setup_.program.how);
        if (!note.empty()) end.notes.push_back(std::move(note));
    }
    if (!setup_.spec.report_file.empty()) {
        const Status written = write_file_atomically(setup_.spec.report_file, render_report_json(end), 0644);
        if (!written) log_.warning("--report: {}", written.error().what);
    }
    const int code = exit_code(end);
    if (code != 0) tell_launcher_above({.message = headline(end)}, root_cause(end.workers), code);
    output_->say_last(render_report(end, terminal_width()));
    ended_ = std::move(end);
    return code;
}

/// Of a worker its own report where it is on this node, else what is known of it.
void Job::tell_launcher_above(LauncherFailure failure, const WorkerEnd* cause, int code) {
    failure.unix_seconds = ::time(nullptr);
    failure.error_code = code;
    if (cause != nullptr) {
        failure.message = fmt::format("rank {} on {}: {}", cause->rank, cause->host, describe_end(*cause));
        failure.trace = cause->error_file;
        if (cause->host == host_) failure.report = agent_->error_report(cause->rank);
        if (cause->exec_failure.empty() && !cause->stopped_failing)
            failure.error_code = cause->signaled ? -cause->status : cause->status;
    }
    if (const Status left = leave_error_file(process_environment, failure); !left) {
        log_.warning("TORCHELASTIC_ERROR_FILE: {}; ignoring", left.error().what);
    }
}

/// On a host whose lines go to the head: until that has shown them all. What it has not when it is lost, or
/// within a time, goes to our own standard streams.
void Job::send_last_output() {
    const TimePoint until = deadline_after(MonotonicClock::now(), kFarewell);
    while (link_ && link_->is_connected() && MonotonicClock::now() < until) {
        output_->flush(MonotonicClock::now());
        if (output_->consoles_are_written() && sender_->is_done()) return;
        if (!loop_->run_once(until)) return;
    }
}

/// As any program, we wait for who reads us; but a signal that asks us to end is obeyed, which nobody hears
/// any more.
void Job::flush_output() {
    const auto asked_to_end = [] {
        sigset_t pending;
        ::sigpending(&pending);
        const auto is_pending = [&](int signal) { return ::sigismember(&pending, signal) == 1; };
        return is_pending(SIGTERM) || is_pending(SIGINT) || is_pending(SIGHUP) || is_pending(SIGQUIT);
    };
    const TimePoint soon = deadline_after(MonotonicClock::now(), kFarewell);
    if (sender_) send_last_output();
    bool is_said = false;
    do {
        output_->flush(deadline_after(MonotonicClock::now(), kFlushLook));
        if (sender_) sender_->write_rest(1, 2);
        if (is_said || output_->files_are_written() || MonotonicClock::now() < soon) continue;
        is_said = true;
        log_.warning(
            "the job has ended, but its log files are not written yet (a disk that hangs?); waiting for them, a signal ends that");
    } while (!output_->flushed() && !asked_to_end());
}

}  // namespace ddprun
