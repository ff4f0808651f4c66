#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/nodes/host_lists.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/pmix_source.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/plan/head_choice.h"
#include "launcher/spec/job_spec.h"
#include "launcher/start/job_token.h"

/// How ddpruns that an outer launcher started on several nodes find their head, when the user names no
/// endpoint.
namespace ddprun {

/// A ddprun that mpiexec, srun, flux ... has started, and its place among the others; `nodes` 1: there are no
/// others.
struct OuterTask {
    LauncherChoice launcher;
    NodePlace place;
    PmixSession pmix;  ///< held until the nodes have met
};

/// "node 1 of 2: launcher=slurm rank 1/2 local 0/1".
std::string describe(const OuterTask& task);

/// Finds our place under an outer launcher. Its PMIx server is asked (for 10 s at most) for facts that its
/// variables do not have. nullopt: there is no launcher, or the user has told where the nodes are
/// (--standalone, --nnodes=1, --node-rank, --hosts, --hostfile, --start, or --nnodes with an endpoint).
/// Error: as node_place and choose_launcher; Mismatch when --nnodes differs from the launcher's number.
Result<std::optional<OuterTask>> find_outer_task(const CommandLine& line, const EnvironmentLookup& lookup);

/// The place that the launcher gave the one worker of this ddprun. Error: NotFound when it gave none.
Result<OuterRank> outer_rank_of(const OuterTask& task);

/// The endpoint and the secret by which the nodes of a job meet, settled before the job begins.
struct JobMeeting {
    HeadChoice head{false, {}, ""};   ///< of the head an address of its own
    std::vector<Endpoint> elsewhere;  ///< not on the head: where it is, too
    UniqueFd listener;                ///< on the head: listens already, non-blocking
    JobToken token;
    std::string run_id;                 ///< the job's, the same on all nodes
    std::shared_ptr<Exchange> channel;  ///< what others may still read: ends with the job; null: nothing
};

/// The meeting point without a channel: the host that every task knows to be the first, and ports made from
/// the job's id, so that two jobs on the same hosts have different ones. The head takes the first free port;
/// the others find it by the secret.
struct FirstHost {
    std::string host;
    std::string job;    ///< "slurm-77.0"
    std::string where;  ///< "the first host of SLURM_STEP_NODELIST"
    std::vector<std::uint16_t> ports;
};
/// `node_file` is the content of PBS_NODEFILE ("" without one), `application` that of PALS_APINFO. nullopt:
/// the first host or the job is not known. Error: InvalidArgument naming the malformed variable; Mismatch
/// when task 0 is not on that host. Pure.
Result<std::optional<FirstHost>> find_first_host(const LauncherChoice& launcher,
                                                 const EnvironmentLookup& lookup,
                                                 const std::string& node_file,
                                                 const std::optional<PalsApplication>& application);

/// Settles the meeting point: node 0 listens and publishes its addresses; the others connect to the one that
/// answers. Also fills in a rank's place on its node when the launcher does not tell it. Blocks for the job's
/// join timeout at most. Error: Timeout, Refused ..., naming channel and addresses; InvalidArgument when no
/// meeting point is known, with the remedy.
Result<JobMeeting> meet(const JobSpec& spec, OuterTask& task, const EnvironmentLookup& lookup);

/// The outcome of meet(), or the signal that stopped or preempted ddprun meanwhile (0: none).
struct MeetingOutcome {
    int signal = 0;
    Result<JobMeeting> meeting = Error{Errc::Closed, "stopped", 0};
    OuterTask task;
};
MeetingOutcome meet_unless_stopped(const JobSpec& spec, const OuterTask& task,
                                   const EnvironmentLookup& lookup);

}  // namespace ddprun
