#include "rendezvous/store.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

Failure failure(Errc code, std::string what) { return {code, std::move(what)}; }
Failure failure(const Error& error) { return {error.code, error.what}; }

/// "key 'a'", or "keys 'a', 'b' and 3 more".
std::string list_keys(const std::vector<std::string>& keys) {
    constexpr std::size_t kShown = 3;
    if (keys.size() == 1) return fmt::format("key '{}'", keys.front());
    std::vector<std::string> shown;
    for (std::size_t i = 0; i < std::min(kShown, keys.size()); ++i)
        shown.push_back(fmt::format("'{}'", keys[i]));
    const std::string more = keys.size() > kShown ? fmt::format(" and {} more", keys.size() - kShown) : "";
    return fmt::format("keys {}{}", join(shown, ", "), more);
}

}  // namespace

StoreAnswers Store::apply(ClientId client, std::uint32_t request, StoreRequest what, TimePoint now) {
    // First who has waited too long: a client that comes again must not meet its own earlier self in a
    // barrier.
    StoreAnswers expired;
    if (next_deadline() <= now) expired = expire(now);
    answers_ = std::move(expired);
    if (what.generation != generation_) {
        answer(client, request, refuse_generation(what.generation));
        return std::exchange(answers_, {});
    }
    const Asker asker{client, request, what.timeout, now};
    std::optional<StoreReply> reply =
        std::visit([&](auto&& op) { return perform(asker, std::move(op)); }, std::move(what.op));
    if (reply) answer(client, request, std::move(*reply));
    return std::exchange(answers_, {});
}

StoreReply Store::refuse_generation(std::uint64_t asked) const {
    if (asked < generation_) {
        return failure(Errc::StaleGeneration,
                       fmt::format("generation {} is over, now is {}", asked, generation_));
    }
    return failure(Errc::Mismatch, fmt::format("generation {} has not begun, now is {}", asked, generation_));
}

// ---- operations

std::optional<StoreReply> Store::perform(const Asker&, store_op::Set&& op) {
    if (std::optional<Failure> failed = put(op.key, std::move(op.value))) return *failed;
    return Done{};
}

std::optional<StoreReply> Store::perform(const Asker& asker, store_op::Get&& op) {
    if (const auto found = values_.find(op.key); found != values_.end()) return Value{found->second};
    return wait_for(asker, {std::move(op.key)}, true);
}

std::optional<StoreReply> Store::perform(const Asker&, store_op::TryGet&& op) {
    const auto found = values_.find(op.key);
    if (found == values_.end()) return Absent{};
    return Value{found->second};
}

std::optional<StoreReply> Store::perform(const Asker&, store_op::Add&& op) {
    std::int64_t sum = op.delta;
    if (const auto found = values_.find(op.key); found != values_.end()) {
        const Result<std::int64_t> present = parse_int(found->second.view());
        if (!present) {
            return failure(Errc::InvalidArgument,
                           fmt::format("add to key '{}': it does not hold a number ({} bytes)", op.key,
                                       found->second.size()));
        }
        if (__builtin_add_overflow(*present, op.delta, &sum)) {
            return failure(Errc::Limit,
                           fmt::format("add to key '{}': {} + {} overflows", op.key, *present, op.delta));
        }
    }
    if (std::optional<Failure> failed = put(op.key, Blob(std::to_string(sum)))) return *failed;
    return Sum{sum};
}

std::optional<StoreReply> Store::perform(const Asker&, store_op::CompareSet&& op) {
    const auto found = values_.find(op.key);
    const bool exists = found != values_.end();
    const bool matches = op.expected ? exists && found->second.view() == *op.expected : !exists;
    if (!matches) return Exchanged{false, exists ? found->second : Blob()};
    if (std::optional<Failure> failed = put(op.key, op.desired)) return *failed;
    return Exchanged{true, std::move(op.desired)};
}

std::optional<StoreReply> Store::perform(const Asker&, store_op::Erase&& op) {
    const auto found = values_.find(op.key);
    if (found == values_.end()) return Erased{false};
    bytes_ -= found->first.size() + found->second.size();
    values_.erase(found);
    return Erased{true};
}

std::optional<StoreReply> Store::perform(const Asker& asker, store_op::Wait&& op) {
    if (op.keys.size() > limits_.keys_per_wait) {
        return failure(Errc::Limit, fmt::format("wait for {} keys, allowed are {}", op.keys.size(),
                                                limits_.keys_per_wait));
    }
    return wait_for(asker, std::move(op.keys), false);
}

std::optional<StoreReply> Store::perform(const Asker& asker, store_op::Barrier&& op) {
    if (const Status named = check_key(op.name, limits_.key_bytes); !named) return failure(named.error());
    if (op.participants < 1 || op.participants > limits_.participants) {
        return failure(Errc::InvalidArgument,
                       fmt::format("barrier '{}': {} participants", op.name, op.participants));
    }
    if (std::optional<Failure> full = cannot_wait(asker.client)) return *full;
    BarrierState& barrier = barriers_.try_emplace(op.name, BarrierState{op.participants, {}}).first->second;
    if (barrier.participants != op.participants) {
        return failure(Errc::Mismatch,
                       fmt::format("barrier '{}': {} participants asked for, the {} already inside said {}",
                                   op.name, op.participants, barrier.inside.size(), barrier.participants));
    }
    if (is_inside(op.name, asker.client)) {
        return failure(Errc::Mismatch, fmt::format("barrier '{}': this client is already inside", op.name));
    }
    Waiter waiter{};
    waiter.barrier = op.name;
    barrier.inside.push_back(add_waiter(asker, std::move(waiter)));
    if (barrier.inside.size() == static_cast<std::size_t>(barrier.participants))
        release(BarrierState(barrier), op.name);
    return std::nullopt;
}

bool Store::is_inside(const std::string& barrier, ClientId client) const {
    const auto mine = by_client_.find(client);
    if (mine == by_client_.end()) return false;
    return std::any_of(mine->second.begin(), mine->second.end(),
                       [&](WaiterId id) { return waiters_.at(id).barrier == barrier; });
}

void Store::release(const BarrierState& barrier, const std::string& name) {
    barriers_.erase(name);
    for (const WaiterId id : barrier.inside) {
        const Waiter waiter = remove_waiter(id);
        answer(waiter.client, waiter.request, Done{});
    }
}

/// Writes a value within the limits and wakes who waited for the key.
std::optional<Failure> Store::put(const std::string& key, Blob value) {
    if (const Status named = check_key(key, limits_.key_bytes); !named) return failure(named.error());
    if (value.size() > limits_.value_bytes) {
        return failure(Errc::Limit, fmt::format("key '{}': a value of {} bytes, allowed are {}", key,
                                                value.size(), limits_.value_bytes));
    }
    const auto found = values_.find(key);
    const bool is_new = found == values_.end();
    const std::size_t freed = is_new ? 0 : found->second.size();
    const std::size_t taken = value.size() + (is_new ? key.size() : 0);
    if (bytes_ - freed + taken > limits_.total_bytes) {
        return failure(Errc::Limit, fmt::format("key '{}': the store is full ({} of {})", key,
                                                format_bytes(bytes_), format_bytes(limits_.total_bytes)));
    }
    if (is_new && values_.size() >= limits_.keys) {
        return failure(Errc::Limit,
                       fmt::format("key '{}': the store has its {} keys already", key, limits_.keys));
    }
    bytes_ = bytes_ - freed + taken;
    if (!is_new) {
        found->second = std::move(value);
        return std::nullopt;
    }
    values_.emplace(key, std::move(value));
    wake(key);
    return std::nullopt;
}

// ---- waiting

std::optional<Failure> Store::cannot_wait(ClientId client) const {
    const auto mine = by_client_.find(client);
    if (mine == by_client_.end() || mine->second.size() < limits_.waiters_per_client) return std::nullopt;
    return failure(Errc::Limit,
                   fmt::format("a client can wait for {} things at a time", limits_.waiters_per_client));
}

std::optional<StoreReply> Store::wait_for(const Asker& asker, std::vector<std::string> keys,
                                          bool wants_value) {
    for (const std::string& key : keys) {
        if (const Status named = check_key(key, limits_.key_bytes); !named) return failure(named.error());
    }
    Waiter waiter{};
    waiter.keys = std::move(keys);
    waiter.wants_value = wants_value;
    if (!find_missing(waiter)) return Done{};
    if (std::optional<Failure> full = cannot_wait(asker.client)) return *full;
    const std::string missing = waiter.keys[waiter.at];
    waiting_for_[missing].insert(add_waiter(asker, std::move(waiter)));
    return std::nullopt;
}

/// Points `at` at a key that does not exist; false: all do. Goes on from where it was, so that N keys
/// arriving in order cost N look-ups and not N²; a whole round decides, because a key seen earlier may be
/// erased again.
bool Store::find_missing(Waiter& waiter) const {
    for (std::size_t looked = 0; looked < waiter.keys.size(); ++looked) {
        if (!values_.contains(waiter.keys[waiter.at])) return true;
        waiter.at = (waiter.at + 1) % waiter.keys.size();
    }
    return false;
}

Store::WaiterId Store::add_waiter(const Asker& asker, Waiter waiter) {
    const WaiterId id = next_waiter_++;
    waiter.client = asker.client;
    waiter.request = asker.request;
    waiter.since = asker.now;
    waiter.deadline = asker.timeout ? deadline_after(asker.now, *asker.timeout) : kNever;
    by_client_[waiter.client].insert(id);
    if (waiter.deadline != kNever) deadlines_.emplace(waiter.deadline, id);
    waiters_.emplace(id, std::move(waiter));
    return id;
}

/// Takes the waiter out of every list but the barrier's, which the caller is about to change.
Store::Waiter Store::remove_waiter(WaiterId id) {
    const auto node = waiters_.extract(id);
    Waiter waiter = std::move(node.mapped());
    deadlines_.erase({waiter.deadline, id});
    if (const auto mine = by_client_.find(waiter.client); mine != by_client_.end()) {
        mine->second.erase(id);
        if (mine->second.empty()) by_client_.erase(mine);
    }
    if (waiter.keys.empty()) return waiter;
    if (const auto listed = waiting_for_.find(waiter.keys[waiter.at]); listed != waiting_for_.end()) {
        listed->second.erase(id);
        if (listed->second.empty()) waiting_for_.erase(listed);
    }
    return waiter;
}

void Store::wake(const std::string& key) {
    const auto listed = waiting_for_.extract(key);
    if (listed.empty()) return;
    for (const WaiterId id : listed.mapped()) {
        Waiter& waiter = waiters_.at(id);
        if (find_missing(waiter)) {
            waiting_for_[waiter.keys[waiter.at]].insert(id);
            continue;
        }
        const Waiter done = remove_waiter(id);
        if (done.wants_value) answer(done.client, done.request, Value{values_.at(key)});
        else answer(done.client, done.request, Done{});
    }
}

StoreReply Store::timeout_of(const Waiter& waiter, TimePoint now) const {
    const std::string waited = format_duration(now - waiter.since);
    if (!waiter.barrier.empty()) {
        const BarrierState& barrier = barriers_.at(waiter.barrier);
        return failure(Errc::Timeout, fmt::format("barrier '{}': {} of {} arrived within {}", waiter.barrier,
                                                  barrier.inside.size(), barrier.participants, waited));
    }
    std::vector<std::string> missing;
    for (const std::string& key : waiter.keys) {
        if (!values_.contains(key)) missing.push_back(key);
    }
    return failure(Errc::Timeout, fmt::format("{} not set within {}", list_keys(missing), waited));
}

StoreAnswers Store::expire(TimePoint now) {
    StoreAnswers told;
    std::vector<WaiterId> late;
    // All are answered before any is removed: each of several late ones must count the others as arrived.
    for (auto it = deadlines_.begin(); it != deadlines_.end() && it->first <= now; ++it) {
        const Waiter& waiter = waiters_.at(it->second);
        told.push_back({waiter.client, waiter.request, timeout_of(waiter, now)});
        late.push_back(it->second);
    }
    for (const WaiterId id : late) leave(id);
    return told;
}

/// Removes a waiter that got nothing, from its barrier too.
void Store::leave(WaiterId id) {
    const Waiter waiter = remove_waiter(id);
    const auto barrier = barriers_.find(waiter.barrier);
    if (waiter.barrier.empty() || barrier == barriers_.end()) return;
    std::erase(barrier->second.inside, id);
    if (barrier->second.inside.empty()) barriers_.erase(barrier);
}

void Store::disconnect(ClientId client) {
    const auto mine = by_client_.find(client);
    if (mine == by_client_.end()) return;
    for (const WaiterId id : std::set<WaiterId>(mine->second)) leave(id);
}

StoreAnswers Store::begin_generation(std::uint64_t generation) {
    StoreAnswers told;
    if (generation <= generation_) return told;
    const std::string why = fmt::format("generation {} is over, now is {}", generation_, generation);
    for (const auto& [id, waiter] : waiters_) {
        told.push_back({waiter.client, waiter.request, failure(Errc::StaleGeneration, why)});
    }
    generation_ = generation;
    values_.clear();
    bytes_ = 0;
    waiters_.clear();
    waiting_for_.clear();
    barriers_.clear();
    by_client_.clear();
    deadlines_.clear();
    return told;
}

void Store::answer(ClientId client, std::uint32_t request, StoreReply reply) {
    answers_.push_back({client, request, std::move(reply)});
}

}  // namespace ddprun::rdzv
