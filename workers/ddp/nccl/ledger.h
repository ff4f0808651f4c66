#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ddp/cuda/cuda_api.h"
#include "ddp/nccl/api.h"
#include "ddp/worker/call.h"
#include "env/clock.h"
#include "env/io/socket.h"
#include "env/worker_env.h"

/// What a session is made of, and what others learn of it: its line for the launcher and the peers, and the
/// words for a hang.
namespace ddp::nccl {

/// What one rank's collectives run on. All is borrowed by shared ownership: a thread that NCCL never lets go
/// may outlive the group.
struct SessionParts {
    std::shared_ptr<SegmentMap> segment;
    ddprun::WorkerEnv env;
    int device = 0;
    cuda::Stream user_stream = nullptr;  ///< collectives follow it, waiting holds it back
    std::chrono::nanoseconds timeout{};
    std::string name;  ///< "NCCL communicator 0"
    /// Whether the launcher sees the collectives. Numbers of a sub-group would not fit those of the world.
    enum class Lines : std::uint8_t { OfTheNode, Private } lines = Lines::OfTheNode;
};

/// The numbers of one rank's collectives, and what the launcher and the peers see of them: its line in the
/// node's segment.
class Ledger {
  public:
    explicit Ledger(const SessionParts& parts);

    /// Of the next call; send and recv count among those with the same peer.
    std::uint64_t next_number(const Call& call);
    void begin(const Call& call, ddprun::TimePoint now);
    /// One thread at a time, in the order of the calls.
    void end(const Call& call, ddprun::TimePoint begun, ddprun::TimePoint now);
    /// In which at least one was going on.
    [[nodiscard]] double communication_seconds() const {
        return static_cast<double>(inside_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }

  private:
    ddprun::RankLine private_line_{};
    ddprun::RankLine& line_;
    std::uint64_t seq_ = 0;
    std::map<std::pair<ddprun::SegmentOp, int>, std::uint64_t> messages_;  ///< by direction and peer
    ddprun::TimePoint counted_until_{};
    std::atomic<std::int64_t> inside_ns_ = 0;
};

/// "rank 3: all_reduce #812 (...)", as messages begin.
std::string named(const SessionParts& parts, const Call& call);
/// "; rank 5 is in ...; rank 6 finished ...", of the other ranks of this node; "" where there are none.
std::string what_peers_do(const SessionParts& parts);
/// For a time-out: what the peers do, and NCCL's own view where it has one. That is long: it goes to standard
/// error and into the error report. Blocks for three seconds at most.
std::string why_it_hangs(const SessionParts& parts, const Api& api);

// NCCL's own view of a job that hangs: its RAS threads (2.24 and newer) know which ranks of a communicator do
// not answer, and tell whoever connects to one of them.

/// Where the RAS thread of this process listens: NCCL_RAS_ADDR, else localhost:28028; nullopt when
/// NCCL_RAS_ENABLE=0 or the address makes no sense.
std::optional<ddprun::Endpoint> ras_address();

/// The answer to "STATUS", at most 16 KiB of it; "" when nobody answers by `deadline`. Blocks until then at
/// most.
std::string ask_ras(const ddprun::Endpoint& where, ddprun::TimePoint deadline);

}  // namespace ddp::nccl
