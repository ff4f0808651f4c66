#include "launcher/tools/batch/batch.h"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <optional>

#include "env/io/file.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/plan/program.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/talk/scheduler_command.h"
#include "launcher/tools/logs.h"

namespace ddprun {
namespace {

constexpr Duration kCommandTimeout = std::chrono::seconds(60);
constexpr Duration kFirstPause = std::chrono::seconds(1);  ///< between two queries; grows by half each time
constexpr Duration kLongestPause = std::chrono::seconds(10);
constexpr int kLogEveryMs = 200;
constexpr int kMostSilentQueries = 30;  ///< five minutes of a scheduler that does not answer
constexpr std::size_t kMostScriptBytes = 1 << 20;
constexpr int kInterrupted = 128 + SIGINT;

volatile sig_atomic_t was_interrupted = 0;

std::string_view submitter_of(Scheduler scheduler) { return scheduler == Scheduler::Pbs ? "qsub" : "sbatch"; }

int complain_of(Scheduler scheduler, std::string_view what, const std::string& why, ExitCode code) {
    ddprun::print(stderr, "ddprun {} {}: {}\n", subcommand_of(scheduler), what, printable(why));
    return static_cast<int>(code);
}

ExitCode submission_exit_code(const Error& error) {
    return error.code == Errc::InvalidArgument || error.code == Errc::System ? ExitCode::Usage
                                                                             : ExitCode::Unavailable;
}

/// Writes the script. It replaces an existing script only if that has our mark. A script that the user edited
/// by hand keeps the mark, so the user must rename it.
Status write_script(Scheduler scheduler, const JobRequest& request) {
    if (::access(request.script.c_str(), F_OK) == 0) {
        const Result<std::string> before = read_regular_file(request.script, kMostScriptBytes);
        if (!before) return before.error();
        const std::string mark = fmt::format("# Written by ddprun {} script.\n", subcommand_of(scheduler));
        if (before->find(mark) == std::string::npos) {
            return Error{
                Errc::InvalidArgument,
                fmt::format("{}: exists and was not written by ddprun; give another --file", request.script),
                0};
        }
    }
    return write_file_atomically(request.script, render_job_script(scheduler, request), 0755);
}

/// The directory of ddprun; "" when every shell's PATH has it.
std::string directory_for_path() {
    const std::string directory = own_directory();
    return directory == "/usr/bin" || directory == "/usr/local/bin" || directory == "/bin" ? "" : directory;
}

/// Returns the job's id. Error: InvalidArgument (the request), Refused (the scheduler does not answer).
Result<std::string> submit_script(Scheduler scheduler, const JobRequest& request) {
    std::vector<std::string> command = {std::string(submitter_of(scheduler))};
    if (scheduler == Scheduler::Slurm) {
        command.emplace_back("--parsable");
        const Result<ToolEnd> version = wants_requeue(request)
                                            ? run_scheduler_command({"sbatch", "--version"}, kCommandTimeout)
                                            : Result<ToolEnd>(ToolEnd{});
        if (version && can_expedite(version->out)) command.emplace_back("--requeue=expedite");
    }
    command.push_back(request.script);
    const Result<ToolEnd> outcome = run_scheduler_command(command, kCommandTimeout);
    if (!outcome) return outcome.error();
    if (outcome->exit_code != 0) {
        std::string words = describe_refusal(command[0], *outcome);
        const Errc code = is_unreachable(words) ? Errc::Refused : Errc::InvalidArgument;
        return Error{code, std::move(words), 0};
    }
    return scheduler == Scheduler::Pbs ? pbs::parse_submitted(outcome->out) : parse_sbatch(outcome->out);
}

// ---- the status of a job

/// OpenPBS's qstat needs -x to show finished jobs. Torque's -x means something else, so there we ask again.
Result<BatchStatus> query_pbs(const std::string& job) {
    Result<ToolEnd> outcome =
        run_scheduler_command({"qstat", "-x", "-f", "-F", "json", job}, kCommandTimeout);
    if (outcome && outcome->exit_code != 0 && outcome->out.empty() && !is_unreachable(outcome->err)) {
        outcome = run_scheduler_command({"qstat", "-f", job}, kCommandTimeout);
    }
    if (!outcome) return outcome.error();
    const Result<pbs::QueuedJob> told = pbs::parse_job(outcome->out);
    if (!told && outcome->exit_code == 0) return told.error();
    if (!told) {
        const std::string words = describe_refusal("qstat", *outcome);
        return Error{is_unreachable(words) ? Errc::Refused : Errc::NotFound, words, 0};
    }
    BatchStatus status = to_batch_status(*told);
    // A colleague's directory that we may not enter counts as no directory.
    if (std::error_code ignored; std::filesystem::is_directory(status.log, ignored))
        status.log = fmt::format("{}/{}.OU", status.log, job);
    if (status.phase == BatchStatus::Phase::Waiting && told->state == "Q") {
        const Result<ToolEnd> table = run_scheduler_command({"qstat"}, kCommandTimeout);
        if (table) status.place = pbs::place_in_queue(table->out, job, told->queue);
    }
    return status;
}

Result<BatchStatus> query_slurm(const std::string& job) {
    const Result<ToolEnd> outcome = run_scheduler_command({"scontrol", "show", "job", job}, kCommandTimeout);
    if (!outcome) return outcome.error();
    if (outcome->exit_code != 0) {
        const std::string words = describe_refusal("scontrol", *outcome);
        return Error{is_unreachable(words) ? Errc::Refused : Errc::NotFound, words, 0};
    }
    Result<BatchStatus> status = parse_scontrol_job(outcome->out);
    if (status && status->phase == BatchStatus::Phase::Waiting && !status->queue.empty()) {
        const Result<ToolEnd> ids = run_scheduler_command(
            {"squeue", "-h", "-t", "PD", "-p", status->queue, "--sort=-p,i", "-o", "%i"}, kCommandTimeout);
        if (ids) status->place = place_in_squeue(ids->out, job);
    }
    return status;
}

Result<BatchStatus> query(Scheduler scheduler, const std::string& job) {
    return scheduler == Scheduler::Pbs ? query_pbs(job) : query_slurm(job);
}

// ---- following a job

/// Shows a job's states and log on the terminal until its end.
class Follower {
  public:
    Follower(Scheduler scheduler, std::string job) : scheduler_(scheduler), job_(std::move(job)) {}

    int follow() {
        Duration pause = kFirstPause;
        for (;; pause = std::min(pause * 3 / 2, kLongestPause)) {
            const Result<BatchStatus> status = query(scheduler_, job_);
            if (was_interrupted != 0) return leave();
            if (const std::optional<int> end = take(status)) return *end;
            if (!read_log_for(pause)) return leave();
        }
    }

  private:
    /// Shows a status. Returns the exit code at the job's end; nullopt: go on.
    std::optional<int> take(const Result<BatchStatus>& status) {
        if (!status) return take_failure(status.error());
        silent_queries_ = 0;
        if (const std::string line = describe_status(job_, *status); line != shown_) {
            read_log();
            // The end is shown after the last line of the log.
            if (status->phase != BatchStatus::Phase::Ended) say(line);
            shown_ = line;
        }
        if (!status->log.empty() && status->phase != BatchStatus::Phase::Waiting) open_log(status->log);
        if (status->phase != BatchStatus::Phase::Ended) return std::nullopt;
        if (log_) log_->read_rest();
        std::fflush(stdout);
        say(shown_);
        return status->exit_code.value_or(static_cast<int>(ExitCode::Unavailable));
    }

    /// Waits while a server restarts. When the server no longer knows a job that it knew before, the job is
    /// over.
    std::optional<int> take_failure(const Error& error) {
        if (error.code == Errc::NotFound && !shown_.empty()) {
            if (log_) log_->read_rest();
            std::fflush(stdout);
            return complain_of(scheduler_, "status",
                               fmt::format("{}: ended, exit code not known: {}", job_, error.what),
                               ExitCode::Unavailable);
        }
        if (shown_.empty() || error.code == Errc::NotFound || ++silent_queries_ > kMostSilentQueries) {
            return complain_of(scheduler_, "status", error.what, ExitCode::Unavailable);
        }
        if (silent_queries_ == 1) say(fmt::format("{}: {}; asking again", job_, error.what));
        return std::nullopt;
    }

    void open_log(const std::string& path) {
        if (log_) return;
        log_.emplace(
            path, [](std::string_view lines) { std::fwrite(lines.data(), 1, lines.size(), stdout); },
            [this](const std::string& what) { say(what); });
    }

    void read_log() {
        if (log_) log_->read_new();
        std::fflush(stdout);
    }

    /// False after Ctrl-C.
    bool read_log_for(Duration span) {
        const TimePoint until = deadline_after(MonotonicClock::now(), span);
        while (MonotonicClock::now() < until) {
            read_log();
            ::poll(nullptr, 0, kLogEveryMs);
            if (was_interrupted != 0) return false;
        }
        return true;
    }

    int leave() {
        read_log();
        const bool is_pbs = scheduler_ == Scheduler::Pbs;
        say(fmt::format("job {} goes on. ddprun {} status {} follows it again, {} {} ends it", job_,
                        subcommand_of(scheduler_), shell_quoted(job_), is_pbs ? "qdel" : "scancel",
                        shell_quoted(job_)));
        return kInterrupted;
    }

    void say(const std::string& line) const { ddprun::print(stderr, "ddprun: {}\n", printable(line)); }

    Scheduler scheduler_;
    std::string job_;
    std::string shown_;
    int silent_queries_ = 0;
    std::optional<FollowedLog> log_;
};

int follow_job(Scheduler scheduler, const std::string& job) {
    struct sigaction interrupted {};
    interrupted.sa_handler = [](int) { was_interrupted = 1; };
    ::sigaction(SIGINT, &interrupted, nullptr);  // without SA_RESTART: a wait ends at once
    return Follower(scheduler, job).follow();
}

}  // namespace

int print_job_script(Scheduler scheduler, JobRequest request, bool to_file) {
    request.path = directory_for_path();
    if (!to_file) {
        ddprun::print("{}", render_job_script(scheduler, request));
        return 0;
    }
    if (const Status written = write_script(scheduler, request); !written) {
        return complain_of(scheduler, "script", written.error().what, submission_exit_code(written.error()));
    }
    ddprun::print(stderr, "ddprun: wrote {}; {} {} submits it\n", printable(request.script),
                  submitter_of(scheduler), shell_quoted(request.script));
    return 0;
}

int submit_job(Scheduler scheduler, JobRequest request, bool follow) {
    request.path = directory_for_path();
    std::error_code failed;
    request.script = std::filesystem::absolute(request.script, failed).string();
    if (const Status program = check_program(request); !program)
        return complain_of(scheduler, "submit", program.error().what, program_exit_code(program.error()));
    // The check comes before the script is written, so that no script is left behind.
    const std::string submitter(submitter_of(scheduler));
    if (find_executable(submitter, scheduler_search_path(process_environment)).empty())
        return complain_of(scheduler, "submit", submitter + ": not found in PATH", ExitCode::Unavailable);
    if (const Status written = write_script(scheduler, request); !written) {
        return complain_of(scheduler, "submit", written.error().what, submission_exit_code(written.error()));
    }
    const Result<std::string> job = submit_script(scheduler, request);
    if (!job) return complain_of(scheduler, "submit", job.error().what, submission_exit_code(job.error()));
    if (!follow) {
        ddprun::print("{}\n", *job);
        return 0;
    }
    ddprun::print(stderr, "ddprun: submitted {} as job {}; Ctrl-C leaves it to itself\n",
                  printable(request.script), *job);
    return follow_job(scheduler, *job);
}

int show_job(Scheduler scheduler, const std::string& job, bool follow) {
    if (follow) return follow_job(scheduler, job);
    const Result<BatchStatus> status = query(scheduler, job);
    if (!status) return complain_of(scheduler, "status", status.error().what, ExitCode::Unavailable);
    ddprun::print("{}\n", printable(describe_status(job, *status)));
    return 0;
}

}  // namespace ddprun
