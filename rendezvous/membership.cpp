#include "rendezvous/membership.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"

namespace ddprun::rdzv {

/// Both ask for the same node rank, and mean it.
std::optional<Error> Membership::refuse_twin(const Joiner& joiner) const {
    if (!joiner.node_rank) return std::nullopt;
    const auto twin = asked_.find(*joiner.node_rank);
    if (twin == asked_.end()) return std::nullopt;
    const Joiner& first = members_.at(twin->second).member.joiner;
    return Error{Errc::Mismatch,
                 fmt::format("node rank {} is claimed by {} (pid {}) and by {} (pid {})", *joiner.node_rank,
                             first.host, first.pid, joiner.host, joiner.pid),
                 0};
}

void Membership::claim(Entry& entry, std::optional<int> place) {
    if (entry.place) {
        const auto claimed = claims_.find(*entry.place);
        if (--claimed->second == 0) claims_.erase(claimed);
    }
    if (place) ++claims_[*place];
    entry.place = place;
}

Status Membership::join(AgentId agent, Joiner joiner, TimePoint now) {
    if (joiner.slots < 1) {
        return Error{Errc::InvalidArgument,
                     fmt::format("{} (pid {}) brings {} workers", joiner.host, joiner.pid, joiner.slots), 0};
    }
    if (!spec_.spec_hash.empty() && joiner.spec_hash != spec_.spec_hash) {
        return Error{
            Errc::Mismatch,
            fmt::format("{} (pid {}) was started with another command line than this job's ({} and {})",
                        joiner.host, joiner.pid, joiner.spec_hash, spec_.spec_hash),
            0};
    }
    std::optional<int> place = joiner.node_rank;
    if (place && (*place < 0 || *place >= spec_.max_nodes)) {
        return Error{Errc::InvalidArgument,
                     fmt::format("{} (pid {}) asks for node rank {}, this job has 0 to {}", joiner.host,
                                 joiner.pid, *place, spec_.max_nodes - 1),
                     0};
    }
    if (const std::optional<Error> twin = refuse_twin(joiner)) return *twin;
    const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const Hole& h) {
        return place ? h.place == *place : h.host == joiner.host && !claims_.contains(h.place);
    });
    if (hole != holes_.end()) {
        place = hole->place;
        holes_.erase(hole);
    }
    const Arrival arrival = next_arrival_++;
    arrivals_.emplace(agent, arrival);
    if (joiner.node_rank) asked_.emplace(*joiner.node_rank, arrival);
    Entry& entry = members_[arrival];
    entry.member = {agent, std::move(joiner)};
    claim(entry, place);
    note_enough(now);
    return {};
}

void Membership::leave(AgentId agent, TimePoint now) {
    const auto known = arrivals_.find(agent);
    if (known == arrivals_.end()) return;
    const auto found = members_.find(known->second);
    Entry& entry = found->second;
    if (entry.settled && entry.place) holes_.push_back({entry.member.joiner.host, *entry.place});
    if (entry.member.joiner.node_rank) asked_.erase(*entry.member.joiner.node_rank);
    claim(entry, std::nullopt);
    arrivals_.erase(known);
    members_.erase(found);
    note_enough(now);
}

void Membership::note_enough(TimePoint now) {
    if (joined() < spec_.min_nodes) enough_since_.reset();
    else if (!enough_since_) enough_since_ = now;
}

void Membership::reopen(TimePoint now) {
    opened_ = now;
    enough_since_.reset();
    note_enough(now);
}

std::string Membership::missing_ranks() const {
    if (claims_.empty() || joined() >= spec_.max_nodes) return "";
    std::vector<int> missing;
    for (int place = 0; place < spec_.max_nodes; ++place) {
        if (!claims_.contains(place)) missing.push_back(place);
    }
    return fmt::format("; missing: node rank {}", format_ranges(missing));
}

Verdict Membership::decide(TimePoint now) const {
    const TimePoint join_by = deadline_after(opened_, spec_.join_timeout);
    if (joined() >= spec_.max_nodes)
        return {Verdict::Ready, fmt::format("all {} nodes joined", spec_.max_nodes)};
    if (!enough_since_) {
        const std::string so_far = fmt::format("{} of {} nodes joined", joined(), spec_.min_nodes);
        if (now < join_by)
            return {Verdict::Wait,
                    fmt::format("{}, {} left", so_far, format_duration(join_by - now))};
        return {Verdict::Failed,
                fmt::format("{} within {}{}", so_far, format_duration(spec_.join_timeout), missing_ranks())};
    }
    const TimePoint last_call = deadline_after(*enough_since_, spec_.last_call);
    if (now < last_call) {
        return {Verdict::Wait, fmt::format("{} nodes joined, enough to start; waiting {} for up to {}",
                                           joined(), format_duration(last_call - now), spec_.max_nodes)};
    }
    return {Verdict::Ready, fmt::format("{} of up to {} nodes joined", joined(), spec_.max_nodes)};
}

TimePoint Membership::next_change(TimePoint now) const {
    if (joined() >= spec_.max_nodes) return kNever;
    const TimePoint at = enough_since_ ? deadline_after(*enough_since_, spec_.last_call)
                                       : deadline_after(opened_, spec_.join_timeout);
    return at <= now ? kNever : at;
}

/// Who is in: first whoever has a place, then by arrival, max_nodes at most. By place or arrival.
std::vector<Membership::Arrival> Membership::chosen() const {
    std::vector<Arrival> order;
    order.reserve(members_.size());
    for (const auto& [arrival, entry] : members_) order.push_back(arrival);
    std::stable_sort(order.begin(), order.end(), [&](Arrival a, Arrival b) {
        const std::optional<int>& left = members_.at(a).place;
        const std::optional<int>& right = members_.at(b).place;
        if (left && right) return *left < *right;
        return left.has_value() && !right.has_value();
    });
    if (order.size() > static_cast<std::size_t>(spec_.max_nodes))
        order.resize(static_cast<std::size_t>(spec_.max_nodes));
    return order;
}

std::vector<Membership::Member> Membership::settle() {
    const std::vector<Arrival> in = chosen();
    std::map<int, Arrival> by_place;
    // A place asked for goes before one that was merely kept.
    for (const Arrival arrival : in) {
        if (const std::optional<int>& asked = members_.at(arrival).member.joiner.node_rank)
            by_place.emplace(*asked, arrival);
    }
    std::vector<Arrival> homeless;
    for (const Arrival arrival : in) {
        const Entry& entry = members_.at(arrival);
        if (entry.member.joiner.node_rank) continue;
        if (!entry.place || !by_place.emplace(*entry.place, arrival).second) homeless.push_back(arrival);
    }
    int place = 0;
    for (const Arrival arrival : homeless) {
        while (!by_place.emplace(place, arrival).second) ++place;
    }
    return seat(by_place);
}

/// Numbers the chosen nodes in order of their places.
std::vector<Membership::Member> Membership::seat(const std::map<int, Arrival>& by_place) {
    std::vector<Member> world;
    for (auto& [arrival, entry] : members_) entry.settled = false;
    for (const auto& [place, arrival] : by_place) {
        Entry& entry = members_.at(arrival);
        if (!entry.member.joiner.node_rank) claim(entry, static_cast<int>(world.size()));
        entry.settled = true;
        world.push_back(entry.member);
    }
    holes_.clear();
    return world;
}

std::vector<AgentId> Membership::spares() const {
    std::vector<AgentId> waiting;
    for (const auto& [arrival, entry] : members_) {
        if (!entry.settled) waiting.push_back(entry.member.agent);
    }
    return waiting;
}

}  // namespace ddprun::rdzv
