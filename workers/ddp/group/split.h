#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ddp/types.h"

namespace ddp {

struct SplitRequest {
    std::int32_t color = 0;
    std::int32_t key = 0;
};
inline std::string encode(const SplitRequest& request) {
    std::string message(sizeof request, '\0');
    std::memcpy(message.data(), &request, sizeof request);
    return message;
}

/// The requests by rank. Throws MismatchError when encode() did not make a message.
inline std::vector<SplitRequest> decode(const std::vector<std::string>& messages) {
    std::vector<SplitRequest> requests;
    for (const std::string& message : messages) {
        if (message.size() != sizeof(SplitRequest))
            throw MismatchError("split: other ranks called another collective");
        std::memcpy(&requests.emplace_back(), message.data(), sizeof(SplitRequest));
    }
    return requests;
}

/// The ranks of one color in their new order: by key, then by rank. Pure.
inline std::vector<std::uint32_t> members_of(int color, const std::vector<SplitRequest>& requests) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t rank = 0; rank < requests.size(); ++rank) {
        if (requests[rank].color == color) members.push_back(rank);
    }
    std::stable_sort(members.begin(), members.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return requests[a].key < requests[b].key; });
    return members;
}

}  // namespace ddp
