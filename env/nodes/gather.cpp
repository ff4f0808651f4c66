#include "env/nodes/gather.h"

#include <algorithm>

namespace ddprun {

namespace {

constexpr std::string_view kMeetingKey = "meeting";
constexpr std::string_view kHostKey = "host";

bool is_asked(const Placement& placement, WhoIsWhere who) {
    const bool lacks =
        !placement.local_rank || !placement.local_size || !placement.node_rank || !placement.nodes;
    return lacks && who == WhoIsWhere::Needed;
}

Status publish(Exchange& exchange, bool tells_host, const std::optional<MeetingPoint>& mine) {
    if (mine) {
        if (const Status put = exchange.put(kMeetingKey, encode(*mine)); !put) return put;
    }
    return !tells_host ? Status() : exchange.put(kHostKey, host_identity());
}

Status place_by_identity(Exchange& exchange, Placement& placement) {
    std::vector<std::string> hosts;
    for (int rank = 0; rank < placement.size.value_or(1); ++rank) {
        Result<std::string> host = exchange.get(rank, kHostKey);
        if (!host) return host.error();
        hosts.push_back(*std::move(host));
    }
    place_by_hosts(placement, hosts);
    return {};
}

}  // namespace

void place_by_hosts(Placement& placement, const std::vector<std::string>& host_of_rank) {
    const auto rank = static_cast<std::size_t>(placement.rank.value_or(0));
    const std::string& here = host_of_rank.at(rank);
    std::vector<std::string> nodes;
    for (const std::string& host : host_of_rank) {
        if (std::find(nodes.begin(), nodes.end(), host) == nodes.end()) nodes.push_back(host);
    }
    const auto until = host_of_rank.begin() + static_cast<std::ptrdiff_t>(rank);
    if (!placement.local_rank || !placement.local_size) {
        placement.local_rank = static_cast<int>(std::count(host_of_rank.begin(), until, here));
        placement.local_size = static_cast<int>(std::count(host_of_rank.begin(), host_of_rank.end(), here));
    }
    placement.node_rank = static_cast<int>(std::find(nodes.begin(), nodes.end(), here) - nodes.begin());
    placement.nodes = static_cast<int>(nodes.size());
}

Result<Gathered> gather(Exchange& exchange, const Placement& placement,
                        const std::optional<MeetingPoint>& mine, WhoIsWhere who) {
    const bool asks = is_asked(placement, who);
    if (const Status told = publish(exchange, asks, mine); !told) return told.error();
    if (const Status fenced = exchange.fence(); !fenced) return fenced.error();
    Gathered gathered{{}, placement};
    if (mine) {
        gathered.meeting = *mine;
    } else {
        Result<MeetingPoint> heard = ask_meeting_point(exchange);
        if (!heard) return heard.error();
        gathered.meeting = *std::move(heard);
    }
    if (asks) {
        if (const Status placed = place_by_identity(exchange, gathered.placement); !placed)
            return placed.error();
    }
    return gathered;
}

Result<MeetingPoint> ask_meeting_point(Exchange& exchange) {
    const Result<std::string> word = exchange.get(0, kMeetingKey);
    if (!word) return word.error();
    return decode_meeting_point(*word);
}

}  // namespace ddprun
