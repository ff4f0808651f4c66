#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/pals_apinfo.h"
#include "env/result.h"
#include "launcher/gather/job_meeting.h"
#include "launcher/gather/outer_task.h"
#include "launcher/job_spec.h"

/// How the ddpruns that an outer launcher started on several nodes find their head, where the user has named
/// no endpoint.
namespace ddprun {

/// Without a channel: the host that every task knows to be the first, and ports that follow from the job's
/// id, so that two jobs on the same hosts have different ones. The head takes the first that is free; the
/// secret tells the others which.
struct FirstHost {
    std::string host;
    std::string job;    ///< "slurm-77.0"
    std::string where;  ///< "the first host of SLURM_STEP_NODELIST"
    std::vector<std::uint16_t> ports;
};
/// Pure. `node_file` is the content of PBS_NODEFILE, "" without one; `application` what PALS_APINFO says.
/// nullopt: nothing names the first host, or the job. Error: InvalidArgument naming the malformed variable;
/// Mismatch when task 0 is not on that host.
Result<std::optional<FirstHost>> find_first_host(const LauncherChoice& launcher,
                                                 const EnvironmentLookup& lookup,
                                                 const std::string& node_file,
                                                 const std::optional<PalsApplication>& application);

/// Settles where the nodes meet: node 0 listens and says where; the others hear it and look which address
/// answers. Also what the launcher does not tell of a rank's place on its node, which is filled in. Blocks
/// until the job's join time-out. Error: Timeout, Refused ..., naming channel and addresses; InvalidArgument
/// when nothing says where to meet, with the remedy.
Result<JobMeeting> meet(const JobSpec& spec, OuterTask& task, const EnvironmentLookup& lookup);

/// The same, but for a signal that stops ddprun or preempts it: that one, with nothing settled.
struct MeetingOutcome {
    int signal = 0;
    Result<JobMeeting> meeting = Error{Errc::Closed, "stopped", 0};
    OuterTask task;
};
MeetingOutcome meet_unless_stopped(const JobSpec& spec, const OuterTask& task,
                                   const EnvironmentLookup& lookup);

}  // namespace ddprun
