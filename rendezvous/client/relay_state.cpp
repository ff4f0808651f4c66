#include "rendezvous/client/relay_state.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace ddprun::rdzv {
namespace {

/// The key by which reads are equal; "" for no read, or one without time to wait behind another.
std::string name_of_read(const StoreRequest& request) {
    if (request.timeout && *request.timeout <= Duration::zero()) return {};
    std::string name = fmt::format("{} {}", request.op.index(), request.generation);
    const auto add = [&](const std::string& key) { name += fmt::format(" {} {}", key.size(), key); };
    if (const auto* get = std::get_if<store_op::Get>(&request.op)) add(get->key);
    else if (const auto* try_get = std::get_if<store_op::TryGet>(&request.op)) add(try_get->key);
    else if (const auto* wait = std::get_if<store_op::Wait>(&request.op))
        std::for_each(wait->keys.begin(), wait->keys.end(), add);
    else return {};
    return name;
}

}  // namespace

// ---- askers

RelayState::AskerId RelayState::add(Asker asker) {
    const AskerId id = ++last_asker_;
    by_client_[asker.client].insert(id);
    askers_.emplace(id, std::move(asker));
    return id;
}

/// Removes an asker from all lists except its flight's or its sharing's.
RelayState::Asker RelayState::remove(AskerId id) {
    const auto node = askers_.extract(id);
    Asker asker = std::move(node.mapped());
    deadlines_.erase({asker.deadline, id});
    const auto mine = by_client_.find(asker.client);
    mine->second.erase(id);
    if (mine->second.empty()) by_client_.erase(mine);
    if (!asker.shared.empty()) held_back_.erase(asker.client);
    return asker;
}

RelayState::Actions RelayState::ask(std::uint64_t client, std::uint32_t request, StoreRequest what,
                                    TimePoint now) {
    hurry(client, now);
    const TimePoint deadline = what.timeout ? deadline_after(now, *what.timeout) : kNever;
    const AskerId id = add({client, request, now, deadline, {}, 0});
    std::string read = name_of_read(what);
    const auto sharing = sharings_.find(read);
    if (sharing != sharings_.end()) {
        sharing->second.next.push_back(id);
        held_back_.emplace(client, id);
        if (deadline != kNever) deadlines_.emplace(deadline, id);
        askers_.at(id).shared = std::move(read);
    } else if (read.empty()) {
        launch({id}, std::move(what), now, {});
    } else {
        launch({id}, what, now, read);
        sharings_.emplace(std::move(read), Sharing{std::move(what), {}});
    }
    return std::exchange(actions_, {});
}

// ---- requests under way

/// Sends a request in the name of its first asker, with the longest timeout of all.
void RelayState::launch(std::vector<AskerId> askers, StoreRequest request, TimePoint now,
                        std::string shared) {
    do ++last_number_;
    while (last_number_ == 0 || flights_.contains(last_number_));
    TimePoint until = TimePoint::min();
    for (const AskerId id : askers) until = std::max(until, askers_.at(id).deadline);
    for (const AskerId id : askers) {
        Asker& asker = askers_.at(id);
        if (!std::exchange(asker.shared, {}).empty()) held_back_.erase(asker.client);
        asker.flight = last_number_;
        if (asker.deadline == until) deadlines_.erase({asker.deadline, id});
        else deadlines_.emplace(asker.deadline, id);
    }
    const Asker& first = askers_.at(askers.front());
    request.client = first.client;
    request.waited = now - first.since;
    request.timeout = until == kNever ? std::nullopt : std::optional(std::max(until - now, Duration::zero()));
    flights_.emplace(last_number_, Flight{first.client, std::move(shared), std::move(askers)});
    actions_.forward.push_back({last_number_, std::move(request)});
}

/// Takes an asker out of its shared read and sends the read for it alone.
void RelayState::launch_alone(AskerId id, TimePoint now) {
    const Asker& asker = askers_.at(id);
    const bool is_held_back = !asker.shared.empty();
    Sharing& sharing = sharings_.at(is_held_back ? asker.shared : flights_.at(asker.flight).shared);
    std::erase(is_held_back ? sharing.next : flights_.at(asker.flight).askers, id);
    deadlines_.erase({asker.deadline, id});
    launch({id}, sharing.request, now, {});
}

void RelayState::ask_next(const std::string& shared, TimePoint now) {
    const auto sharing = sharings_.find(shared);
    if (sharing->second.next.empty()) {
        sharings_.erase(sharing);
        return;
    }
    launch(std::exchange(sharing->second.next, {}), sharing->second.request, now, shared);
}

void RelayState::hurry(std::uint64_t client, TimePoint now) {
    if (const auto held = held_back_.find(client); held != held_back_.end()) launch_alone(held->second, now);
}

RelayState::Actions RelayState::answer(std::uint32_t number, const StoreReply& reply, TimePoint now) {
    const auto flight = flights_.extract(number);
    if (flight.empty()) return {};
    for (const AskerId id : flight.mapped().askers) {
        const Asker asker = remove(id);
        actions_.told.push_back({asker.client, asker.request, reply});
    }
    if (!flight.mapped().shared.empty()) ask_next(flight.mapped().shared, now);
    return std::exchange(actions_, {});
}

// ---- ends

RelayState::Actions RelayState::leave(std::uint64_t client, TimePoint now) {
    const auto mine = by_client_.find(client);
    const std::set<AskerId> asked = mine == by_client_.end() ? std::set<AskerId>{} : mine->second;
    for (const AskerId id : asked) {
        const Asker asker = remove(id);
        std::erase(asker.shared.empty() ? flights_.at(asker.flight).askers : sharings_.at(asker.shared).next,
                   id);
    }
    std::vector<Flight> forgotten;
    std::erase_if(flights_, [&](auto& flight) {
        if (flight.second.owner == client) forgotten.push_back(std::move(flight.second));
        return flight.second.owner == client;
    });
    for (Flight& flight : forgotten) {
        if (flight.shared.empty()) continue;
        Sharing& sharing = sharings_.at(flight.shared);
        sharing.next.insert(sharing.next.begin(), flight.askers.begin(), flight.askers.end());
        ask_next(flight.shared, now);
    }
    return std::exchange(actions_, {});
}

RelayState::Actions RelayState::expire(TimePoint now) {
    while (next_deadline() <= now) launch_alone(deadlines_.begin()->second, now);
    return std::exchange(actions_, {});
}

RelayState::Actions RelayState::lose(const Failure& why) {
    for (const auto& [id, asker] : askers_) actions_.told.push_back({asker.client, asker.request, why});
    askers_.clear();
    by_client_.clear();
    held_back_.clear();
    flights_.clear();
    sharings_.clear();
    deadlines_.clear();
    return std::exchange(actions_, {});
}

}  // namespace ddprun::rdzv
