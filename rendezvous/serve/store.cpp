#include "rendezvous/serve/store.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

Failure failure(Errc code, std::string what) { return {code, std::move(what)}; }

constexpr std::size_t kKeysShown = 3;
/// The limit on a worker's waiting time as its agent tells it, which is for texts only.
constexpr Duration kLongestWait = std::chrono::hours(24 * 365);

/// "key 'a'", or "keys 'a', 'b' and 3 more": the first kKeysShown of so many.
std::string list_keys(const std::vector<std::string>& first, std::size_t count) {
    if (count == 1) return fmt::format("key '{}'", first.front());
    const std::string shown =
        join(first, ", ", [](const std::string& key) { return fmt::format("'{}'", key); });
    const std::string more = count > first.size() ? fmt::format(" and {} more", count - first.size()) : "";
    return fmt::format("keys {}{}", shown, more);
}

/// Keys for hosts that have not joined yet, independent of the generation.
bool is_of_whole_job(std::string_view key) { return key.starts_with("start/"); }
bool is_of_whole_job(const StoreOp& op) {
    const auto* set = std::get_if<store_op::Set>(&op);
    const auto* get = std::get_if<store_op::Get>(&op);
    return (set != nullptr && is_of_whole_job(set->key)) || (get != nullptr && is_of_whole_job(get->key));
}

}  // namespace

StoreAnswers Store::apply(StoreClientId client, std::uint32_t request, StoreRequest what, TimePoint now) {
    // Expired requests go first: a client that comes again must not find its own earlier request in a
    // barrier.
    StoreAnswers expired;
    if (next_deadline() <= now) expired = expire(now);
    answers_ = std::move(expired);
    if (what.generation != generation_ && !is_of_whole_job(what.op)) {
        answer(client, request, refuse_generation(what.generation));
        return std::exchange(answers_, {});
    }
    const Asker asker{client, request, what.timeout, now, now - std::min(what.waited, kLongestWait)};
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
    if (const Status named = check_key(op.name, limits_.key_bytes); !named) return failure_of(named.error());
    if (op.participants < 1 || op.participants > limits_.participants) {
        return failure(Errc::InvalidArgument,
                       fmt::format("barrier '{}': {} participants", op.name, op.participants));
    }
    Waiter waiter{};
    waiter.barrier = op.name;
    if (std::optional<Failure> full = cannot_wait(asker.client, waiter)) return *full;
    BarrierState& barrier = barriers_.try_emplace(op.name, BarrierState{op.participants, {}}).first->second;
    if (barrier.participants != op.participants) {
        return failure(Errc::Mismatch,
                       fmt::format("barrier '{}': {} participants asked for, the {} already inside said {}",
                                   op.name, op.participants, barrier.inside.size(), barrier.participants));
    }
    if (is_inside(op.name, asker.client)) {
        return failure(Errc::Mismatch, fmt::format("barrier '{}': this client is already inside", op.name));
    }
    barrier.inside.push_back(add_waiter(asker, std::move(waiter)));
    if (barrier.inside.size() == static_cast<std::size_t>(barrier.participants))
        release(BarrierState(barrier), op.name);
    return std::nullopt;
}

bool Store::is_inside(const std::string& barrier, StoreClientId client) const {
    const auto mine = by_client_.find(client);
    if (mine == by_client_.end()) return false;
    return std::any_of(mine->second.ids.begin(), mine->second.ids.end(),
                       [&](WaiterId id) { return waiters_.at(id).barrier == barrier; });
}

void Store::release(const BarrierState& barrier, const std::string& name) {
    barriers_.erase(name);
    for (const WaiterId id : barrier.inside) {
        const Waiter waiter = remove_waiter(id);
        answer(waiter.client, waiter.request, Done{});
    }
}

/// Writes a value within the limits and wakes the requests that waited for the key.
std::optional<Failure> Store::put(const std::string& key, Blob value) {
    if (const Status named = check_key(key, limits_.key_bytes); !named) return failure_of(named.error());
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

Store::KeyList::KeyList(const std::vector<std::string>& keys) {
    std::size_t bytes = 0;
    for (const std::string& key : keys) bytes += key.size();
    text_.reserve(bytes);
    ends_.reserve(keys.size());
    for (const std::string& key : keys) {
        text_ += key;
        ends_.push_back(static_cast<std::uint32_t>(text_.size()));
    }
}

std::string Store::KeyList::operator[](std::size_t at) const {
    const std::size_t begin = at == 0 ? 0 : ends_[at - 1];
    return text_.substr(begin, ends_[at] - begin);
}

/// The memory that a waiter counts for; it does not change while it waits.
std::size_t Store::cost_of(const Waiter& waiter) {
    constexpr std::size_t kNotes = 1024;  // list entries and the key under which it is listed
    return kNotes + waiter.keys.bytes() + 2 * waiter.barrier.size();
}

std::optional<Failure> Store::cannot_wait(StoreClientId client, const Waiter& waiter) const {
    const std::size_t cost = cost_of(waiter);
    if (waiting_bytes_ + cost > limits_.waiting_bytes) {
        return failure(Errc::Limit,
                       fmt::format("all clients together wait for too much ({} of {})",
                                   format_bytes(waiting_bytes_), format_bytes(limits_.waiting_bytes)));
    }
    const auto mine = by_client_.find(client);
    const std::size_t before = mine == by_client_.end() ? 0 : mine->second.bytes;
    if (before + cost > limits_.waiting_bytes_per_client) {
        return failure(Errc::Limit,
                       fmt::format("this client waits for too much ({} of {})", format_bytes(before),
                                   format_bytes(limits_.waiting_bytes_per_client)));
    }
    if (mine == by_client_.end() || mine->second.ids.size() < limits_.waiters_per_client) return std::nullopt;
    return failure(Errc::Limit,
                   fmt::format("a client can wait for {} things at a time", limits_.waiters_per_client));
}

std::optional<StoreReply> Store::wait_for(const Asker& asker, std::vector<std::string> keys,
                                          bool wants_value) {
    for (const std::string& key : keys) {
        if (const Status named = check_key(key, limits_.key_bytes); !named) return failure_of(named.error());
    }
    Waiter waiter{};
    waiter.keys = KeyList(keys);
    waiter.wants_value = wants_value;
    if (!find_missing(waiter)) return Done{};
    if (std::optional<Failure> full = cannot_wait(asker.client, waiter)) return *full;
    const std::string missing = waiter.keys[waiter.at];
    waiting_for_[missing].insert(add_waiter(asker, std::move(waiter)));
    return std::nullopt;
}

/// Points `at` at a key that does not exist; false: all exist. The search goes on from `at`, so that N keys
/// arriving in order cost N look-ups and not N², and makes a whole round, because an earlier key may have
/// been erased.
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
    waiter.since = asker.since;
    waiter.deadline = asker.timeout ? deadline_after(asker.now, *asker.timeout) : kNever;
    Waits& mine = by_client_[waiter.client];
    mine.ids.insert(id);
    mine.bytes += cost_of(waiter);
    waiting_bytes_ += cost_of(waiter);
    if (waiter.deadline != kNever) deadlines_.emplace(waiter.deadline, id);
    waiters_.emplace(id, std::move(waiter));
    return id;
}

/// Removes the waiter from every list except the barrier's, which the caller changes.
Store::Waiter Store::remove_waiter(WaiterId id) {
    const auto node = waiters_.extract(id);
    Waiter waiter = std::move(node.mapped());
    deadlines_.erase({waiter.deadline, id});
    waiting_bytes_ -= cost_of(waiter);
    if (const auto mine = by_client_.find(waiter.client); mine != by_client_.end()) {
        mine->second.ids.erase(id);
        mine->second.bytes -= cost_of(waiter);
        if (mine->second.ids.empty()) by_client_.erase(mine);
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
    std::vector<std::string> first;
    std::size_t missing = 0;
    for (std::size_t i = 0; i < waiter.keys.size(); ++i) {
        std::string key = waiter.keys[i];
        if (!values_.contains(key) && ++missing <= kKeysShown) first.push_back(std::move(key));
    }
    return failure(Errc::Timeout, fmt::format("{} not set within {}", list_keys(first, missing), waited));
}

StoreAnswers Store::expire(TimePoint now) {
    StoreAnswers told;
    std::vector<WaiterId> late;
    // All are answered before any is removed, so that each late participant counts the others as arrived.
    for (auto it = deadlines_.begin(); it != deadlines_.end() && it->first <= now; ++it) {
        const Waiter& waiter = waiters_.at(it->second);
        told.push_back({waiter.client, waiter.request, timeout_of(waiter, now)});
        late.push_back(it->second);
    }
    for (const WaiterId id : late) leave(id);
    return told;
}

/// Removes a waiter without an answer, also from its barrier.
void Store::leave(WaiterId id) {
    const Waiter waiter = remove_waiter(id);
    const auto barrier = barriers_.find(waiter.barrier);
    if (waiter.barrier.empty() || barrier == barriers_.end()) return;
    std::erase(barrier->second.inside, id);
    if (barrier->second.inside.empty()) barriers_.erase(barrier);
}

void Store::disconnect(StoreClientId client) {
    const auto mine = by_client_.find(client);
    if (mine == by_client_.end()) return;
    for (const WaiterId id : std::set<WaiterId>(mine->second.ids)) leave(id);
}

void Store::disconnect_all(ClientId connection) {
    for (auto next = by_client_.lower_bound(connection);
         next != by_client_.end() && next->first.connection == connection;) {
        const StoreClientId client = (next++)->first;
        disconnect(client);
    }
}

StoreAnswers Store::begin_generation(std::uint64_t generation) {
    StoreAnswers told;
    if (generation <= generation_) return told;
    const std::string why = fmt::format("generation {} is over, now is {}", generation_, generation);
    for (const auto& [id, waiter] : waiters_) {
        told.push_back({waiter.client, waiter.request, failure(Errc::StaleGeneration, why)});
    }
    generation_ = generation;
    std::erase_if(values_, [](const auto& entry) { return !is_of_whole_job(entry.first); });
    bytes_ = 0;
    for (const auto& [key, value] : values_) bytes_ += key.size() + value.size();
    waiters_.clear();
    waiting_for_.clear();
    barriers_.clear();
    by_client_.clear();
    waiting_bytes_ = 0;
    deadlines_.clear();
    return told;
}

void Store::answer(StoreClientId client, std::uint32_t request, StoreReply reply) {
    answers_.push_back({client, request, std::move(reply)});
}

// ---- answers that wait for room in a session

namespace {

std::size_t value_bytes(const StoreReply& reply) {
    if (const auto* const value = std::get_if<Value>(&reply)) return value->value.size();
    if (const auto* const exchanged = std::get_if<Exchanged>(&reply)) return exchanged->value.size();
    return 0;
}

}  // namespace

std::optional<StoreAnswer> HeldAnswers::pass(StoreAnswer answer, std::size_t unacknowledged) {
    const bool is_the_agents_own = answer.client.number == 0;
    if (is_the_agents_own || (answers_.empty() && unacknowledged < kRelayWindow)) return answer;
    push(std::move(answer));
    return std::nullopt;
}

void HeldAnswers::push(StoreAnswer answer) {
    std::size_t& all = bytes_[answer.client.number];
    std::size_t bytes = value_bytes(answer.reply);
    if (all + bytes > most_) {
        answer.reply =
            Failure{Errc::Limit,
                    fmt::format("{} of answers to this client have not been taken yet", format_bytes(all))};
        bytes = 0;
    }
    all += bytes;
    answers_.push_back({std::move(answer), bytes});
}

std::optional<StoreAnswer> HeldAnswers::next(std::size_t unacknowledged) {
    if (answers_.empty() || unacknowledged >= kRelayWindow) return std::nullopt;
    Held first = std::move(answers_.front());
    answers_.pop_front();
    bytes_.find(first.answer.client.number)->second -= first.bytes;
    if (answers_.empty()) bytes_.clear();
    return std::move(first.answer);
}

void HeldAnswers::forget(std::uint64_t client) {
    std::erase_if(answers_, [&](const Held& held) { return held.answer.client.number == client; });
    bytes_.erase(client);
}

}  // namespace ddprun::rdzv
