#include "ddp/net/across_nodes.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "ddp/net/across_calls.h"
#include "ddp/net/meeting.h"
#include "ddp/shm/joining.h"
#include "ddp/worker/call.h"
#include "ddp/worker/told_failure.h"
#include "env/hmac.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddp::net {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;
using ddprun::WorkerEnv;

namespace {

constexpr std::chrono::milliseconds kOfAClosedConnection{
    200};  ///< time for the reason of a closed connection to arrive
constexpr std::chrono::seconds kOfAnotherCall{
    2};  ///< time for a mismatch report of the leaders, which check when they wake up

/// What a rank publishes before it has connections.
struct Introduction {
    std::string failure;  ///< why it cannot join; "" when it can
    std::string host, secret, address;
};

Introduction introduction_of(const std::string& word) {
    std::vector<std::string> parts = unpack(word);
    if (parts.size() != 4) throw MismatchError("joining: nodes run different builds of libddp");
    return {std::move(parts[0]), std::move(parts[1]), std::move(parts[2]), std::move(parts[3])};
}

// Encodes the result of the node's first rank for its other ranks: "" and the texts, or a failure.
template <class Find>
std::string outcome_of(Find find) {
    try {
        std::vector<std::string> words{""};
        for (const Word& word : find()) words.insert(words.end(), {std::to_string(word.node), word.text});
        return pack(words);
    } catch (const Error&) {
        return pack({told(std::current_exception())});
    }
}

std::vector<Word> words_or_throw(const std::string& outcome) {
    const std::vector<std::string> parts = unpack(outcome);
    if (!parts.at(0).empty()) throw_told(parts[0], "");
    std::vector<Word> words;
    for (std::size_t i = 2; i < parts.size(); i += 2)
        words.push_back({static_cast<int>(ddprun::parse_int(parts[i - 1]).value_or(0)), parts[i]});
    return words;
}

}  // namespace

// ---- rendezvous

AcrossNodes::AcrossNodes(std::shared_ptr<SegmentMap> segment, const WorkerEnv& env,
                         std::chrono::nanoseconds timeout, const Parts& parts)
    : CpuBackend(std::move(segment), env, timeout), open_link_(parts.open_link) {
    meet_world(parts);
}

AcrossNodes::AcrossNodes(const AcrossNodes& parent, SubGroup part)
    : CpuBackend(parent, part.locals, part.share),
      open_link_(parent.open_link_),
      link_(std::move(part.link)) {
    std::vector<std::uint32_t> hosts;
    std::vector<std::string> introductions;
    std::vector<int> world_ranks;
    for (const std::uint32_t member : part.members) {
        hosts.push_back(parent.layout_.node_of[member]);
        introductions.push_back(part.introductions[member]);
        world_ranks.push_back(parent.peers_[member].world_rank);
    }
    const auto own = std::find(part.members.begin(), part.members.end(), parent.layout_.rank);
    layout_ = Layout::of(hosts, static_cast<std::uint32_t>(own - part.members.begin()));
    settle(introductions, world_ranks);
}

AcrossNodes::~AcrossNodes() = default;

std::string AcrossNodes::introduce(std::unique_ptr<Link>& link, const std::string& failure) const {
    Introduction own{.failure = failure, .host = ddprun::host_name(), .secret = {}, .address = {}};
    try {
        link = open_link_();
        own.address = link->address();
        const ddprun::Result<std::string> secret = ddprun::random_hex(sizeof secret_);
        if (secret) own.secret = *secret;
        else own.failure = secret.error().what;
    } catch (const Error& error) {
        own.failure = error.what();
    }
    return pack({own.failure, own.host, own.secret, own.address});
}

void AcrossNodes::meet_world(const Parts& parts) {
    const std::vector<std::string> ours = CpuBackend::all_gather_bytes(introduce(link_, ""), kBytesMark);
    std::string outcome;
    if (env_.local_rank == 0) {
        outcome = outcome_of([&] {
            std::map<int, std::string> words;
            for (std::uint32_t place = 0; place < size_; ++place)
                words[arena_.global_rank(place)] = ours[place];
            // Must end before the other ranks of the node time out.
            const auto patience = timeout() - timeout() / 10;
            return gather_nodes(
                parts.board,
                {.rank = env_.rank,
                 .world_size = env_.world_size,
                 .generation = env_.generation,
                 .group = parts.group,
                 .deadline = ddprun::deadline_after(MonotonicClock::now(), patience),
                 .throw_if_lost =
                     [&] { throw_if_lost(segment_->header(), fmt::format("rank {}: joining", env_.rank)); }},
                words);
        });
    }
    std::vector<std::uint32_t> hosts;
    std::vector<std::string> introductions;
    std::vector<int> world_ranks;
    for (Word& word : words_or_throw(CpuBackend::all_gather_bytes(outcome, kBytesMark).front())) {
        hosts.push_back(static_cast<std::uint32_t>(word.node));
        introductions.push_back(std::move(word.text));
        world_ranks.push_back(static_cast<int>(world_ranks.size()));
    }
    layout_ = Layout::of(hosts, static_cast<std::uint32_t>(env_.rank));
    settle(introductions, world_ranks);
}

void AcrossNodes::settle(const std::vector<std::string>& introductions, const std::vector<int>& world_ranks) {
    std::vector<std::string> addresses;
    for (std::uint32_t rank = 0; rank < introductions.size(); ++rank) {
        const Introduction one = introduction_of(introductions[rank]);
        peers_.push_back({world_ranks[rank], one.host});
        if (!one.failure.empty())
            throw InvalidInput(fmt::format("rank {} on {}: {}", world_ranks[rank], one.host, one.failure));
        addresses.push_back(layout_.is_local(rank) ? "" : one.address);
        // The secret is the XOR of all ranks' parts, so it is as good as the best part.
        const ddprun::Result<std::string> bytes = ddprun::from_hex(one.secret);
        std::uint64_t part = 0;
        if (bytes && bytes->size() == sizeof part) std::memcpy(&part, bytes->data(), sizeof part);
        secret_ ^= part;
    }
    secret_ &= link_->tag_mask();
    link_->connect(addresses);
    sent_.resize(peers_.size());
    received_.resize(peers_.size());
    const std::uint64_t highest_bit =
        link_->tag_mask() - (link_->tag_mask() >> 1);  // the tags of other messages count from 1
    last_words_.emplace(*link_, secret_ ^ highest_bit);
    if (!speaks()) return;
    words_.assign(layout_.nodes.size(),
                  std::vector<std::byte>(sizeof(Call) + spoken_bytes(layout_.nodes.size())));
    for (const auto& ranks : layout_.nodes) {
        if (ranks.front() != layout_.rank) last_words_->expect(ranks.front());
    }
}

std::string AcrossNodes::describe() const {
    const std::string within = CpuBackend::describe();  // "cpu (shared memory, avx2, ...)"
    return fmt::format("{} between {} nodes{}",
                       within.substr(0, within.find(',')) + " in nodes, " + link_->describe(),
                       layout_.nodes.size(), within.substr(within.find(',')));
}

std::unique_ptr<cpu::CpuBackend> AcrossNodes::split(const std::vector<std::uint32_t>& members) {
    SubGroup part{.members = members, .locals = {}, .share = 0, .link = nullptr, .introductions = {}};
    for (const std::uint32_t member : members) {
        if (layout_.is_local(member)) part.locals.push_back(layout_.place_of[member]);
    }
    std::string failure;
    try {
        part.share = take_share(part.locals);
    } catch (const InvalidInput& error) {
        failure = error.what();
    }
    const bool crosses = part.locals.size() < members.size();
    const std::string own = crosses ? introduce(part.link, failure) : pack({failure, "", "", ""});
    part.introductions = all_gather_bytes(own, kSplitMark);
    for (std::uint32_t rank = 0; rank < part.introductions.size(); ++rank) {
        const std::string why = introduction_of(part.introductions[rank]).failure;
        if (!why.empty()) throw InvalidInput(fmt::format("rank {}: {}", peers_[rank].world_rank, why));
    }
    if (members.empty()) return nullptr;
    if (crosses) return std::make_unique<AcrossNodes>(*this, std::move(part));
    return std::make_unique<CpuBackend>(*this, part.locals, part.share);
}

std::span<std::byte> AcrossNodes::allocate_shared(std::size_t bytes) {
    std::span<std::byte> region;
    in_call(allocation_of(bytes), [&] {
        open();
        region = take_region(bytes);
    });
    return region;
}

// ---- messages

AcrossNodes::Batch::~Batch() {
    const auto is_done = [](const Begun& message) { return message.transfer.done; };
    if (!std::all_of(messages_.begin(), messages_.end(), is_done))
        owner_.link_->abandon();  // the link would still use their memory
}

std::uint64_t AcrossNodes::next_tag(std::vector<std::uint64_t>& counts, std::uint32_t peer) const {
    return secret_ ^ ++counts[peer];
}

void AcrossNodes::Batch::send(std::uint32_t peer, std::span<const std::byte> from) {
    if (from.empty()) return;
    // Transports define the length of receives only, so any length of a send is correct.
    Begun& message = messages_.emplace_back(Transfer{}, peer, 0, SIZE_MAX);
    owner_.link_->send(peer, owner_.next_tag(owner_.sent_, peer), from, message.transfer);
}

void AcrossNodes::Batch::receive(std::uint32_t peer, std::span<std::byte> into) {
    if (into.empty()) return;
    receive_up_to(peer, into);
    messages_.back().least = into.size();
}

const AcrossNodes::Batch::Begun& AcrossNodes::Batch::receive_up_to(std::uint32_t peer,
                                                                   std::span<std::byte> into) {
    Begun& message = messages_.emplace_back(Transfer{}, peer, 0, into.size());
    owner_.link_->receive(peer, owner_.next_tag(owner_.received_, peer), into, message.transfer);
    return message;
}

/// Moves data. True: a transfer was done. Throws for a message that cannot arrive any more.
bool AcrossNodes::Batch::look() {
    const bool any = owner_.link_->look();
    for (const Begun& message : messages_) {
        if (!message.transfer.failure.empty()) owner_.lament(message);
    }
    return any;
}

void AcrossNodes::Batch::wait() {
    for (const Begun& message : messages_) owner_.wait_for(message);
    messages_.clear();
}

void AcrossNodes::wait_for(const Batch::Begun& message) {
    const Transfer& transfer = message.transfer;
    const auto is_done = [&] {
        link_->look();
        return transfer.done;
    };
    if (!is_done()) {
        if (began_ns_ == 0) began_ns_ = now_ns();
        steps_.note_start();
        if (!spin_until(spin_budget_, is_done, cpu::Yields{})) {
            for (; !is_done(); throw_if_failed(message.peer)) {
                link_->sleep(cpu::kSleepSlice);
                compare_heard();
            }
        }
    }
    if (!transfer.failure.empty() || message.is_other()) lament(message);
}

// A rank that ends closes its connections, and a rank in another call sends other bytes. The reason arrives
// separately and says more: from the launcher, in a header, or as a failure notice. So wait for it before
// throwing.
void AcrossNodes::lament(const Batch::Begun& message) {
    const Transfer& transfer = message.transfer;
    if (began_ns_ == 0) began_ns_ = now_ns();  // it failed at once: that is no time-out
    const auto patience =
        transfer.failure.empty() ? kOfAnotherCall : std::chrono::nanoseconds(kOfAClosedConnection);
    const auto until = MonotonicClock::now() + patience;
    for (; MonotonicClock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
        throw_if_failed(message.peer);
        link_->look();
        compare_heard();
    }
    if (!transfer.failure.empty())
        fail<PeerLostError>(
            fmt::format("{}: the connection to {}: {}", attempt(), name_of(message.peer), transfer.failure));
    fail<MismatchError>(
        fmt::format("{}: {} sent {} bytes where {} were expected: it called another collective", attempt(),
                    name_of(message.peer), transfer.bytes, message.most));
}

// A node detects its own missing rank within the time-out, and names it. The leaders of other nodes learn of
// it in this additional time, and their ranks in twice as much.
std::chrono::nanoseconds AcrossNodes::patience() const {
    return std::min<std::chrono::nanoseconds>(timeout() / 8, std::chrono::seconds(1));
}

std::string AcrossNodes::attempt() const { return fmt::format("rank {}: {}", env_.rank, to_string(call_)); }

std::string AcrossNodes::name_of(std::uint32_t peer) const {
    return fmt::format("rank {} on {}", peers_[peer].world_rank, peers_[peer].host);
}

void AcrossNodes::throw_if_failed(std::uint32_t peer) {
    throw_if_lost(segment_->header(), attempt());
    try {
        cpu::throw_posted_failure(arena_.control(), attempt());
        throw_last_words();
    } catch (...) {
        pass_on(std::current_exception());
        throw;
    }
    if (now_ns() - began_ns_ < (timeout() + patience()).count()) return;
    std::vector<std::uint32_t> others;
    for (std::uint32_t place = 0; place < arena_.ranks(); ++place) {
        if (place != arena_.rank()) others.push_back(place);
    }
    const std::string here = cpu::describe_activities(arena_, others, MonotonicClock::now());
    fail<TimeoutError>(fmt::format("{} did not finish within {}: nothing came from {}{}{}", attempt(),
                                   ddprun::format_duration(timeout()), name_of(peer),
                                   here.empty() ? "" : "; ", here));
}

/// Announces a failure to the ranks of this node and of other nodes. Call it before the connections are
/// abandoned, as the destructor of an unfinished Batch does.
void AcrossNodes::pass_on(const std::exception_ptr& failure) {
    cpu::post_failure(arena_.control(), told(failure));
    last_words_->say(failure);
}

/// Throws a failure notice of another node.
void AcrossNodes::throw_last_words() const {
    if (const auto heard = last_words_->heard())
        throw_told(heard->words, fmt::format("{}: {} failed: ", attempt(), name_of(heard->peer)));
}

/// Ends the group: no call can follow, and no rank writes to its memory. Ranks learn of the end of a
/// generation from the launcher instead.
void AcrossNodes::end_with(const std::exception_ptr& why) {
    if (segment_->header().aborted.load(std::memory_order_relaxed) == 0) last_words_->say(why);
    greetings_.reset();
    link_->abandon();
    mark_broken(why);
}

// ---- headers

void AcrossNodes::greet(std::span<const std::byte> bytes) {
    greetings_ = std::make_unique<Batch>(*this);
    compared_.assign(layout_.nodes.size(), false);
    for (std::uint32_t node = 0; node < layout_.nodes.size(); ++node) {
        if (node != layout_.node()) greetings_->receive_up_to(layout_.nodes[node].front(), words_[node]);
    }
    std::vector<std::byte>& own = words_[layout_.node()];
    std::memcpy(own.data(), &call_, sizeof call_);
    if (!bytes.empty()) std::memcpy(own.data() + sizeof call_, bytes.data(), bytes.size());
    for (const auto& ranks : layout_.nodes) {
        if (ranks.front() != layout_.rank)
            greetings_->send(ranks.front(), std::span(own).first(sizeof call_ + bytes.size()));
    }
}

void AcrossNodes::hear() {
    if (!greetings_) return;
    for (const Batch::Begun& one : greetings_->messages_) wait_for(one);
    compare_heard();
    greetings_.reset();
}

// The expected headers come first in the batch, in node order.
void AcrossNodes::compare_heard() {
    if (!greetings_) return;
    auto next = greetings_->messages_.begin();
    for (std::uint32_t node = 0; node < layout_.nodes.size(); ++node) {
        if (node == layout_.node()) continue;
        const Batch::Begun& message = *next++;
        if (compared_[node] || !message.transfer.done || !message.transfer.failure.empty()) continue;
        compared_[node] = true;
        Call theirs;
        if (message.transfer.bytes >= sizeof theirs) std::memcpy(&theirs, words_[node].data(), sizeof theirs);
        if (theirs == call_) continue;
        fail<MismatchError>(
            fmt::format("rank {}: ranks called different collectives: {} called {}, {} called {}", env_.rank,
                        name_of(layout_.rank), to_string(call_), name_of(message.peer), to_string(theirs)));
    }
}

// ---- messages between two ranks

/// A message between nodes: its header, with the payload when it is small, then the rest.
struct AcrossNodes::Carried {
    Message message;
    Call call;
    std::vector<std::byte> first;
    const Batch::Begun* arriving = nullptr;

    [[nodiscard]] std::span<std::byte> bytes() const {
        return {bytes_of(message.buffer), message.buffer.bytes()};
    }
    [[nodiscard]] bool fits_first() const { return bytes().size() <= kInlineBytes; }
};

void AcrossNodes::send(Buffer buffer, int to) { batch({{Message::Direction::Send, buffer, to}}); }
void AcrossNodes::recv(Buffer buffer, int from) { batch({{Message::Direction::Recv, buffer, from}}); }

void AcrossNodes::batch(const std::vector<Message>& messages) {
    steps_.throw_if_broken();
    std::deque<Carried> carried;
    Batch together(*this);
    try {
        std::vector<Message> local;
        began_ns_ = now_ns();
        for (Message message : messages) {
            const auto peer = static_cast<std::uint32_t>(message.peer);
            if (!layout_.is_local(peer)) {
                begin(carried.emplace_back(message, Call{},
                                           std::vector<std::byte>(sizeof(Call) + kInlineBytes)),
                      together);
                continue;
            }
            message.peer = static_cast<int>(layout_.place_of[peer]);
            local.push_back(message);
        }
        // Messages to other nodes move meanwhile: a rank of this node may wait for one before it serves this
        // rank.
        if (!local.empty()) batch_here(local, [&] { return together.look(); });
        for (const Carried& one : carried) arrive(one);
        together.wait();
    } catch (...) {
        end_with(std::current_exception());
        throw;
    }
}

void AcrossNodes::begin(Carried& carried, Batch& together) {
    const bool sending = carried.message.direction == Message::Direction::Send;
    const auto peer = static_cast<std::uint32_t>(carried.message.peer);
    std::vector<std::uint64_t>& numbers = sending ? messages_to_ : messages_from_;
    numbers.resize(peers_.size());
    last_words_->expect(peer);
    carried.call = call_ = call_of(sending ? SegmentOp::Send : SegmentOp::Recv, carried.message.buffer,
                                   ReduceOp::Sum, peers_[peer].world_rank);
    carried.call.seq = call_.seq = ++numbers[peer];
    if (!sending) {
        carried.arriving = &together.receive_up_to(peer, carried.first);
        if (!carried.fits_first()) together.receive(peer, carried.bytes());
        return;
    }
    const std::size_t inlined = carried.fits_first() ? carried.bytes().size() : 0;
    std::memcpy(carried.first.data(), &carried.call, sizeof carried.call);
    copy_bytes(carried.first.data() + sizeof carried.call, carried.bytes().data(), inlined);
    together.send(peer, std::span(carried.first).first(sizeof carried.call + inlined));
    if (!carried.fits_first()) together.send(peer, carried.bytes());
}

/// Compares a received message with the expected one.
void AcrossNodes::arrive(const Carried& carried) {
    if (carried.arriving == nullptr) return;
    call_ = carried.call;
    wait_for(*carried.arriving);
    Call sent;
    std::memcpy(&sent, carried.first.data(), sizeof sent);
    if (sent.operation != SegmentOp::Send || sent.seq != call_.seq || sent.bytes != call_.bytes ||
        sent.dtype != call_.dtype) {
        fail<MismatchError>(fmt::format(
            "rank {}: a message is not the one expected: {} called {}, {} called {}", env_.rank,
            name_of(layout_.rank), to_string(call_), name_of(carried.arriving->peer), to_string(sent)));
    }
    if (carried.fits_first())
        copy_bytes(carried.bytes().data(), carried.first.data() + sizeof sent, carried.bytes().size());
}

}  // namespace ddp::net
