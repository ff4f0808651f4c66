#include "launcher/report/walltime_watch.h"

#include <time.h>

#include <utility>

#include "env/os/run_tool.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/report/walltime.h"

namespace ddprun {
namespace {

constexpr Duration kSchedulerPatience = std::chrono::seconds(30);
constexpr std::size_t kMaxSchedulerAnswer = 4 << 20;  ///< qstat's has the job's whole environment

/// Through the shell, which finds the program in PATH.
os::SpawnSpec question_to(const BatchJob& job) {
    os::SpawnSpec spec;
    spec.program = "/bin/sh";
    spec.arguments = {"sh", "-c", walltime_question(job.scheduler), job.id};
    spec.environment = scheduler_environment(os::own_environment(), process_environment);
    return spec;
}

}  // namespace

void WalltimeWatch::begin(std::function<void(TimePoint end)> known, std::function<void(const std::string& why)> unknown) {
    known_ = std::move(known);
    unknown_ = std::move(unknown);
    if (const std::optional<Duration> left = walltime_left()) return ends_in(*left);
    if (const std::optional<BatchJob> job = find_batch_job(process_environment)) return ask(*job);
    unknown_("this is no job of PBS, Torque, Slurm or LSF");
}

void WalltimeWatch::ask(const BatchJob& job) {
    run_tool(loop_, system_, question_to(job), kSchedulerPatience, kMaxSchedulerAnswer,
             [this, scheduler = job.scheduler, alive = alive_](const Result<std::string>& answer) {
        if (!*alive) return;
        const Result<Duration> left = answer ? walltime_answer(scheduler, *answer, ::time(nullptr), pbs_job_age()) : answer.error();
        if (left) ends_in(*left);
        else unknown_(left.error().what);
    });
}

void WalltimeWatch::ends_in(Duration left) {
    end_ = deadline_after(loop_.now(), left);
    log_.debug("the walltime ends in {}", format_duration(std::chrono::round<std::chrono::seconds>(left)));
    known_(*end_);
}

}  // namespace ddprun
