#include "ddp/shm/cpu_backend.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace ddp::cpu {

using ddprun::SegmentOp;

namespace {

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

CpuBackend::CpuBackend(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                       std::chrono::nanoseconds timeout, Arena::Lines lines, const Kernels& loops)
    : env_(env),
      segment_(checked(std::move(segment), env)),
      arena_(segment_, static_cast<std::uint32_t>(env.local_rank), lines),
      rank_(arena_.rank()),
      size_(arena_.ranks()),
      node_cpus_(read_node_cpus(joined(arena_, env, timeout))),
      steps_(arena_, node_cpus_, timeout),
      kernels_(loops),
      messages_(arena_, node_cpus_, timeout, kernels_),
      sources_(size_) {}

CpuBackend::CpuBackend(const CpuBackend& parent, const std::vector<std::uint32_t>& members,
                       std::uint32_t share)
    : env_(parent.env_),
      segment_(parent.segment_),
      arena_(segment_, locals_of(parent.arena_, members), place_of(parent.rank_, members), share),
      rank_(arena_.rank()),
      size_(arena_.ranks()),
      node_cpus_(parent.node_cpus_),
      steps_(joined(arena_, env_, parent.timeout()), node_cpus_, parent.timeout()),
      kernels_(parent.kernels_),
      messages_(arena_, node_cpus_, steps_.timeout(), kernels_),
      sources_(size_) {}

// Discards only this rank's parts: a peer may still be inside the last collective, but no rank reads another
// one's shared buffer after the last step of a collective.
CpuBackend::~CpuBackend() {
    for (const Region& region : regions_)
        segment_->discard(region.offset + rank_ * region.stride, region.stride);
}

std::string CpuBackend::describe() const {
    return fmt::format("cpu (shared memory, {}, {})", kernels_.name,
                       node_cpus_.ranks_share_cores ? "waiting by sleeping" : "waiting by spinning");
}

void CpuBackend::report_progress(std::uint64_t step, std::uint64_t samples) {
    ddp::report_progress(segment_->line(arena_.members()[rank_]), step, samples);
}

Call CpuBackend::allocation_of(std::size_t bytes) {
    constexpr std::uint64_t kMost = SharedPlace::kMostBytes - kSharePage;
    if (bytes <= kMost) return {.bytes = bytes, .operation = SegmentOp::Barrier, .root = kAllocateMark};
    throw InvalidInput(
        fmt::format("allocate_shared: {} bytes are requested, one call gives {} at most", bytes, kMost));
}

std::span<std::byte> CpuBackend::allocate_shared(std::size_t bytes) {
    steps_.begin(allocation_of(bytes));
    meet();  // before the arithmetic: ranks that disagree about the size would take different pieces
    const std::span<std::byte> region = take_region(bytes);
    steps_.end();
    return region;
}

std::span<std::byte> CpuBackend::take_region(std::size_t bytes) {
    const std::size_t stride = (std::max<std::size_t>(bytes, 1) + kSharePage - 1) / kSharePage * kSharePage;
    const Arena::Piece piece = arena_.take(stride * size_);
    regions_.push_back({piece.address, piece.offset, stride});
    std::byte* mine = piece.address + rank_ * stride;
    populate(mine, stride);
    return {mine, bytes};
}

std::uint64_t CpuBackend::locate(const void* data, std::size_t bytes) const {
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    for (std::size_t index = 0; index < regions_.size(); ++index) {
        const Region& region = regions_[index];
        const auto begin = reinterpret_cast<std::uintptr_t>(region.base + rank_ * region.stride);
        if (at < begin || at >= begin + region.stride || bytes > begin + region.stride - at) continue;
        return SharedPlace{index, at - begin}.word();
    }
    return kNotShared;
}

std::byte* CpuBackend::shared_buffer(std::uint32_t rank, std::uint64_t location) const {
    const SharedPlace place = SharedPlace::of(location);
    const Region& region = regions_[place.region];
    return region.base + rank * region.stride + place.offset;
}

ReduceFunction CpuBackend::reduction(DType type, ReduceOp op) const {
    return kernels_.reduce[static_cast<std::size_t>(type)][static_cast<std::size_t>(op)];
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
std::uint32_t CpuBackend::take_share(const std::vector<std::uint32_t>& members) {
    std::optional<ShareTaken> mine;
    if (!members.empty() && members.front() == rank_) mine = try_to_take(*segment_);
    std::uint32_t share = 0;
    std::string why_not;
    const std::vector<std::string> answers =
        CpuBackend::all_gather_bytes(mine ? encode(*mine) : "", kSplitMark);
    for (std::uint32_t r = 0; r < size_; ++r) {
        if (answers[r].empty()) continue;
        const ShareTaken theirs = share_taken(answers[r]);
        if (why_not.empty()) why_not = theirs.why_not;
        if (!members.empty() && members.front() == r) share = theirs.share;
    }
    if (why_not.empty()) return share;
    if (mine && mine->why_not.empty()) Arena::give_back(*segment_, mine->share);
    throw InvalidInput(why_not);
}

std::unique_ptr<CpuBackend> CpuBackend::split(const std::vector<std::uint32_t>& members) {
    const std::uint32_t share = take_share(members);
    return members.empty() ? nullptr : std::make_unique<CpuBackend>(*this, members, share);
}

}  // namespace ddp::cpu
