#pragma once

#include <memory>
#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Where the nodes of a job meet and by which secret, settled before the job begins by whoever brought them
/// together.
struct JobMeeting {
    bool is_head = false;
    Endpoint controller;              ///< where the others reach it; on the head an address of its own
    std::vector<Endpoint> elsewhere;  ///< not on the head: where it is, too
    UniqueFd listener;                ///< on the head: listens already, non-blocking
    std::string token;
    std::string
        when_refused;  ///< what to copy or to set when the head does not accept the token; "" nothing helps
    std::string warning;                ///< for the operator at the start, also with --quiet; "" none
    std::string run_id;                 ///< the job's, the same on all nodes
    std::string why;                    ///< "rank 0 listens, told by PMIx"
    std::shared_ptr<Exchange> channel;  ///< what others may still read: ends with the job; null: nothing
};

}  // namespace ddprun
