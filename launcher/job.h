#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/gather/job_meeting.h"
#include "launcher/job_spec.h"
#include "launcher/plan/machine.h"
#include "launcher/plan/program.h"
#include "launcher/start/host_starter.h"

namespace ddprun {

/// A checked command line and what this node adds to it.
struct JobSetup {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    int workers = 1;                       ///< of this node; 0: a head that is none
    std::vector<std::string> environment;  ///< "NAME=value": what workers inherit
    std::string log_level;                 ///< LOGLEVEL; "" default
    std::string token;                     ///< the job's secret, where the head has told it; "" as job_token.h finds it
    std::optional<HostStart> start;        ///< what this node starts: the head the others, another its share of them
    bool is_started = false;               ///< by a head, on another host
    bool has_lifeline = false;             ///< the end of standard input is the end of what started us
    /// Where several nodes meet, when it was settled before; none: the command line says it.
    std::optional<JobMeeting> meeting;
};

/// Runs one job on this node to its end: the controller too, when this node is the head. Blocks.
///
/// Builds the parts (warden, event loop, server and controller, link and agent, output), hands them to each other,
/// routes signals, and prints the report. Every signal that ddprun handles must be blocked already.
/// Returns the exit code. Error: what kept the job from beginning (a port in use, no descriptors).
Result<int> run_job(JobSetup setup);

}  // namespace ddprun
