#include "rendezvous/serve/torch_store.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

constexpr std::uint32_t kGreeting = 0x3C85F7CE;

/// The fields of a request: k a key, v a value, i a number of 8 bytes, u one of 4. Where several items may
/// come, their number comes first.
struct Shape {
    std::string_view item;
    bool is_counted = false;
};
constexpr std::array<Shape, 19> kShapes{{
    {"u"},       {"kv"},       {"kvv"}, {"k"}, {"ki"}, {"k", true}, {"k", true}, {""}, {"k"},  {"kv"},
    {"k", true}, {"kv", true}, {""},    {"u"}, {"kv"}, {"k"},       {"k"},       {""}, {"ki"},
}};
static_assert(kShapes.size() == static_cast<std::size_t>(TorchOp::Barrier) + 1);

const Shape& shape_of(TorchOp op) { return kShapes[static_cast<std::size_t>(op)]; }

template <class T>
void append_raw(std::string& out, T number) {
    out.append(reinterpret_cast<const char*>(&number), sizeof number);
}

}  // namespace

void append_number(std::string& out, std::int64_t number) { append_raw(out, number); }

void append_value(std::string& out, std::string_view value) {
    append_raw<std::uint64_t>(out, value.size());
    out += value;
}

std::string encode_torch_greeting() { return encode_torch({TorchOp::Validate, {}, {}, kGreeting}); }

std::string encode_torch(const TorchRequest& request) {
    const Shape& shape = shape_of(request.op);
    std::string out(1, static_cast<char>(request.op));
    const std::size_t items = shape.is_counted ? request.keys.size() : 1;
    if (shape.is_counted) append_raw<std::uint64_t>(out, items);
    std::size_t values = 0;
    for (std::size_t i = 0; i < items; ++i) {
        for (const char field : shape.item) {
            if (field == 'k') append_value(out, request.keys[i]);
            else if (field == 'v') append_value(out, request.values[values++]);
            else if (field == 'i') append_number(out, request.number);
            else append_raw(out, static_cast<std::uint32_t>(request.number));
        }
    }
    return out;
}

void TorchParser::feed(std::string_view bytes) {
    if (broken_) return;
    buffer_.erase(0, offset_);
    offset_ = 0;
    buffer_ += bytes;
}

Result<std::optional<TorchRequest>> TorchParser::next() {
    if (broken_) return *broken_;
    const Result<bool> whole = read_request();
    if (!whole) {
        broken_ = whole.error();
        buffer_.clear();
        offset_ = 0;
        return *broken_;
    }
    if (!*whole) return std::optional<TorchRequest>();
    return std::exchange(open_, std::nullopt);
}

/// False, here and below: more bytes are needed. Fields already read are kept.
bool TorchParser::read_greeting() {
    std::uint32_t word = 0;
    const bool may_be_greeting = available() > 0 && buffer_[offset_] == '\0';
    if (available() == 0 || (may_be_greeting && available() < 1 + sizeof word)) return false;
    if (may_be_greeting) std::memcpy(&word, buffer_.data() + offset_ + 1, sizeof word);
    dialect_ = word == kGreeting ? Dialect::Greeted : Dialect::Ungreeted;
    if (dialect_ == Dialect::Greeted) offset_ += 1 + sizeof word;
    return true;
}

Result<bool> TorchParser::begin_request() {
    if (dialect_ == Dialect::Unknown && !read_greeting()) return false;
    if (available() == 0) return false;
    const bool is_greeted = dialect_ == Dialect::Greeted;
    const int byte = static_cast<unsigned char>(buffer_[offset_]);
    const int op = is_greeted ? byte : byte + 1;
    const int last = static_cast<int>(is_greeted ? TorchOp::Barrier : TorchOp::CancelWait);
    if (op > last)
        return Error{Errc::Protocol, fmt::format("request {} of a TCPStore client is not known here", byte),
                     0};
    if (op == 0) return Error{Errc::Protocol, "a second greeting", 0};
    ++offset_;
    open_ = TorchRequest{static_cast<TorchOp>(op), {}, {}, 0};
    const Shape& shape = shape_of(open_->op);
    items_ = shape.is_counted ? std::nullopt : std::optional<std::uint64_t>(1);
    fields_ = shape.item;
    open_bytes_ = 0;
    return true;
}

Result<bool> TorchParser::read_request() {
    if (!open_) {
        const Result<bool> begun = begin_request();
        if (!begun || !*begun) return begun;
    }
    if (!items_) {
        items_ = read_number(8);
        if (!items_) return false;
        if (*items_ > limits_.keys_per_request) {
            return Error{
                Errc::Limit,
                fmt::format("{} keys in one request, allowed are {}", *items_, limits_.keys_per_request), 0};
        }
    }
    for (; *items_ > 0; --*items_, fields_ = shape_of(open_->op).item) {
        while (!fields_.empty()) {
            const Result<bool> read = read_field(fields_.front());
            if (!read || !*read) return read;
            fields_.erase(0, 1);
        }
    }
    return true;
}

Result<bool> TorchParser::read_field(char field) {
    if (field == 'k') return read_text(open_->keys, limits_.key_bytes, "key");
    if (field == 'v') return read_text(open_->values, limits_.value_bytes, "value");
    const std::optional<std::uint64_t> number = read_number(field == 'i' ? 8 : 4);
    if (!number) return false;
    open_->number = static_cast<std::int64_t>(*number);
    return true;
}

Result<bool> TorchParser::read_text(std::vector<std::string>& to, std::size_t most, std::string_view what) {
    const std::size_t start = offset_;
    const std::optional<std::uint64_t> length = read_number(8);
    if (!length) return false;
    if (*length > most)
        return Error{Errc::Limit, fmt::format("a {} of {} bytes, allowed are {}", what, *length, most), 0};
    if (open_bytes_ + *length > limits_.request_bytes) {
        return Error{Errc::Limit, fmt::format("a request of more than {} bytes", limits_.request_bytes), 0};
    }
    if (available() < *length) {
        offset_ = start;  // the length is read again when there is more
        return false;
    }
    to.push_back(buffer_.substr(offset_, *length));
    offset_ += *length;
    open_bytes_ += *length;
    return true;
}

std::optional<std::uint64_t> TorchParser::read_number(std::size_t bytes) {
    if (available() < bytes) return std::nullopt;
    std::uint64_t number = 0;
    std::memcpy(&number, buffer_.data() + offset_, bytes);
    offset_ += bytes;
    return number;
}

namespace {

// The one-byte answers to Wait, Barrier, CancelWait and Check.
const std::string kStopWaiting(1, '\0');
const std::string kWaitCanceled(1, '\1');
const std::string kReady(1, '\0');
const std::string kNotReady(1, '\1');

std::string number(std::int64_t value) {
    std::string out;
    append_number(out, value);
    return out;
}

std::string value(std::string_view bytes) {
    std::string out;
    append_value(out, bytes);
    return out;
}

const std::string kNothing;
using Reply = Result<std::string>;
Reply nothing_if(const Status& done) { return done ? Reply(kNothing) : Reply(done.error()); }

}  // namespace

TorchStore::Outcome TorchStore::apply(Client client, TorchRequest request) {
    Reply own = perform(client, request);
    Outcome outcome{std::exchange(answers_, {}), std::nullopt};
    if (!own) outcome.refused = own.error();
    else if (!own->empty()) outcome.answers.push_back({client, *std::move(own)});
    return outcome;
}

Reply TorchStore::perform(Client client, TorchRequest& request) {
    const std::string key = request.keys.empty() ? std::string() : request.keys.front();
    switch (request.op) {
        case TorchOp::Validate: return kNothing;  // handled by the parser
        case TorchOp::Ping: return number(request.number).substr(0, 4);
        case TorchOp::Set: return nothing_if(put(key, std::move(request.values.front())));
        case TorchOp::Append: return nothing_if(put(key, get(key) + request.values.front()));
        case TorchOp::MultiSet: return nothing_if(multi_set(request));
        case TorchOp::QueuePush: return nothing_if(push(key, std::move(request.values.front())));
        case TorchOp::CompareSet: {
            const Result<std::string> now = compare_set(key, request.values[0], std::move(request.values[1]));
            return now ? Reply(value(*now)) : Reply(now.error());
        }
        case TorchOp::Add: {
            const Result<std::int64_t> sum = add(key, request.number);
            return sum ? Reply(number(*sum)) : Reply(sum.error());
        }
        case TorchOp::MultiGet: return multi_get(request.keys);
        case TorchOp::Get: return value(get(key));
        case TorchOp::Check: {
            const bool all = std::all_of(request.keys.begin(), request.keys.end(),
                                         [this](const std::string& one) { return is_there(one); });
            return all ? kReady : kNotReady;
        }
        case TorchOp::Wait: {
            std::set<std::string> missing;
            for (std::string& one : request.keys) {
                if (!is_there(one)) missing.insert(std::move(one));
            }
            return missing.empty() ? Reply(kStopWaiting) : wait(client, std::move(missing));
        }
        case TorchOp::Barrier: return enter_barrier(client, key, request.number);
        case TorchOp::CancelWait: disconnect(client); return kWaitCanceled;
        case TorchOp::CountKeys: return number(static_cast<std::int64_t>(values_.size()));
        case TorchOp::DeleteKey: {
            const auto found = values_.find(key);
            if (found == values_.end()) return number(0);
            bytes_ -= found->first.size() + found->second.size();
            values_.erase(found);
            return number(1);
        }
        case TorchOp::QueuePop: return pop(key);
        case TorchOp::QueueLength: {
            const auto found = queues_.find(key);
            return number(found == queues_.end() ? 0 : static_cast<std::int64_t>(found->second.size()));
        }
        case TorchOp::ListKeys: return list_keys();
    }
    return kNothing;
}

// ---- values

Status TorchStore::reserve(std::size_t freed, std::size_t taken, std::size_t entries) const {
    if (bytes_ - freed + taken > limits_.total_bytes) {
        return Error{Errc::Limit,
                     fmt::format("the store of PyTorch's clients is full ({} of {})", format_bytes(bytes_),
                                 format_bytes(limits_.total_bytes)),
                     0};
    }
    if (values_.size() + queued_ + entries > limits_.keys) {
        return Error{Errc::Limit,
                     fmt::format("the store of PyTorch's clients has its {} keys already", limits_.keys), 0};
    }
    return {};
}

Status TorchStore::put(const std::string& key, std::string value) {
    if (value.size() > limits_.value_bytes) {
        return Error{Errc::Limit,
                     fmt::format("a value of {} bytes, allowed are {}", value.size(), limits_.value_bytes),
                     0};
    }
    const auto found = values_.find(key);
    const bool is_new = found == values_.end();
    const std::size_t freed = is_new ? 0 : found->second.size();
    const std::size_t taken = value.size() + (is_new ? key.size() : 0);
    if (const Status fits = reserve(freed, taken, is_new ? 1 : 0); !fits) return fits;
    bytes_ = bytes_ - freed + taken;
    if (is_new) values_.emplace(key, std::move(value));
    else found->second = std::move(value);
    wake(key);
    return {};
}

std::string TorchStore::get(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? std::string() : found->second;
}

bool TorchStore::is_there(const std::string& key) const {
    return values_.contains(key) || queues_.contains(key);
}

Result<std::int64_t> TorchStore::add(const std::string& key, std::int64_t delta) {
    std::int64_t sum = delta;
    if (const auto found = values_.find(key); found != values_.end()) {
        const Result<std::int64_t> present = parse_int(found->second);
        if (!present || __builtin_add_overflow(*present, delta, &sum)) {
            return Error{Errc::InvalidArgument,
                         fmt::format("add to a key that holds no number, or one that is too large ({} bytes)",
                                     found->second.size()),
                         0};
        }
    }
    if (const Status done = put(key, std::to_string(sum)); !done) return done.error();
    return sum;
}

/// Returns the present value; for an absent key the expected one, as PyTorch does.
Result<std::string> TorchStore::compare_set(const std::string& key, const std::string& expected,
                                            std::string desired) {
    const auto found = values_.find(key);
    const bool matches = found == values_.end() ? expected.empty() : found->second == expected;
    if (!matches) return found == values_.end() ? expected : found->second;
    if (const Status done = put(key, desired); !done) return done.error();
    return desired;
}

Result<std::string> TorchStore::multi_get(const std::vector<std::string>& keys) const {
    std::string all;
    for (const std::string& key : keys) {
        if (const Status fits = append_within(all, get(key)); !fits) return fits.error();
    }
    return all;
}

Result<std::string> TorchStore::list_keys() const {
    std::string all = number(static_cast<std::int64_t>(values_.size()));
    for (const auto& [name, ignored] : values_) {
        if (const Status fits = append_within(all, name); !fits) return fits.error();
    }
    return all;
}

Status TorchStore::append_within(std::string& answer, std::string_view value) const {
    append_value(answer, value);
    if (answer.size() <= limits_.request_bytes) return {};
    return Error{Errc::Limit, fmt::format("an answer of more than {} bytes", limits_.request_bytes), 0};
}

Status TorchStore::multi_set(TorchRequest& request) {
    for (std::size_t i = 0; i < request.keys.size(); ++i) {
        if (const Status done = put(request.keys[i], std::move(request.values[i])); !done) return done;
    }
    return {};
}

// ---- queues

Status TorchStore::push(const std::string& key, std::string value) {
    const auto found = queues_.find(key);
    const std::size_t taken = value.size() + (found == queues_.end() ? key.size() : 0);
    if (const Status fits = reserve(0, taken, 1); !fits) return fits;
    bytes_ += taken;
    ++queued_;
    queues_[key].push_back(std::move(value));
    wake_one(key);
    return {};
}

/// The number of values in the queue before, and the first value.
std::string TorchStore::pop(const std::string& key) {
    const auto found = queues_.find(key);
    if (found == queues_.end()) return number(0);
    std::string answer = number(static_cast<std::int64_t>(found->second.size()));
    append_value(answer, found->second.front());
    bytes_ -= found->second.front().size();
    --queued_;
    found->second.pop_front();
    if (found->second.empty()) {
        bytes_ -= key.size();
        queues_.erase(found);
    }
    return answer;
}

// ---- waiting

Reply TorchStore::wait(Client client, std::set<std::string> missing) {
    if (wait_of_.contains(client)) return Error{Errc::Protocol, "waits for two things at once", 0};
    constexpr std::size_t kNotes = 256;  // list entries
    Wait wait{client, std::move(missing), 0};
    for (const std::string& key : wait.missing) wait.bytes += 2 * key.size() + kNotes;
    if (waiting_bytes_ + wait.bytes > limits_.waiting_bytes) {
        return Error{Errc::Limit,
                     fmt::format("all clients together wait for too much ({})", format_bytes(waiting_bytes_)),
                     0};
    }
    const WaitId id = next_wait_++;
    for (const std::string& key : wait.missing) waiting_for_[key].insert(id);
    waiting_bytes_ += wait.bytes;
    wait_of_.emplace(client, id);
    waits_.emplace(id, std::move(wait));
    return kNothing;
}

/// A counter whose last client wakes the others. A name can be used once, because it counts on.
Reply TorchStore::enter_barrier(Client client, const std::string& key, std::int64_t participants) {
    // Not by put(): clients that wait for the key are in the barrier, and only the last one wakes them.
    const auto found = values_.find(key);
    const Result<std::int64_t> inside =
        found == values_.end() ? Result<std::int64_t>(0) : parse_int(found->second);
    if (!inside) return Error{Errc::InvalidArgument, "a barrier at a key that holds no number", 0};
    const bool is_last = *inside + 1 >= participants;
    auto waiting = is_last ? decltype(waiting_for_)::node_type() : waiting_for_.extract(key);
    const Result<std::int64_t> count = add(key, 1);
    if (!waiting.empty()) waiting_for_.insert(std::move(waiting));
    if (!count) return count.error();
    return is_last ? Reply(kStopWaiting) : wait(client, {key});
}

void TorchStore::wake(const std::string& key) {
    const auto listed = waiting_for_.extract(key);
    if (listed.empty()) return;
    for (const WaitId id : listed.mapped()) {
        Wait& wait = waits_.at(id);
        wait.missing.erase(key);
        const bool is_over =
            wait.missing.empty() || (wait.missing.size() == 1 && queues_.contains(*wait.missing.begin()));
        if (is_over) finish(id);
    }
}

/// Wakes one client that waits for this key alone: a second one would find the queue empty.
void TorchStore::wake_one(const std::string& key) {
    const auto listed = waiting_for_.find(key);
    if (listed == waiting_for_.end()) return;
    const auto next = std::find_if(listed->second.begin(), listed->second.end(),
                                   [this](WaitId id) { return waits_.at(id).missing.size() == 1; });
    if (next != listed->second.end()) finish(*next);
}

void TorchStore::finish(WaitId id) {
    answers_.push_back({waits_.at(id).client, kStopWaiting});
    forget(id);
}

void TorchStore::forget(WaitId id) {
    const auto node = waits_.extract(id);
    const Wait& wait = node.mapped();
    wait_of_.erase(wait.client);
    waiting_bytes_ -= wait.bytes;
    for (const std::string& key : wait.missing) {
        const auto listed = waiting_for_.find(key);
        if (listed == waiting_for_.end()) continue;
        listed->second.erase(id);
        if (listed->second.empty()) waiting_for_.erase(listed);
    }
}

void TorchStore::disconnect(Client client) {
    if (const auto mine = wait_of_.find(client); mine != wait_of_.end()) forget(mine->second);
}

void TorchStore::clear() {
    const TorchLimits limits = limits_;
    *this = TorchStore(limits);
}

}  // namespace ddprun::rdzv
