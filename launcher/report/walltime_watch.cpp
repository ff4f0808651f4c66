#include "launcher/report/walltime_watch.h"

#include <unistd.h>

#include <utility>

#include "env/os/run_tool.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/report/walltime.h"
#include "pbs/walltime.h"

namespace ddprun {
namespace {

constexpr Duration kQstatPatience = std::chrono::seconds(30);
constexpr std::size_t kMaxQstatAnswer = 4 << 20;  ///< it has the job's whole environment

/// Through the shell, which finds qstat in PATH.
os::SpawnSpec qstat_command(const std::string& job) {
    os::SpawnSpec spec;
    spec.program = "/bin/sh";
    spec.arguments = {"sh", "-c", "exec qstat -f -F json \"$0\"", job};
    spec.environment = os::own_environment();
    return spec;
}

}  // namespace

void WalltimeWatch::begin(std::function<void(TimePoint end)> known) {
    known_ = std::move(known);
    if (const std::optional<Duration> left = walltime_left()) return ends_in(*left);
    if (const std::optional<std::string> job = process_environment("PBS_JOBID"); job && !job->empty()) ask_qstat(*job);
}

void WalltimeWatch::ask_qstat(const std::string& job) {
    run_tool(loop_, system_, qstat_command(job), kQstatPatience, kMaxQstatAnswer, [this, alive = alive_](const Result<std::string>& answer) {
        if (!*alive) return;
        const Result<pbs::JobTime> time = answer ? pbs::parse_qstat(*answer, pbs_job_age()) : answer.error();
        if (time) ends_in(time->limit - time->elapsed);
        else log_.debug("the walltime is not known: {}", time.error().what);
    });
}

void WalltimeWatch::ends_in(Duration left) {
    end_ = deadline_after(loop_.now(), left);
    log_.debug("the walltime ends in {}", format_duration(std::chrono::round<std::chrono::seconds>(left)));
    known_(*end_);
}

}  // namespace ddprun
