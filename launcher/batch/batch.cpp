#include "launcher/batch/batch.h"

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
#include "launcher/ask/followed_log.h"
#include "launcher/batch/job_look.h"
#include "launcher/batch/scheduler_command.h"
#include "launcher/exit_codes.h"

namespace ddprun {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);
constexpr Duration kFirstPause = std::chrono::seconds(1);  ///< between two looks, then half as long again
constexpr Duration kLongestPause = std::chrono::seconds(10);
constexpr int kLogEveryMs = 200;
constexpr int kMostSilentLooks = 30;  ///< five minutes of a scheduler that does not answer
constexpr std::size_t kMostScriptBytes = 1 << 20;
constexpr int kInterrupted = 128 + SIGINT;

volatile sig_atomic_t was_interrupted = 0;

std::string_view word_for(Scheduler scheduler) { return scheduler == Scheduler::Pbs ? "pbs" : "slurm"; }
std::string_view submitter_of(Scheduler scheduler) { return scheduler == Scheduler::Pbs ? "qsub" : "sbatch"; }

int complain_of(Scheduler scheduler, std::string_view what, const std::string& why, ExitCode code) {
    ddprun::print(stderr, "ddprun {} {}: {}\n", word_for(scheduler), what, printable(why));
    return static_cast<int>(code);
}

ExitCode code_for(const Error& error) {
    return error.code == Errc::InvalidArgument || error.code == Errc::System ? ExitCode::Usage
                                                                             : ExitCode::Unavailable;
}

/// Only over what we have written: a script that its user changed by hand keeps our mark, and is theirs to
/// rename.
Status write_script(Scheduler scheduler, const JobRequest& request) {
    if (::access(request.script.c_str(), F_OK) == 0) {
        const Result<std::string> before = read_regular_file(request.script, kMostScriptBytes);
        if (!before) return before.error();
        const std::string mark = fmt::format("# Written by ddprun {} script.\n", word_for(scheduler));
        if (before->find(mark) == std::string::npos) {
            return Error{
                Errc::InvalidArgument,
                fmt::format("{}: is there and is not one of ours; give another --file", request.script), 0};
        }
    }
    return write_file_atomically(request.script, render_job_script(scheduler, request), 0755);
}

/// Where ddprun is, unless it is where every shell looks.
std::string own_directory() {
    std::error_code ignored;
    const std::string directory =
        std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path().string();
    return directory == "/usr/bin" || directory == "/usr/local/bin" || directory == "/bin" ? "" : directory;
}

/// A refusal is the user's affair, a scheduler that is not there the site's.
Result<std::string> submit_script(Scheduler scheduler, const JobRequest& request) {
    std::vector<std::string> command = {std::string(submitter_of(scheduler))};
    if (scheduler == Scheduler::Slurm) {
        command.emplace_back("--parsable");
        const bool requeue = request.requeue && *request.requeue != RequeueSpec::Mode::No;
        const Result<ToolEnd> version =
            requeue ? run_scheduler_command({"sbatch", "--version"}, kPatience) : Result<ToolEnd>(ToolEnd{});
        if (version && can_expedite(version->out)) command.emplace_back("--requeue=expedite");
    }
    command.push_back(request.script);
    const Result<ToolEnd> outcome = run_scheduler_command(command, kPatience);
    if (!outcome) return outcome.error();
    if (outcome->exit_code != 0) {
        std::string words = words_of_refusal(command[0], *outcome);
        const Errc code = is_unreachable(words) ? Errc::Refused : Errc::InvalidArgument;
        return Error{code, std::move(words), 0};
    }
    return scheduler == Scheduler::Pbs ? pbs::parse_submitted(outcome->out) : parse_sbatch(outcome->out);
}

// ---- looking at a job

/// qstat without -x does not tell of finished jobs; Torque's knows no -x of this kind.
Result<JobLook> look_at_pbs(const std::string& job) {
    Result<ToolEnd> outcome = run_scheduler_command({"qstat", "-x", "-f", "-F", "json", job}, kPatience);
    if (outcome && outcome->exit_code != 0 && outcome->out.empty() && !is_unreachable(outcome->err)) {
        outcome = run_scheduler_command({"qstat", "-f", job}, kPatience);
    }
    if (!outcome) return outcome.error();
    const Result<pbs::QueuedJob> told = pbs::parse_job(outcome->out);
    if (!told && outcome->exit_code == 0) return told.error();
    if (!told) {
        const std::string words = words_of_refusal("qstat", *outcome);
        return Error{is_unreachable(words) ? Errc::Refused : Errc::NotFound, words, 0};
    }
    JobLook look = look_of(*told);
    if (std::filesystem::is_directory(look.log)) look.log = fmt::format("{}/{}.OU", look.log, job);
    if (look.phase == JobLook::Phase::Waiting && told->state == "Q") {
        const Result<ToolEnd> table = run_scheduler_command({"qstat"}, kPatience);
        if (table) look.place = pbs::place_in_queue(table->out, job, told->queue);
    }
    return look;
}

Result<JobLook> look_at_slurm(const std::string& job) {
    const Result<ToolEnd> outcome = run_scheduler_command({"scontrol", "show", "job", job}, kPatience);
    if (!outcome) return outcome.error();
    if (outcome->exit_code != 0) {
        const std::string words = words_of_refusal("scontrol", *outcome);
        return Error{is_unreachable(words) ? Errc::Refused : Errc::NotFound, words, 0};
    }
    Result<JobLook> look = parse_scontrol_job(outcome->out);
    if (look && look->phase == JobLook::Phase::Waiting && !look->queue.empty()) {
        const Result<ToolEnd> ids = run_scheduler_command(
            {"squeue", "-h", "-t", "PD", "-p", look->queue, "--sort=-p,i", "-o", "%i"}, kPatience);
        if (ids) look->place = place_in_squeue(ids->out, job);
    }
    return look;
}

Result<JobLook> look_at(Scheduler scheduler, const std::string& job) {
    return scheduler == Scheduler::Pbs ? look_at_pbs(job) : look_at_slurm(job);
}

// ---- following it

/// From its submission to its end, on the terminal of whoever waits.
class Follower {
  public:
    Follower(Scheduler scheduler, std::string job) : scheduler_(scheduler), job_(std::move(job)) {}

    int follow() {
        Duration pause = kFirstPause;
        for (;; pause = std::min(pause * 3 / 2, kLongestPause)) {
            const Result<JobLook> look = look_at(scheduler_, job_);
            if (was_interrupted != 0) return leave();
            if (const std::optional<int> end = take(look)) return *end;
            if (!read_log_for(pause)) return leave();
        }
    }

  private:
    /// The exit code when there is nothing more to follow.
    std::optional<int> take(const Result<JobLook>& look) {
        if (!look) return take_silence(look.error());
        silent_looks_ = 0;
        if (const std::string line = describe_look(job_, *look); line != said_) {
            read_log();
            // What has ended is said behind the last line of its log.
            if (look->phase != JobLook::Phase::Ended) say(line);
            said_ = line;
        }
        if (!look->log.empty() && look->phase != JobLook::Phase::Waiting) open_log(look->log);
        if (look->phase != JobLook::Phase::Ended) return std::nullopt;
        if (log_) log_->read_rest();
        std::fflush(stdout);
        say(said_);
        return look->exit_code.value_or(static_cast<int>(ExitCode::Unavailable));
    }

    /// A server that restarts is waited for; a job that was there and is not is over.
    std::optional<int> take_silence(const Error& error) {
        if (error.code == Errc::NotFound && !said_.empty()) {
            if (log_) log_->read_rest();
            std::fflush(stdout);
            return complain_of(scheduler_, "status",
                               fmt::format("{}: it has ended, and how is not known: {}", job_, error.what),
                               ExitCode::Unavailable);
        }
        if (said_.empty() || error.code == Errc::NotFound || ++silent_looks_ > kMostSilentLooks) {
            return complain_of(scheduler_, "status", error.what, ExitCode::Unavailable);
        }
        if (silent_looks_ == 1) say(fmt::format("{}: {}; asking again", job_, error.what));
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

    /// False: Ctrl-C.
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
                        word_for(scheduler_), shell_quoted(job_), is_pbs ? "qdel" : "scancel",
                        shell_quoted(job_)));
        return kInterrupted;
    }

    void say(const std::string& line) const { ddprun::print(stderr, "ddprun: {}\n", printable(line)); }

    Scheduler scheduler_;
    std::string job_;
    std::string said_;
    int silent_looks_ = 0;
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
    request.path = own_directory();
    if (!to_file) {
        ddprun::print("{}", render_job_script(scheduler, request));
        return 0;
    }
    if (const Status written = write_script(scheduler, request); !written) {
        return complain_of(scheduler, "script", written.error().what, code_for(written.error()));
    }
    ddprun::print(stderr, "ddprun: wrote {}; {} {} submits it\n", printable(request.script),
                  submitter_of(scheduler), shell_quoted(request.script));
    return 0;
}

int submit_job(Scheduler scheduler, JobRequest request, bool follow) {
    request.path = own_directory();
    std::error_code failed;
    request.script = std::filesystem::absolute(request.script, failed).string();
    if (const Status written = write_script(scheduler, request); !written) {
        return complain_of(scheduler, "submit", written.error().what, code_for(written.error()));
    }
    const Result<std::string> job = submit_script(scheduler, request);
    if (!job) return complain_of(scheduler, "submit", job.error().what, code_for(job.error()));
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
    const Result<JobLook> look = look_at(scheduler, job);
    if (!look) return complain_of(scheduler, "status", look.error().what, ExitCode::Unavailable);
    ddprun::print("{}\n", printable(describe_look(job, *look)));
    return 0;
}

}  // namespace ddprun
