#include "ddp/shm/node.h"

#include <fmt/core.h>

#include <optional>
#include <utility>

namespace ddp::cpu {

using ddprun::SegmentOp;

namespace {

/// A rank's part of shared memory is a multiple of this: a page, which lies in that rank's memory, or less
/// where pages are larger. A model's shared weights are divided without gaps (FlatLayout::kChunk).
constexpr std::size_t kSharePage = 4096;

Arena& joined(Arena& arena, const ddprun::WorkerEnv& env, std::chrono::nanoseconds timeout) {
    join(arena, env, ddprun::deadline_after(ddprun::MonotonicClock::now(), timeout));
    return arena;
}

std::shared_ptr<SegmentMap> checked(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env) {
    check_claim(*segment, env);
    return segment;
}

std::vector<std::uint32_t> locals_of(const Arena& parent, const std::vector<std::uint32_t>& members) {
    std::vector<std::uint32_t> locals;
    for (const std::uint32_t member : members) locals.push_back(parent.members()[member]);
    return locals;
}

std::uint32_t place_of(std::uint32_t rank, const std::vector<std::uint32_t>& members) {
    return static_cast<std::uint32_t>(std::find(members.begin(), members.end(), rank) - members.begin());
}

}  // namespace

Node::Node(std::shared_ptr<SegmentMap> map, const ddprun::WorkerEnv& environment,
           std::chrono::nanoseconds timeout, Arena::Lines lines, const Kernels& kernels)
    : env(environment),
      segment(checked(std::move(map), env)),
      arena(segment, static_cast<std::uint32_t>(env.local_rank), lines,
            ddprun::deadline_after(ddprun::MonotonicClock::now(), timeout)),
      rank(arena.rank()),
      size(arena.ranks()),
      cpus(read_node_cpus(joined(arena, env, timeout))),
      steps(arena, cpus, timeout),
      loops(kernels),
      messages_(arena, cpus, timeout, loops) {}

Node::Node(const Node& parent, const std::vector<std::uint32_t>& members, std::uint32_t share)
    : env(parent.env),
      segment(parent.segment),
      arena(segment, locals_of(parent.arena, members), place_of(parent.rank, members), share),
      rank(arena.rank()),
      size(arena.ranks()),
      cpus(parent.cpus),
      steps(joined(arena, env, parent.steps.timeout()), cpus, parent.steps.timeout()),
      loops(parent.loops),
      messages_(arena, cpus, steps.timeout(), loops) {}

// Discards only this rank's parts: a peer may still be inside the last collective, but no rank reads another
// one's shared buffer after the last step of a collective. A rank that has left a collective by a failure may
// have left before that step: a slower peer can still sum what is in its buffer, and complete the collective.
Node::~Node() {
    const bool has_failed = steps.is_broken() || segment->header().aborted.load() != 0;
    if (has_failed) return;  // the memory is freed when all ranks have left
    for (const Region& region : regions_) {
        if (!region.others_use_it) segment->discard(region.offset + rank * region.stride, region.stride);
    }
}

std::string Node::describe() const {
    return fmt::format("cpu (shared memory, {}, {})", loops.name,
                       cpus.ranks_share_cores ? "waiting by sleeping" : "waiting by spinning");
}

void Node::report_progress(std::uint64_t step, std::uint64_t samples) {
    ddp::report_progress(segment->line(arena.members()[rank]), step, samples);
}

Call Node::allocation_of(std::size_t bytes) {
    constexpr std::uint64_t kMost = SharedPlace::kMostBytes - kSharePage;
    if (bytes <= kMost) return {.bytes = bytes, .root = kAllocateMark, .operation = SegmentOp::Barrier};
    throw InvalidInput(
        fmt::format("allocate_shared: {} bytes are requested, one call gives {} at most", bytes, kMost));
}

std::span<std::byte> Node::allocate_shared(std::size_t bytes) {
    steps.begin(allocation_of(bytes));
    meet();  // before the arithmetic: ranks that disagree about the size would take different pieces
    const std::span<std::byte> region = take_region(bytes);
    steps.end();
    return region;
}

std::span<std::byte> Node::take_region(std::size_t bytes) {
    const std::size_t stride = round_up(std::max<std::size_t>(bytes, 1), kSharePage);
    const Arena::Piece piece = arena.take(stride * size);
    regions_.push_back({piece.address, piece.offset, stride, false});
    std::byte* mine = piece.address + rank * stride;
    populate(mine, stride);
    return {mine, bytes};
}

std::span<std::byte> Node::shared_by_all(std::span<std::byte> mine) {
    for (Region& region : regions_) {
        if (region.base + rank * region.stride != mine.data() || region.stride != mine.size()) continue;
        region.others_use_it = true;
        return {region.base, region.stride * size};
    }
    return {};
}

std::uint64_t Node::locate(const void* data, std::size_t bytes) const {
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    for (std::size_t index = 0; index < regions_.size(); ++index) {
        const Region& region = regions_[index];
        const auto begin = reinterpret_cast<std::uintptr_t>(region.base + rank * region.stride);
        if (at < begin || at >= begin + region.stride || bytes > begin + region.stride - at) continue;
        return SharedPlace{index, at - begin}.word();
    }
    return kNotShared;
}

bool Node::tell_place(const void* data, std::size_t bytes) {
    const std::uint64_t place = locate(data, bytes);
    steps.own_slot().shared_at = place;
    return place != kNotShared;
}

std::uint32_t Node::ranks_in_shared_memory() const {
    std::uint32_t ranks = 0;
    for (std::uint32_t r = 0; r < size; ++r) ranks += steps.slot_of(r).shared_at != kNotShared ? 1 : 0;
    return ranks;
}

std::vector<std::byte*> Node::shared_buffers() const {
    std::vector<std::byte*> buffers;
    for (std::uint32_t r = 0; r < size; ++r) {
        const std::uint64_t told = steps.slot_of(r).shared_at;
        if (told == kNotShared) return {};
        const SharedPlace place = SharedPlace::of(told);
        const Region& region = regions_[place.region];
        buffers.push_back(region.base + r * region.stride + place.offset);
    }
    return buffers;
}

ReduceFunction Node::reduction(DType type, ReduceOp op) const {
    return loops.reduce[static_cast<std::size_t>(type)][static_cast<std::size_t>(op)];
}

namespace {

/// The result of taking a share, as the first member sends it; other ranks send "".
struct ShareTaken {
    std::uint32_t share = 0;
    std::string why_not;
};

std::string encode(const ShareTaken& taken) {
    return std::string(reinterpret_cast<const char*>(&taken.share), sizeof taken.share) + taken.why_not;
}

ShareTaken share_taken(const std::string& message) {
    ShareTaken taken{.share = 0, .why_not = message.substr(sizeof taken.share)};
    std::memcpy(&taken.share, message.data(), sizeof taken.share);
    return taken;
}

ShareTaken try_to_take(SegmentMap& segment) {
    try {
        return {.share = Arena::take_share(segment), .why_not = {}};
    } catch (const InvalidInput& error) {
        return {.share = 0, .why_not = error.what()};
    }
}

}  // namespace

// All ranks see the same answers. A share that the failed split took is given back.
std::uint32_t Node::take_share(const std::vector<std::uint32_t>& members, std::uint32_t own,
                               const Exchange& exchange) {
    std::optional<ShareTaken> mine;
    if (!members.empty() && members.front() == own) mine = try_to_take(*segment);
    std::uint32_t share = 0;
    std::string why_not;
    const std::vector<std::string> answers = exchange(mine ? encode(*mine) : "");
    for (std::uint32_t r = 0; r < answers.size(); ++r) {
        if (answers[r].empty()) continue;
        const ShareTaken theirs = share_taken(answers[r]);
        if (why_not.empty()) why_not = theirs.why_not;
        if (!members.empty() && members.front() == r) share = theirs.share;
    }
    if (why_not.empty()) return share;
    if (mine && mine->why_not.empty()) Arena::give_back(*segment, mine->share);
    throw InvalidInput(why_not);
}

// After a failed transfer the pair cannot take part in collectives either.
void Node::move(std::span<const Message> messages, const std::function<bool()>& meanwhile) {
    steps.throw_if_broken();
    try {
        messages_.move(messages, meanwhile);
    } catch (...) {
        steps.mark_broken(std::current_exception());
        throw;
    }
}

std::vector<std::string> Node::all_gather_bytes(std::string_view mine, std::int16_t mark) {
    steps.begin({.root = mark, .operation = SegmentOp::AllGather});
    std::vector<std::string> all = gather_bytes(mine);
    steps.end();
    return all;
}

std::vector<std::string> Node::gather_bytes(std::string_view mine) {
    const std::uint64_t own_length = mine.size();
    std::memcpy(steps.own_slot().message(sizeof own_length), &own_length, sizeof own_length);
    meet();
    std::vector<std::string> all(size);
    std::size_t longest = 0;
    for (std::uint32_t r = 0; r < size; ++r) {
        std::uint64_t length = 0;
        std::memcpy(&length, steps.slot_of(r).message(sizeof length), sizeof length);
        all[r].resize(length);
        longest = std::max(longest, static_cast<std::size_t>(length));
    }
    for (std::size_t at = 0; at < longest; at += kAreaBytes) {
        const auto part = [at](std::size_t whole) {
            return at < whole ? std::min(kAreaBytes, whole - at) : 0;
        };
        if (at < mine.size())
            loops.stream(arena.staging(rank, steps.next_step()), mine.data() + at, part(mine.size()));
        meet();
        for (std::uint32_t r = 0; r < size; ++r) {
            if (at < all[r].size())
                std::memcpy(all[r].data() + at, arena.staging(r, steps.current_step()), part(all[r].size()));
        }
    }
    return all;
}

}  // namespace ddp::cpu
