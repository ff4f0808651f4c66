#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/arena.h"
#include "env/clock.h"

/// The sentences of errors in collectives, whichever backend they are of.
namespace ddp::cpu {

/// "all_reduce #812 (6553600 float32, 25 MiB, sum)".
std::string to_string(const Call& call);

/// One clause per rank of the group, from its line: "rank 5 is in all_reduce #812 (25 MiB) since 12 s;
/// rank 2 finished #811 (all_reduce) and has not called the next".
std::string what_ranks_do(const Arena& arena, const std::vector<std::uint32_t>& ranks, ddprun::TimePoint now);
/// The same of the whole node, whichever group they are in.
std::string what_ranks_do(const SegmentMap& segment, const std::vector<std::uint32_t>& local_ranks,
                          ddprun::TimePoint now);

/// "rank 3 called broadcast #7 (...), rank 0 called all_reduce #7 (...)".
std::string both_sides(int rank, const Call& call, int other_rank, const Call& other);

/// Throws PeerLostError "<attempt>: rank 2 was lost, the launcher ended generation 4" once it has.
void throw_if_lost(const ddprun::SegmentHeader& header, const std::string& attempt);

}  // namespace ddp::cpu
