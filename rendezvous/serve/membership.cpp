#include "rendezvous/serve/membership.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

using Row = std::array<std::string_view, 3>;

std::string_view name_of_term(std::string_view term) { return term.substr(0, term.find('=')); }
std::string_view value_of_term(std::string_view term) {
    return term.size() > name_of_term(term).size() ? term.substr(name_of_term(term).size() + 1) : "";
}

std::string render(const std::vector<Row>& rows) {
    std::array<std::size_t, 3> widths{};
    for (const Row& row : rows) {
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string table;
    for (const Row& row : rows)
        table += fmt::format("\n  {:<{}}  {:<{}}  {}", row[0], widths[0], row[1], widths[1], row[2]);
    return table;
}

/// A table of the terms in which the job's head and a joining node differ; "" they agree. A term that only
/// one of them has is not compared; a node without any terms does not agree.
std::string difference(const MembershipSpec& job, const Joiner& joiner) {
    std::map<std::string_view, std::string_view> said;
    for (const std::string& term : joiner.terms) said.emplace(name_of_term(term), value_of_term(term));
    const std::string of_job = "this job (" + job.head + ")";
    std::vector<Row> rows{{"", of_job, joiner.host}};
    for (const std::string& term : job.terms) {
        const auto same = said.find(name_of_term(term));
        if (same != said.end() ? same->second != value_of_term(term) : said.empty()) {
            rows.push_back({name_of_term(term), value_of_term(term),
                            same != said.end() ? same->second : "does not say"});
        }
    }
    return rows.size() == 1 ? "" : render(rows);
}

/// Takes the digits at the front and returns them without leading zeros.
std::string_view take_digits(std::string_view& text) {
    const std::size_t end = std::min(text.find_first_not_of("0123456789"), text.size());
    std::string_view digits = text.substr(0, end);
    text.remove_prefix(end);
    digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
    return digits;
}

/// Orders host names with numbers compared as numbers: "node2" < "node10".
bool comes_before(std::string_view a, std::string_view b) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const std::string_view whole_a = a, whole_b = b;
    while (!a.empty() && !b.empty()) {
        if (is_digit(a.front()) && is_digit(b.front())) {
            const std::string_view one = take_digits(a), other = take_digits(b);
            if (one.size() != other.size()) return one.size() < other.size();
            if (one != other) return one < other;
        } else {
            if (a.front() != b.front()) return a.front() < b.front();
            a.remove_prefix(1);
            b.remove_prefix(1);
        }
    }
    return a.empty() && b.empty() ? whole_a < whole_b : a.empty();
}

}  // namespace

/// Error: another node has asked for the same node rank. A node of the running world may have been killed and
/// started again on its host before its loss was noticed: the second one waits like a spare.
std::optional<Error> Membership::refuse_twin(const Joiner& joiner) const {
    if (!joiner.node_rank) return std::nullopt;
    const auto twin = asked_.find(*joiner.node_rank);
    if (twin == asked_.end()) return std::nullopt;
    const Entry& entry = members_.at(twin->second);
    const Joiner& first = entry.member.joiner;
    if (entry.settled && first.host == joiner.host) return std::nullopt;
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
    if (const std::string table = difference(spec_, joiner); !table.empty()) {
        return Error{
            Errc::Mismatch,
            fmt::format("{} (pid {}) was started otherwise than this job:{}", joiner.host, joiner.pid, table),
            0};
    }
    std::optional<int> place = joiner.node_rank;
    if (place && *place < 0) {
        return Error{Errc::InvalidArgument,
                     fmt::format("{} (pid {}) asks for node rank {}", joiner.host, joiner.pid, *place), 0};
    }
    if (const std::optional<Error> twin = refuse_twin(joiner)) return *twin;
    if (!place) {
        const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const auto& h) {
            return h.second == joiner.host && !claims_.contains(h.first);
        });
        if (hole != holes_.end()) place = hole->first;
        else if (joiner.kept_place && !claims_.contains(*joiner.kept_place)) place = joiner.kept_place;
    }
    const Arrival arrival = next_arrival_++;
    arrivals_.emplace(agent, arrival);
    if (joiner.node_rank) asked_[*joiner.node_rank] = arrival;
    has_head_ = has_head_ || joiner.is_head;
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
    if (entry.settled) {
        --settled_;
        holes_[*entry.place] = entry.member.joiner.host;
    }
    if (entry.member.joiner.is_head) has_head_ = false;
    if (const auto asked = asked_.find(entry.member.joiner.node_rank.value_or(-1));
        asked != asked_.end() && asked->second == known->second)
        asked_.erase(asked);
    claim(entry, std::nullopt);
    arrivals_.erase(known);
    members_.erase(found);
    note_enough(now);
}

bool Membership::has_enough() const {
    return joined() >= spec_.min_nodes && (has_head_ || !spec_.awaits_head);
}

void Membership::note_enough(TimePoint now) {
    if (!has_enough()) last_call_ends_.reset();
    else if (!last_call_ends_) last_call_ends_ = deadline_after(now, spec_.last_call);
}

void Membership::reopen(TimePoint now, Duration timeout) {
    opened_ = now;
    spec_.join_timeout = timeout;
    last_call_ends_.reset();
    if (has_enough()) last_call_ends_ = now;
}

int Membership::admissible() const { return std::min(joined(), spec_.max_nodes) - settled_; }

std::string Membership::missing_ranks() const {
    if (claims_.empty() || joined() >= spec_.max_nodes) return "";
    std::vector<int> missing;
    for (int place = 0; place < spec_.max_nodes; ++place) {
        if (!claims_.contains(place)) missing.push_back(place);
    }
    if (spec_.hosts.size() < static_cast<std::size_t>(spec_.max_nodes))
        return fmt::format("; missing: node rank {}", format_ranges(missing));
    constexpr std::size_t kNamed = 16;
    std::vector<std::string> names;
    for (const int place : missing) names.push_back(spec_.hosts[static_cast<std::size_t>(place)]);
    return fmt::format("; missing: {}", join_first(std::move(names), kNamed));
}

Verdict Membership::decide(TimePoint now) const {
    if (!last_call_ends_) {
        const TimePoint join_by = deadline_after(opened_, spec_.join_timeout);
        const std::string so_far = fmt::format("{} of {} nodes joined", joined(), spec_.min_nodes);
        if (now < join_by)
            return {Verdict::Wait, fmt::format("{}, {} left", so_far, format_duration(join_by - now))};
        return {Verdict::Failed,
                fmt::format("{} within {}{}", so_far, format_duration(spec_.join_timeout), missing_ranks())};
    }
    if (joined() >= spec_.max_nodes)
        return {Verdict::Ready, fmt::format("all {} nodes joined", spec_.max_nodes)};
    if (now < *last_call_ends_) {
        return {Verdict::Wait,
                fmt::format("{} nodes joined, enough to start; waiting {} for up to {}", joined(),
                            format_duration(*last_call_ends_ - now), spec_.max_nodes)};
    }
    return {Verdict::Ready, fmt::format("{} of up to {} nodes joined", joined(), spec_.max_nodes)};
}

TimePoint Membership::next_change(TimePoint now) const {
    if (last_call_ends_ && joined() >= spec_.max_nodes) return kNever;
    const TimePoint at = last_call_ends_ ? *last_call_ends_ : deadline_after(opened_, spec_.join_timeout);
    return at <= now ? kNever : at;
}

/// Settled nodes keep their places. Then come nodes that have asked for a free place, nodes that come back to
/// theirs, and the others, each kind by arrival. In the first world the others are sorted by host, which is
/// the same in every run.
std::vector<Membership::Member> Membership::settle() {
    const bool is_first_world = settled_ == 0 && holes_.empty();
    std::map<int, Entry*> by_place;
    const auto seat = [&](Entry& entry, std::optional<int> place) {
        if (!place || *place >= spec_.max_nodes || !by_place.emplace(*place, &entry).second) return;
        claim(entry, place);
        entry.settled = true;
        holes_.erase(*place);
    };
    const auto seat_those_who_wait = [&](auto place_of) {
        for (auto& [arrival, entry] : members_) {
            if (!entry.settled) seat(entry, place_of(entry));
        }
    };
    for (auto& [arrival, entry] : members_) {
        if (entry.settled) seat(entry, entry.place);
    }
    seat_those_who_wait([](const Entry& entry) { return entry.member.joiner.node_rank; });
    seat_those_who_wait([](const Entry& entry) { return entry.place; });
    std::vector<Entry*> others;
    for (auto& [arrival, entry] : members_) {
        if (!entry.settled) others.push_back(&entry);
    }
    if (is_first_world) {
        std::stable_sort(others.begin(), others.end(), [](const Entry* a, const Entry* b) {
            return comes_before(a->member.joiner.host, b->member.joiner.host);
        });
    }
    int next = 0;
    for (Entry* entry : others) {
        while (by_place.contains(next)) ++next;
        seat(*entry, next);
    }
    std::vector<Member> world;
    for (const auto& [place, entry] : by_place)
        world.push_back({entry->member.agent, entry->member.joiner, place});
    settled_ = static_cast<int>(world.size());
    return world;
}

std::vector<AgentId> Membership::spares() const {
    std::vector<AgentId> waiting;
    for (const auto& [arrival, entry] : members_) {
        if (!entry.settled) waiting.push_back(entry.member.agent);
    }
    return waiting;
}

// ---- the ranks of the world

namespace {

/// Larger than any machine; keeps every sum within an int.
constexpr int kMaxWorldSize = 1 << 24;

}  // namespace

Result<RankTable> RankTable::from(std::vector<NodeSlots> nodes) {
    RankTable table;
    std::map<std::string, int> role_sizes;
    for (NodeSlots& node : nodes) {
        if (node.slots < 1 || node.slots > kMaxWorldSize - table.world_size_) {
            return Error{Errc::InvalidArgument,
                         fmt::format("{} brings {} workers into a world of {}", node.host, node.slots,
                                     table.world_size_),
                         0};
        }
        int& role_size = role_sizes[node.role];
        table.rows_.push_back({table.nodes(), table.world_size_, node.slots, role_size, 0});
        table.hosts_.push_back(std::move(node.host));
        role_size += node.slots;
        table.world_size_ += node.slots;
    }
    for (std::size_t i = 0; i < nodes.size(); ++i) table.rows_[i].role_world_size = role_sizes[nodes[i].role];
    return table;
}

WorkerRanks RankTable::worker(int rank) const {
    const auto after =
        std::upper_bound(rows_.begin(), rows_.end(), rank,
                         [](int value, const NodeRanks& row) { return value < row.first_rank; });
    const NodeRanks& row = *std::prev(after);
    const int local_rank = rank - row.first_rank;
    return {rank, local_rank, row.group_rank, row.role_first_rank + local_rank};
}

}  // namespace ddprun::rdzv
