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
#include "ddp/span.h"
#include "ddp/worker/call.h"
#include "env/clock.h"
#include "env/io/socket.h"
#include "env/worker_env.h"

/// The parts of a session, and its reports: its line for the launcher and the peers, and the texts for a
/// hang.
namespace ddp::nccl {

class LatestWork;

/// The resources of one rank's collectives, under shared ownership: a thread stuck inside NCCL may outlive
/// the group.
struct SessionParts {
    std::shared_ptr<SegmentMap> segment;
    ddprun::WorkerEnv env;
    int device = 0;
    cuda::Stream user_stream = nullptr;  ///< collectives follow it, and waiting blocks it
    std::chrono::nanoseconds timeout{};
    std::string name;  ///< "NCCL communicator 0"
    /// Whether the launcher sees the collectives. Sequence numbers of a sub-group would not match those of
    /// the world.
    enum class Lines : std::uint8_t { OfTheNode, Private } lines = Lines::OfTheNode;
    std::shared_ptr<LatestWork> latest = {};  ///< of the world's session and of those split off
};

/// Counts one rank's collectives and writes them to its line in the node's segment, for the launcher and the
/// peers.
class Ledger {
  public:
    explicit Ledger(const SessionParts& parts);

    /// The number of the next call; send and recv count among those with the same peer.
    std::uint64_t next_number(const Call& call);
    /// Returns the call in the trace, for end().
    trace::Begun begin(const Call& call, ddprun::TimePoint now);
    /// One thread at a time, in the order of the calls.
    void end(const Call& call, ddprun::TimePoint begun, ddprun::TimePoint now,
             const trace::Begun& traced = {});
    /// The time with at least one collective in flight.
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
    const std::uint16_t traced_group_;  ///< trace::current_group(); 0 of a sub-group
};

/// "rank 3: all_reduce #812 (...)", the beginning of errors.
std::string named(const SessionParts& parts, const Call& call);
/// "; rank 5 is in ...; rank 6 finished ...": the other ranks of this node; "" without others.
std::string describe_peers(const SessionParts& parts);
/// For a time-out: the peers' activity, and NCCL's own view if it has one. That view is long, so it goes to
/// standard error and into the error report. Blocks for three seconds at most.
std::string explain_hang(const SessionParts& parts, const Api& api);

// NCCL's own view of a hanging job: its RAS threads (2.24 and newer) know which ranks of a communicator do
// not respond, and answer clients that connect.

/// The address of this process's RAS thread: NCCL_RAS_ADDR, else localhost:28028; nullopt when
/// NCCL_RAS_ENABLE=0 or the address is invalid.
std::optional<ddprun::Endpoint> ras_address();

/// The answer to "STATUS", at most 16 KiB of it; "" without an answer by `deadline`. Blocks until then at
/// most.
std::string query_ras(const ddprun::Endpoint& where, ddprun::TimePoint deadline);

}  // namespace ddp::nccl
