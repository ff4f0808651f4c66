#include "launcher/job/walltime_watch.h"

#include <time.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "env/os/run_tool.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/ends/walltime.h"

namespace ddprun {
namespace {

constexpr Duration kSchedulerTimeout = std::chrono::seconds(30);
constexpr std::size_t kMaxSchedulerAnswer = 4 << 20;  ///< qstat prints the job's whole environment

/// Runs the program through the shell, which finds it in PATH.
os::SpawnSpec question_to(const BatchJob& job) {
    os::SpawnSpec spec;
    spec.program = "/bin/sh";
    spec.arguments = {"sh", "-c", walltime_question(job.scheduler), job.id};
    spec.environment = scheduler_environment(os::own_environment(), process_environment);
    return spec;
}

}  // namespace

WalltimeWatch::~WalltimeWatch() {
    *alive_ = false;
    for (const os::EventLoop::TimerId timer : {next_question_, notice_timer_}) loop_.cancel(timer);
}

void WalltimeWatch::begin(Duration notice, std::function<void(TimePoint time_up)> known,
                          std::function<void(std::chrono::seconds left)> time_is_up) {
    notice_ = notice;
    known_ = std::move(known);
    time_is_up_ = std::move(time_is_up);
    job_ = find_batch_job(process_environment);
    if (const std::optional<Duration> left = walltime_left()) return take(*left);
    if (job_) return ask();
    is_unknown("this process is in no job of PBS, Torque, Slurm or LSF");
}

void WalltimeWatch::is_unknown(const std::string& why) {
    if (notice_ == Duration::zero()) return log_.debug("the walltime is not known: {}", why);
    log_.warning("--walltime-notice={}: no notice will be given: {}", format_duration(notice_), why);
}

void WalltimeWatch::ask() {
    run_tool(loop_, system_, question_to(*job_), kSchedulerTimeout, kMaxSchedulerAnswer,
             [this, alive = alive_](const Result<std::string>& answer) {
                 if (!*alive) return;
                 take(answer ? walltime_answer(job_->scheduler, *answer, ::time(nullptr), pbs_job_age())
                             : answer.error());
             });
}

void WalltimeWatch::take(const Result<Duration>& left) {
    // No answer leaves the known end as it is.
    const bool has_none = !left && left.error().code == Errc::NotFound;
    const TimePoint end = left ? deadline_after(loop_.now(), *left) : has_none ? kNever : end_;
    const std::string change = walltime_change(end_, end, loop_.now());
    const bool is_first = !std::exchange(has_looked_, true);
    if (!left) log_.debug("the walltime: {}", left.error().what);
    if (is_first && !left) is_unknown(left.error().what);
    if (!change.empty()) {
        end_ = end;
        if (is_first)
            log_.debug("the walltime ends in {}",
                       format_duration(std::chrono::round<std::chrono::seconds>(*left)));
        else log_.info("{}", change);
        tell_end();
    }
    ask_later();
}

void WalltimeWatch::tell_end() {
    const TimePoint time_up = end_ == kNever ? kNever : end_ - notice_;
    known_(time_up);
    loop_.cancel(notice_timer_);
    if (notice_ == Duration::zero() || time_up == kNever) return;
    notice_timer_ = loop_.call_at(time_up, [this] {
        time_is_up_(std::chrono::round<std::chrono::seconds>(
            std::max(Duration::zero(), end_ - MonotonicClock::now())));
    });
}

void WalltimeWatch::ask_later() {
    if (!job_) return;
    constexpr std::size_t kMostSpread = 120;
    const std::chrono::seconds spread(std::hash<std::string>()(job_->id) % kMostSpread);
    const TimePoint next =
        next_walltime_question(loop_.now(), end_ == kNever ? kNever : end_ - notice_, spread);
    if (next != kNever) next_question_ = loop_.call_at(next, [this] { ask(); });
}

}  // namespace ddprun
