#include "ddp/division.h"

#include <algorithm>
#include <cstring>

namespace ddp {

std::string encode(const SplitRequest& request) {
    std::string message(sizeof request, '\0');
    std::memcpy(message.data(), &request, sizeof request);
    return message;
}

std::vector<SplitRequest> decode(const std::vector<std::string>& messages) {
    std::vector<SplitRequest> requests;
    for (const std::string& message : messages) {
        if (message.size() != sizeof(SplitRequest))
            throw MismatchError("split: other ranks called something else");
        std::memcpy(&requests.emplace_back(), message.data(), sizeof(SplitRequest));
    }
    return requests;
}

std::vector<std::uint32_t> members_of(int color, const std::vector<SplitRequest>& requests) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t rank = 0; rank < requests.size(); ++rank) {
        if (requests[rank].color == color) members.push_back(rank);
    }
    std::stable_sort(members.begin(), members.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return requests[a].key < requests[b].key; });
    return members;
}

namespace cpu {

namespace {

/// The first member of each color takes a share for it: "<share>", or why there is none.
std::string take_for(const std::vector<std::uint32_t>& members, CpuBackend& backend) {
    if (members.empty() || members.front() != static_cast<std::uint32_t>(backend.rank())) return "";
    try {
        return std::string(1, static_cast<char>('0' + Arena::take_share(backend.segment())));
    } catch (const InvalidInput& error) {
        return error.what();
    }
}

std::uint32_t share_in(const std::string& answer) { return static_cast<std::uint32_t>(answer[0] - '0'); }

/// All ranks see the same answers. What the others got for nothing is given back.
void throw_if_no_room(const std::vector<std::string>& taken, CpuBackend& backend) {
    const auto why =
        std::find_if(taken.begin(), taken.end(), [](const auto& answer) { return answer.size() > 1; });
    if (why == taken.end()) return;
    const std::string& own = taken[static_cast<std::size_t>(backend.rank())];
    if (own.size() == 1) Arena::give_back(backend.segment(), share_in(own));
    throw InvalidInput(*why);
}

}  // namespace

std::optional<Division> divide(CpuBackend& backend, int color, int key) {
    const std::vector<SplitRequest> requests = decode(backend.all_gather_bytes(encode({color, key})));
    Division part;
    if (color >= 0) part.members = members_of(color, requests);
    const std::vector<std::string> taken = backend.all_gather_bytes(take_for(part.members, backend));
    throw_if_no_room(taken, backend);
    if (color < 0) return std::nullopt;
    part.share = share_in(taken[part.members.front()]);
    return part;
}

}  // namespace cpu

}  // namespace ddp
