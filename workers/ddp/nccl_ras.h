#pragma once

#include <optional>
#include <string>

#include "env/clock.h"
#include "env/socket.h"

/// NCCL's own view of a job that hangs: its RAS threads (2.24 and newer) know which ranks of a communicator
/// do not answer, and tell whoever connects to one of them.
namespace ddp::nccl {

/// Where the RAS thread of this process listens: NCCL_RAS_ADDR, else localhost:28028; nullopt when
/// NCCL_RAS_ENABLE=0 or the address makes no sense.
std::optional<ddprun::Endpoint> ras_address();

/// The answer to "STATUS", at most 16 KiB of it; "" when nobody answers by `deadline`. Blocks until then at
/// most.
std::string ask_ras(const ddprun::Endpoint& where, ddprun::TimePoint deadline);

}  // namespace ddp::nccl
