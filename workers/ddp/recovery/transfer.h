#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

/// What one rank brings to a recovery.
struct Holder {
    std::uint64_t commits = 0;
    bool is_whole = false;   ///< all of its state belongs to its commits
    std::uint32_t node = 0;  ///< the node's number
};

/// One rank sends its state to another.
struct Transfer {
    std::uint32_t from = 0, to = 0;
    bool operator==(const Transfer&) const = default;
};
/// Transfers that run at the same time; all ranks meet after a round.
using TransferRound = std::vector<Transfer>;

/// The commits of the state with which all ranks go on: the most of a rank that is whole; 0 when none is.
std::uint64_t newest_state(std::span<const Holder> ranks);

/// The rounds after which every rank has the newest state, from ranks that have it. Ranks without a state
/// come first, then the older whole ranks, at most half of them at a time: at every moment one more rank can
/// be lost and a whole state remains, unless there are only two ranks. A receiver gives in the next round.
/// Ranks give on their own node; a node without a holder gets the state once over the network. Empty when all
/// have it, or nobody is whole. Pure.
std::vector<TransferRound> plan_transfers(std::span<const Holder> ranks);

/// Collective, blocking: a round of transfers of these tensors, which `moved` counts. Throws the group's
/// errors.
void run_round(ProcessGroup& group, const TransferRound& round, std::span<const Tensor> state,
               std::atomic<std::uint64_t>* moved = nullptr);

}  // namespace ddp
