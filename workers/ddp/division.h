#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/cpu_backend.h"

namespace ddp {

/// What one rank says when a group is split.
struct SplitRequest {
    std::int32_t color = 0;
    std::int32_t key = 0;
};
std::string encode(const SplitRequest& request);
/// By rank. Throws MismatchError when a message is none of encode()'s.
std::vector<SplitRequest> decode(const std::vector<std::string>& messages);

/// The ranks that a color gathers, in their new order: by key, then by rank. Pure.
std::vector<std::uint32_t> members_of(int color, const std::vector<SplitRequest>& requests);

namespace cpu {

/// Where a rank finds itself after a split.
struct Division {
    std::vector<std::uint32_t> members;  ///< ranks of the old group, in the new order
    std::uint32_t share = 0;             ///< of the arena
};
/// Collective: nullopt for a negative color. Throws what collectives throw, and InvalidInput on all ranks
/// when the arena has no room for another group.
std::optional<Division> divide(CpuBackend& backend, int color, int key);

}  // namespace cpu

}  // namespace ddp
