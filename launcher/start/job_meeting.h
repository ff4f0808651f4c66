#pragma once

#include <memory>
#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/unique_fd.h"
#include "launcher/plan/head_choice.h"
#include "launcher/start/job_token.h"

namespace ddprun {

/// The endpoint and the secret by which the nodes of a job meet, settled before the job begins.
struct JobMeeting {
    HeadChoice head{false, {}, ""};   ///< of the head an address of its own
    std::vector<Endpoint> elsewhere;  ///< not on the head: where it is, too
    UniqueFd listener;                ///< on the head: listens already, non-blocking
    JobToken token;
    std::string run_id;                 ///< the job's, the same on all nodes
    std::shared_ptr<Exchange> channel;  ///< what others may still read: ends with the job; null: nothing
};

}  // namespace ddprun
