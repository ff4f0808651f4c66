#include "rendezvous/membership.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"

namespace ddprun::rdzv {

const Membership::Entry* Membership::claimant_of(int place) const {
    const auto found =
        std::find_if(members_.begin(), members_.end(), [&](const Entry& e) { return e.place == place; });
    return found == members_.end() ? nullptr : &*found;
}

/// Both ask for the same node rank, and mean it.
std::optional<Error> Membership::refuse_twin(const Joiner& joiner) const {
    const auto twin = std::find_if(members_.begin(), members_.end(), [&](const Entry& e) {
        return joiner.node_rank && e.member.joiner.node_rank == joiner.node_rank;
    });
    if (twin == members_.end()) return std::nullopt;
    const Joiner& first = twin->member.joiner;
    return Error{Errc::Mismatch,
                 fmt::format("node rank {} is claimed by {} (pid {}) and by {} (pid {})", *joiner.node_rank,
                             first.host, first.pid, joiner.host, joiner.pid),
                 0};
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
        return place ? h.place == *place : h.host == joiner.host && claimant_of(h.place) == nullptr;
    });
    if (hole != holes_.end()) {
        place = hole->place;
        holes_.erase(hole);
    }
    members_.push_back({{agent, std::move(joiner)}, place});
    note_enough(now);
    return {};
}

void Membership::leave(AgentId agent, TimePoint now) {
    const auto found = std::find_if(members_.begin(), members_.end(),
                                    [&](const Entry& e) { return e.member.agent == agent; });
    if (found == members_.end()) return;
    if (found->settled && found->place) holes_.push_back({found->member.joiner.host, *found->place});
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

/// "; node ranks 1, 3 are missing" where nodes have asked for ranks, else "".
std::string Membership::missing_ranks() const {
    const bool by_rank =
        std::any_of(members_.begin(), members_.end(), [](const Entry& e) { return e.place.has_value(); });
    if (!by_rank || joined() >= spec_.max_nodes) return "";
    std::vector<int> missing;
    for (int place = 0; place < spec_.max_nodes; ++place) {
        if (claimant_of(place) == nullptr) missing.push_back(place);
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
                    fmt::format("{}, {} left{}", so_far, format_duration(join_by - now), missing_ranks())};
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

/// Who is in: first whoever has a place, then by arrival, max_nodes at most. Indices into members_, by place
/// or arrival.
std::vector<std::size_t> Membership::chosen() const {
    std::vector<std::size_t> order(members_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        const std::optional<int>& left = members_[a].place;
        const std::optional<int>& right = members_[b].place;
        if (left && right) return *left < *right;
        return left.has_value() && !right.has_value();
    });
    if (order.size() > static_cast<std::size_t>(spec_.max_nodes))
        order.resize(static_cast<std::size_t>(spec_.max_nodes));
    return order;
}

std::vector<Membership::Member> Membership::settle() {
    const std::vector<std::size_t> in = chosen();
    std::map<int, std::size_t> by_place;
    // A place asked for goes before one that was merely kept.
    for (const std::size_t index : in) {
        if (const std::optional<int>& asked = members_[index].member.joiner.node_rank)
            by_place.emplace(*asked, index);
    }
    std::vector<std::size_t> homeless;
    for (const std::size_t index : in) {
        const Entry& entry = members_[index];
        if (entry.member.joiner.node_rank) continue;
        if (!entry.place || !by_place.emplace(*entry.place, index).second) homeless.push_back(index);
    }
    int place = 0;
    for (const std::size_t index : homeless) {
        while (!by_place.emplace(place, index).second) ++place;
    }
    return seat(by_place);
}

/// Numbers the chosen nodes in order of their places.
std::vector<Membership::Member> Membership::seat(const std::map<int, std::size_t>& by_place) {
    std::vector<Member> world;
    for (Entry& entry : members_) entry.settled = false;
    for (const auto& [place, index] : by_place) {
        Entry& entry = members_[index];
        if (!entry.member.joiner.node_rank) entry.place = static_cast<int>(world.size());
        entry.settled = true;
        world.push_back(entry.member);
    }
    holes_.clear();
    return world;
}

std::vector<AgentId> Membership::spares() const {
    std::vector<AgentId> waiting;
    for (const Entry& entry : members_) {
        if (!entry.settled) waiting.push_back(entry.member.agent);
    }
    return waiting;
}

}  // namespace ddprun::rdzv
