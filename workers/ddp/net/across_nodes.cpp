#include "ddp/net/across_nodes.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "ddp/net/node_rendezvous.h"
#include "ddp/shm/joining.h"
#include "ddp/worker/call.h"
#include "ddp/worker/encoded_failure.h"
#include "env/hmac.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddp::net {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;
using ddprun::WorkerEnv;

namespace {

constexpr std::chrono::milliseconds kClosedConnectionGrace{
    200};  ///< time for the reason of a closed connection to arrive
constexpr std::chrono::seconds kOtherCallGrace{
    2};  ///< time for a mismatch report of the leaders, which check when they wake up

/// The facts that a rank publishes before it has connections.
struct Introduction {
    std::string failure;  ///< why it cannot join; "" when it can
    std::string host, secret, address;
};

Introduction parse_introduction(const std::string& text) {
    std::vector<std::string> parts = unpack(text);
    if (parts.size() != 4) throw MismatchError("joining: nodes run different builds of libddp");
    return {std::move(parts[0]), std::move(parts[1]), std::move(parts[2]), std::move(parts[3])};
}

// Encodes the result of the node's first rank for its other ranks: "" and the texts, or the failure.
template <class Find>
std::string outcome_of(Find find, std::exception_ptr& failure) {
    try {
        std::vector<std::string> texts{""};
        for (const RankText& text : find()) texts.insert(texts.end(), {std::to_string(text.node), text.text});
        return pack(texts);
    } catch (const Error&) {
        return pack({encode_failure(failure = std::current_exception())});
    }
}

std::vector<RankText> texts_or_throw(const std::string& outcome) {
    const std::vector<std::string> parts = unpack(outcome);
    if (!parts.at(0).empty()) throw_encoded_failure(parts[0], "");
    std::vector<RankText> texts;
    for (std::size_t i = 2; i < parts.size(); i += 2)
        texts.push_back({static_cast<int>(ddprun::parse_int(parts[i - 1]).value_or(0)), parts[i]});
    return texts;
}

}  // namespace

AcrossNodes::AcrossNodes(std::shared_ptr<SegmentMap> segment, const WorkerEnv& env,
                         std::chrono::nanoseconds timeout, const Parts& parts)
    : node_(std::move(segment), env, timeout), open_link_(parts.open_link) {
    join_world(parts);
}

AcrossNodes::AcrossNodes(const AcrossNodes& parent, SubGroup part)
    : node_(parent.node_, part.locals, part.share),
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
    connect_peers(introductions, world_ranks);
}

AcrossNodes::~AcrossNodes() = default;

std::string AcrossNodes::make_introduction(std::unique_ptr<Link>& link, std::exception_ptr& failure) const {
    Introduction own{.failure = {}, .host = ddprun::host_name(), .secret = {}, .address = {}};
    try {
        link = open_link_();
        own.address = link->address();
        const ddprun::Result<std::string> secret = ddprun::random_hex(sizeof secret_);
        if (!secret) throw Error(secret.error().what);
        own.secret = *secret;
    } catch (const Error& error) {
        own.failure = error.what();
        failure = std::current_exception();
    }
    return pack({own.failure, own.host, own.secret, own.address});
}

void AcrossNodes::join_world(const Parts& parts) {
    std::exception_ptr own_failure;  // ends this rank, once the others know of it
    const std::vector<std::string> ours =
        node_.all_gather_bytes(make_introduction(link_, own_failure), kBytesMark);
    std::string outcome;
    if (env_.local_rank == 0) {
        outcome = outcome_of(
            [&] {
                std::map<int, std::string> texts;
                for (std::uint32_t place = 0; place < size_; ++place)
                    texts[arena_.global_rank(place)] = ours[place];
                // Must end before the other ranks of the node time out.
                const auto limit = timeout() - timeout() / 10;
                return gather_from_nodes(
                    parts.bootstrap,
                    {.rank = env_.rank,
                     .world_size = env_.world_size,
                     .generation = env_.generation,
                     .group = parts.group,
                     .deadline = ddprun::deadline_after(MonotonicClock::now(), limit),
                     .throw_if_lost =
                         [&] { throw_if_lost(header(), fmt::format("rank {}: joining", env_.rank)); }},
                    texts);
            },
            own_failure);
    }
    const std::string theirs = node_.all_gather_bytes(outcome, kBytesMark).front();
    if (own_failure) std::rethrow_exception(own_failure);
    std::vector<std::uint32_t> hosts;
    std::vector<std::string> introductions;
    std::vector<int> world_ranks;
    for (RankText& text : texts_or_throw(theirs)) {
        hosts.push_back(static_cast<std::uint32_t>(text.node));
        introductions.push_back(std::move(text.text));
        world_ranks.push_back(static_cast<int>(world_ranks.size()));
    }
    layout_ = Layout::of(hosts, static_cast<std::uint32_t>(env_.rank));
    connect_peers(introductions, world_ranks);
}

void AcrossNodes::connect_peers(const std::vector<std::string>& introductions,
                                const std::vector<int>& world_ranks) {
    std::vector<std::string> addresses;
    for (std::uint32_t rank = 0; rank < introductions.size(); ++rank) {
        const Introduction one = parse_introduction(introductions[rank]);
        peers_.push_back({world_ranks[rank], one.host});
        if (!one.failure.empty())
            throw PeerLostError(fmt::format("rank {} on {}: {}", world_ranks[rank], one.host, one.failure));
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
    failure_notice_.emplace(*link_, secret_ ^ highest_bit);
    if (!is_leader()) return;
    const std::size_t nodes = layout_.nodes.size(), longest = sizeof(Call) + header_payload_bytes(nodes);
    headers_.resize(nodes * longest);
    for (std::size_t distance = 1; distance < nodes; distance *= 2)
        header_rounds_.emplace_back().arrived.resize(std::min(distance, nodes - distance) * longest);
    for (const auto& ranks : layout_.nodes) {
        if (ranks.front() != layout_.rank) failure_notice_->add_peer(ranks.front());
    }
}

std::string AcrossNodes::describe() const {
    const std::string within = node_.describe();  // "cpu (shared memory, avx2, ...)"
    return fmt::format("{} between {} nodes{}",
                       within.substr(0, within.find(',')) + " in nodes, " + link_->describe(),
                       layout_.nodes.size(), within.substr(within.find(',')));
}

std::unique_ptr<cpu::Backend> AcrossNodes::split(const std::vector<std::uint32_t>& members,
                                                 const cpu::Exchange& exchange) {
    SubGroup part{.members = members, .locals = {}, .share = 0, .link = nullptr, .introductions = {}};
    std::vector<std::uint32_t> here;
    for (const std::uint32_t member : members) {
        if (!layout_.is_local(member)) continue;
        here.push_back(member);
        part.locals.push_back(layout_.place_of[member]);
    }
    part.share = node_.take_share(here, layout_.rank, exchange);
    const bool crosses = here.size() < members.size();
    std::exception_ptr own_failure;
    part.introductions =
        exchange(crosses ? make_introduction(part.link, own_failure) : pack({"", "", "", ""}));
    if (own_failure) std::rethrow_exception(own_failure);
    for (std::uint32_t rank = 0; rank < part.introductions.size(); ++rank) {
        if (part.introductions[rank].empty()) continue;
        const std::string why = parse_introduction(part.introductions[rank]).failure;
        if (!why.empty()) throw PeerLostError(fmt::format("rank {}: {}", peers_[rank].world_rank, why));
    }
    if (members.empty()) return nullptr;
    if (crosses) return std::make_unique<AcrossNodes>(*this, std::move(part));
    return std::make_unique<cpu::CpuBackend>(node_, part.locals, part.share);
}

/// Compares the calls of this node first. A group that failed in a call is unusable: later code may reuse the
/// memory, so the link must not write there.
void AcrossNodes::in_call(const Call& call, const std::function<void()>& body) {
    try {
        steps_.begin(call);
        call_ = steps_.call();
        began_ns_ = 0;
        body();
        steps_.end();
    } catch (...) {
        fail_group(std::current_exception());
        throw;
    }
}

template <class Exception>
void AcrossNodes::fail(const std::string& what) {
    announce_failure(std::make_exception_ptr(Exception(what)));
    throw Exception(what);
}

std::span<std::byte> AcrossNodes::allocate_shared(std::size_t bytes) {
    std::span<std::byte> region;
    in_call(cpu::Node::allocation_of(bytes), [&] {
        meet_all_nodes();
        region = node_.take_region(bytes);
    });
    return region;
}

AcrossNodes::Batch::~Batch() {
    const auto is_done = [](const Pending& message) { return message.transfer.done; };
    if (!std::all_of(messages_.begin(), messages_.end(), is_done))
        owner_.link_->abandon();  // the link would still use their memory
}

std::uint64_t AcrossNodes::next_tag(std::vector<std::uint64_t>& counts, std::uint32_t peer) const {
    return secret_ ^ ++counts[peer];
}

void AcrossNodes::Batch::send(std::uint32_t peer, std::span<const std::byte> from) {
    if (!from.empty()) send(peer, from, owner_.next_tag(owner_.sent_, peer));
}

void AcrossNodes::Batch::send(std::uint32_t peer, std::span<const std::byte> from, std::uint64_t tag) {
    // Transports define the length of receives only, so any length of a send is correct.
    Pending& message = messages_.emplace_back(Transfer{}, peer, 0, SIZE_MAX);
    owner_.link_->send(peer, tag, from, message.transfer);
}

void AcrossNodes::Batch::receive(std::uint32_t peer, std::span<std::byte> into) {
    if (into.empty()) return;
    receive_up_to(peer, into);
    messages_.back().least = into.size();
}

const AcrossNodes::Batch::Pending& AcrossNodes::Batch::receive_up_to(std::uint32_t peer,
                                                                     std::span<std::byte> into) {
    Pending& message = messages_.emplace_back(Transfer{}, peer, 0, into.size());
    owner_.link_->receive(peer, owner_.next_tag(owner_.received_, peer), into, message.transfer);
    return message;
}

/// Moves data. True: a transfer was done. Throws for a message that cannot arrive any more.
bool AcrossNodes::Batch::progress() {
    const bool any = owner_.link_->progress();
    for (const Pending& message : messages_) {
        if (!message.transfer.failure.empty()) owner_.throw_lost_or_mismatch(message);
    }
    return any;
}

void AcrossNodes::Batch::wait() {
    for (const Pending& message : messages_) owner_.wait_for(message);
    messages_.clear();
}

void AcrossNodes::wait_for(const Batch::Pending& message) {
    const Transfer& transfer = message.transfer;
    const auto is_done = [&] {
        link_->progress();
        return transfer.done;
    };
    if (!is_done()) {
        if (began_ns_ == 0) began_ns_ = now_ns();
        steps_.note_start();
        if (!spin_until(spin_budget_, is_done, cpu::Yields{})) {
            for (; !is_done(); throw_if_failed(message.peer)) {
                link_->sleep(cpu::kSleepSlice);
                advance_headers();
            }
        }
    }
    if (!transfer.failure.empty() || message.has_wrong_length()) throw_lost_or_mismatch(message);
}

// A rank that ends closes its connections, and a rank in another call sends other bytes. The reason arrives
// separately and says more: from the launcher, in a header, or as a failure notice. So wait for it before
// throwing.
void AcrossNodes::throw_lost_or_mismatch(const Batch::Pending& message) {
    const Transfer& transfer = message.transfer;
    if (began_ns_ == 0) began_ns_ = now_ns();  // it failed at once: that is no time-out
    const auto limit =
        transfer.failure.empty() ? kOtherCallGrace : std::chrono::nanoseconds(kClosedConnectionGrace);
    const auto until = MonotonicClock::now() + limit;
    for (; MonotonicClock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
        throw_if_failed(message.peer);
        link_->progress();
        advance_headers();
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
std::chrono::nanoseconds AcrossNodes::deadline_extension() const {
    return std::min<std::chrono::nanoseconds>(timeout() / 8, std::chrono::seconds(1));
}

std::string AcrossNodes::attempt() const { return fmt::format("rank {}: {}", env_.rank, to_string(call_)); }

std::string AcrossNodes::name_of(std::uint32_t peer) const {
    return fmt::format("rank {} on {}", peers_[peer].world_rank, peers_[peer].host);
}

void AcrossNodes::throw_if_failed(std::uint32_t peer) {
    throw_if_lost(header(), attempt());
    try {
        cpu::throw_posted_failure(arena_.control(), attempt());
        throw_failure_notice();
    } catch (...) {
        announce_failure(std::current_exception());
        throw;
    }
    // After the first round of headers a third node may be missing; the leader that waits for it knows.
    const int extensions = header_batch_ && header_round_ > 0 ? 2 : 1;
    if (now_ns() - began_ns_ < (timeout() + extensions * deadline_extension()).count()) return;
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
void AcrossNodes::announce_failure(const std::exception_ptr& failure) {
    cpu::post_failure(arena_.control(), encode_failure(failure));
    failure_notice_->send(failure);
}

void AcrossNodes::throw_failure_notice() const {
    if (const auto notice = failure_notice_->received())
        throw_encoded_failure(notice->text, fmt::format("{}: {} failed: ", attempt(), name_of(notice->peer)));
}

/// Ends the group: no call can follow, and no rank writes to its memory. Ranks learn of the end of a
/// generation from the launcher instead.
void AcrossNodes::fail_group(const std::exception_ptr& why) {
    if (header().aborted.load(std::memory_order_relaxed) == 0) failure_notice_->send(why);
    header_batch_.reset();
    link_->abandon();
    steps_.mark_broken(why);
}

void AcrossNodes::send_header(std::size_t payload_bytes) {
    const std::size_t nodes = layout_.nodes.size(), here = layout_.node();
    header_batch_ = std::make_unique<Batch>(*this);
    header_bytes_ = sizeof call_ + payload_bytes;
    header_round_ = 0;
    std::memcpy(headers_.data(), &call_, sizeof call_);
    // Takes all numbers of messages now: those of the call's data follow.
    for (std::size_t round = 0; round < header_rounds_.size(); ++round) {
        const std::size_t distance = std::size_t{1} << round;
        HeaderRound& one = header_rounds_[round];
        one.arriving = &header_batch_->receive_up_to(layout_.nodes[(here + nodes - distance) % nodes].front(),
                                                     one.arrived);
        one.tag = next_tag(sent_, layout_.nodes[(here + distance) % nodes].front());
    }
    send_header_round();
}

void AcrossNodes::send_header_round() {
    if (header_round_ == header_rounds_.size()) return;
    const std::size_t nodes = layout_.nodes.size(), distance = std::size_t{1} << header_round_;
    header_batch_->send(layout_.nodes[(layout_.node() + distance) % nodes].front(),
                        std::span(headers_).first(std::min(distance, nodes - distance) * header_bytes_),
                        header_rounds_[header_round_].tag);
}

void AcrossNodes::receive_headers() {
    if (!header_batch_) return;
    for (; header_round_ < header_rounds_.size(); advance_headers())
        wait_for(*header_rounds_[header_round_].arriving);
    header_batch_->wait();
    header_batch_.reset();
}

// Compares the sender's header only: it has compared the others of its message, or it would have failed.
void AcrossNodes::advance_headers() {
    while (header_batch_ && header_round_ < header_rounds_.size()) {
        const HeaderRound& round = header_rounds_[header_round_];
        const Transfer& transfer = round.arriving->transfer;
        if (!transfer.done || !transfer.failure.empty()) return;
        Call theirs;
        if (transfer.bytes >= sizeof theirs) std::memcpy(&theirs, round.arrived.data(), sizeof theirs);
        if (theirs != call_)
            fail<MismatchError>(fmt::format(
                "rank {}: ranks called different collectives: {} called {}, {} called {}", env_.rank,
                name_of(layout_.rank), to_string(call_), name_of(round.arriving->peer), to_string(theirs)));
        const std::size_t at = header_bytes_ << header_round_;
        if (++header_round_ < header_rounds_.size())
            std::memcpy(headers_.data() + at, round.arrived.data(), transfer.bytes);
        send_header_round();
    }
}

const std::byte* AcrossNodes::payload_of(std::uint32_t node) const {
    const auto nodes = static_cast<std::uint32_t>(layout_.nodes.size());
    const std::uint32_t distance = (layout_.node() + nodes - node) % nodes;
    if (distance == 0) return headers_.data() + sizeof(Call);
    const auto round = static_cast<std::size_t>(std::bit_width(distance)) - 1;
    const std::size_t before = distance - (std::size_t{1} << round);
    return header_rounds_[round].arrived.data() + before * header_bytes_ + sizeof(Call);
}

/// A message between nodes: its header, with the payload when it is small, then the rest.
struct AcrossNodes::RemoteMessage {
    Message message;
    Call call;
    std::vector<std::byte> first;
    const Batch::Pending* arriving = nullptr;

    [[nodiscard]] std::span<std::byte> bytes() const {
        return {bytes_of(message.buffer), message.buffer.bytes()};
    }
    [[nodiscard]] bool fits_first() const { return bytes().size() <= kInlineBytes; }
};

void AcrossNodes::batch(std::span<const Message> messages) {
    steps_.throw_if_broken();
    std::deque<RemoteMessage> remote;
    Batch together(*this);
    try {
        std::vector<Message> local;
        began_ns_ = now_ns();
        for (Message message : messages) {
            const auto peer = static_cast<std::uint32_t>(message.peer);
            if (!layout_.is_local(peer)) {
                begin(
                    remote.emplace_back(message, Call{}, std::vector<std::byte>(sizeof(Call) + kInlineBytes)),
                    together);
                continue;
            }
            message.peer = static_cast<int>(layout_.place_of[peer]);
            local.push_back(message);
        }
        // Messages to other nodes move meanwhile: a rank of this node may wait for one before it serves this
        // rank.
        if (!local.empty()) node_.move(local, [&] { return together.progress(); });
        for (const RemoteMessage& one : remote) arrive(one);
        together.wait();
    } catch (...) {
        fail_group(std::current_exception());
        throw;
    }
}

void AcrossNodes::begin(RemoteMessage& remote, Batch& together) {
    const bool sending = remote.message.direction == Message::Direction::Send;
    const auto peer = static_cast<std::uint32_t>(remote.message.peer);
    std::vector<std::uint64_t>& numbers = sending ? messages_to_ : messages_from_;
    numbers.resize(peers_.size());
    failure_notice_->add_peer(peer);
    remote.call = call_ = call_of(sending ? SegmentOp::Send : SegmentOp::Recv, remote.message.buffer,
                                  ReduceOp::Sum, peers_[peer].world_rank);
    remote.call.seq = call_.seq = ++numbers[peer];
    if (!sending) {
        remote.arriving = &together.receive_up_to(peer, remote.first);
        if (!remote.fits_first()) together.receive(peer, remote.bytes());
        return;
    }
    const std::size_t inlined = remote.fits_first() ? remote.bytes().size() : 0;
    std::memcpy(remote.first.data(), &remote.call, sizeof remote.call);
    copy_bytes(remote.first.data() + sizeof remote.call, remote.bytes().data(), inlined);
    together.send(peer, std::span(remote.first).first(sizeof remote.call + inlined));
    if (!remote.fits_first()) together.send(peer, remote.bytes());
}

/// Compares a received message with the expected one.
void AcrossNodes::arrive(const RemoteMessage& remote) {
    if (remote.arriving == nullptr) return;
    call_ = remote.call;
    wait_for(*remote.arriving);
    Call sent;
    std::memcpy(&sent, remote.first.data(), sizeof sent);
    if (sent.operation != SegmentOp::Send || sent.seq != call_.seq || sent.bytes != call_.bytes ||
        sent.dtype != call_.dtype) {
        fail<MismatchError>(fmt::format(
            "rank {}: a message is not the one expected: {} called {}, {} called {}", env_.rank,
            name_of(layout_.rank), to_string(call_), name_of(remote.arriving->peer), to_string(sent)));
    }
    if (remote.fits_first())
        copy_bytes(remote.bytes().data(), remote.first.data() + sizeof sent, remote.bytes().size());
}

}  // namespace ddp::net
