#include "ddp/shm/cpu_backend.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "ddp/worker/work.h"
#include "env/text.h"

namespace ddp::cpu {

using ddprun::SegmentOp;

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kSharePage = 4096;
constexpr std::size_t kBlockBytes = 64 * 1024;  // summed and passed on while it is in the nearest cache

std::byte* bytes_of(const Buffer& buffer) { return static_cast<std::byte*>(buffer.data); }

/// Where a rank stages the piece of `owner`: without a hole for its own.
std::byte* staged(std::byte* area, std::uint32_t rank, std::uint32_t owner, std::size_t each) {
    return area + (owner < rank ? owner : owner - 1) * each;
}

void copy_bytes(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

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
    : segment_(checked(std::move(segment), env)),
      arena_(segment_, static_cast<std::uint32_t>(env.local_rank), lines),
      rank_(arena_.rank()),
      size_(arena_.ranks()),
      roster_(read_roster(joined(arena_, env, timeout))),
      timeout_(timeout),
      steps_(arena_, roster_, timeout),
      kernels_(loops),
      messages_(arena_, roster_, timeout, kernels_),
      sources_(size_) {}

CpuBackend::CpuBackend(const CpuBackend& parent, const std::vector<std::uint32_t>& members,
                       std::uint32_t share, const ddprun::WorkerEnv& env)
    : segment_(parent.segment_),
      arena_(segment_, locals_of(parent.arena_, members), place_of(parent.rank_, members), share),
      rank_(arena_.rank()),
      size_(arena_.ranks()),
      roster_(parent.roster_),
      timeout_(parent.timeout_),
      steps_(joined(arena_, env, timeout_), roster_, timeout_),
      kernels_(parent.kernels_),
      messages_(arena_, roster_, timeout_, kernels_),
      sources_(size_) {}

// Only our own parts: a peer may still be inside the last collective, but nobody reads another rank's shared
// buffer after the step that ends one.
CpuBackend::~CpuBackend() {
    for (const Region& region : regions_)
        segment_->discard(region.offset + rank_ * region.stride, region.stride);
}

std::string CpuBackend::describe() const {
    return fmt::format("cpu (shared memory, {}, {})", kernels_.name,
                       roster_.ranks_share_cores ? "waiting by sleeping" : "waiting by spinning");
}

void CpuBackend::report_progress(std::uint64_t step, std::uint64_t samples) {
    ddp::report_progress(segment_->line(arena_.members()[rank_]), step, samples);
}

// ---- shared buffers

std::span<std::byte> CpuBackend::allocate_shared(std::size_t bytes) {
    constexpr std::uint64_t kMost = SharedPlace::kMostBytes - kSharePage;
    if (bytes > kMost)
        throw InvalidInput(
            fmt::format("allocate_shared: {} bytes are asked for, one call gives {} at most", bytes, kMost));
    const std::size_t stride = (std::max<std::size_t>(bytes, 1) + kSharePage - 1) / kSharePage * kSharePage;
    steps_.begin({.bytes = bytes, .operation = SegmentOp::Barrier, .root = kAllocateMark});
    meet();  // before the arithmetic: ranks that disagree about the size would take different pieces
    const Arena::Piece piece = arena_.take(stride * size_);
    regions_.push_back({piece.address, piece.offset, stride});
    std::byte* mine = piece.address + rank_ * stride;
    populate(mine, stride);
    steps_.end();
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

// ---- all_reduce

ReduceFunction CpuBackend::reduction(DType type, ReduceOp op) const {
    return kernels_.reduce[static_cast<std::size_t>(type)][static_cast<std::size_t>(op)];
}

void CpuBackend::all_reduce(Buffer buffer, ReduceOp op) {
    steps_.begin(
        {.bytes = buffer.bytes(), .operation = SegmentOp::AllReduce, .dtype = buffer.dtype, .op = op});
    if (size_ == 1) return steps_.end();  // the reduction of one value is that value
    if (buffer.bytes() <= kTinyBytes) {
        reduce_tiny(buffer, reduction(buffer.dtype, op));
    } else {
        reduce_large(buffer, reduction(buffer.dtype, op));
    }
    steps_.end();
}

void CpuBackend::reduce_tiny(const Buffer& buffer, ReduceFunction combine) {
    const std::size_t bytes = buffer.bytes();
    copy_bytes(steps_.mine().message(bytes), buffer.data, bytes);
    steps_.meet();
    for (std::uint32_t r = 0; r < size_; ++r) sources_[r] = steps_.shown_by(r).message(bytes);
    sources_[rank_] = buffer.data;  // the same bytes, and already in the nearest cache
    combine(buffer.data, sources_.data(), size(), buffer.count);
}

// Which way it goes depends on every rank's buffer, so the first step shows where they are. It costs nothing
// in the staged way, which has its first stretch staged by then.
void CpuBackend::reduce_large(const Buffer& buffer, ReduceFunction combine) {
    const std::uint64_t here = locate(buffer.data, buffer.bytes());
    steps_.mine().shared_at = here;
    if (here == kNotShared) stage(buffer, Pieces::cut(0, std::min(buffer.bytes(), stretch_bytes()), size_));
    meet();
    std::uint32_t shared = 0;
    for (std::uint32_t r = 0; r < size_; ++r) shared += steps_.shown_by(r).shared_at != kNotShared ? 1 : 0;
    if (shared == size_) return reduce_in_place(buffer, combine);
    reduce_staged(buffer, combine, shared == 0);
}

void CpuBackend::reduce_in_place(const Buffer& buffer, ReduceFunction combine) {
    const Pieces slices = Pieces::cut(0, buffer.bytes(), size_);
    std::vector<std::byte*> buffers(size_);
    for (std::uint32_t r = 0; r < size_; ++r) buffers[r] = shared_buffer(r, steps_.shown_by(r).shared_at);

    const std::size_t end = slices.offset(rank_ + 1);
    for (std::size_t at = slices.offset(rank_); at < end; at += kBlockBytes) {
        const std::size_t length = std::min(kBlockBytes, end - at);
        for (std::uint32_t r = 0; r < size_; ++r) sources_[r] = buffers[r] + at;
        combine(buffers[rank_] + at, sources_.data(), size(), length / size_of(buffer.dtype));
        for (std::uint32_t r = 0; r < size_; ++r) {
            if (r != rank_) kernels_.stream(buffers[r] + at, buffers[rank_] + at, length);
        }
    }
    meet();
}

// One step per stretch: before it a rank stages stretch k and has the results of k - 1 written; after it, it
// sums its piece of k and collects the results of k - 1.
void CpuBackend::reduce_staged(const Buffer& buffer, ReduceFunction combine, bool first_is_met) {
    const std::size_t total = buffer.bytes();
    Pieces previous{};
    for (std::size_t at = 0; at < total; at = previous.end) {
        const Pieces pieces = Pieces::cut(at, std::min(at + stretch_bytes(), total), size_);
        if (at > 0 || !first_is_met) {
            stage(buffer, pieces);
            meet();
        }
        sum_own(buffer, pieces, combine);
        if (at > 0) collect(buffer, previous);
        previous = pieces;
    }
    meet();
    collect(buffer, previous);
}

// With n ranks a rank stages n - 1 pieces, and they must fit its area.
std::size_t CpuBackend::stretch_bytes() const { return kAreaBytes / (size_ - 1) / kLine * kLine * size_; }

void CpuBackend::stage(const Buffer& buffer, const Pieces& pieces) {
    std::byte* area = arena_.staging(rank_, steps_.coming());
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner == rank_) continue;
        kernels_.stream(staged(area, rank_, owner, pieces.each), bytes_of(buffer) + pieces.offset(owner),
                        pieces.length(owner));
    }
}

void CpuBackend::sum_own(const Buffer& buffer, const Pieces& pieces, ReduceFunction combine) {
    std::byte* own = bytes_of(buffer) + pieces.offset(rank_);
    std::byte* result = arena_.results(rank_, steps_.coming());
    const std::size_t length = pieces.length(rank_);
    for (std::size_t at = 0; at < length; at += kBlockBytes) {
        const std::size_t block = std::min(kBlockBytes, length - at);
        for (std::uint32_t r = 0; r < size_; ++r) {
            sources_[r] =
                r == rank_ ? own + at : staged(arena_.staging(r, steps_.met()), r, rank_, pieces.each) + at;
        }
        combine(own + at, sources_.data(), size(), block / size_of(buffer.dtype));
        kernels_.stream(result + at, own + at, block);
    }
}

void CpuBackend::collect(const Buffer& buffer, const Pieces& pieces) {
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner == rank_) continue;
        copy_bytes(bytes_of(buffer) + pieces.offset(owner), arena_.results(owner, steps_.met()),
                   pieces.length(owner));
    }
}

// ---- the others

/// One step for each piece of `total` bytes, `most` at a time, and at least one step: `give` shows a piece, `take` reads
/// what the others have shown.
template <class Give, class Take>
void CpuBackend::in_pieces(std::size_t total, std::size_t most, Give give, Take take) {
    std::size_t at = 0;
    do {
        const std::size_t length = std::min(most, total - at);
        give(at, length);
        meet();
        take(at, length);
        at += length;
    } while (at < total);
}

/// Shows these bytes, up to kAreaBytes, at the coming step.
void CpuBackend::show(const std::byte* from, std::size_t length) {
    kernels_.stream(arena_.staging(rank_, steps_.coming()), from, length);
}

/// `length` bytes from every other rank, each to `at` of its part of `output`.
void CpuBackend::collect_from_all(const Buffer& output, std::size_t each, std::size_t at, std::size_t length) {
    for (std::uint32_t r = 0; r < size_; ++r) {
        if (r != rank_) copy_bytes(bytes_of(output) + r * each + at, arena_.staging(r, steps_.met()), length);
    }
}

void CpuBackend::barrier() {
    steps_.begin({.operation = SegmentOp::Barrier});
    if (size_ > 1) steps_.meet();
    steps_.end();
}

void CpuBackend::broadcast(Buffer buffer, int root) {
    steps_.begin(call_of(SegmentOp::Broadcast, buffer, ReduceOp::Sum, root));
    if (size_ == 1) return steps_.end();
    const auto from = static_cast<std::uint32_t>(root);
    in_pieces(
        buffer.bytes(), kAreaBytes,
        [&](std::size_t at, std::size_t length) {
            if (rank_ == from) show(bytes_of(buffer) + at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (rank_ != from) copy_bytes(bytes_of(buffer) + at, arena_.staging(from, steps_.met()), length);
        });
    steps_.end();
}

void CpuBackend::all_gather(Buffer output, Buffer input) {
    const std::size_t each = input.bytes();
    steps_.begin(call_of(SegmentOp::AllGather, input));
    if (each > 0) std::memmove(bytes_of(output) + rank_ * each, input.data, each);
    const std::byte* own = bytes_of(output) + rank_ * each;  // `input` may overlap what we write
    if (size_ == 1) return steps_.end();
    in_pieces(
        each, kAreaBytes, [&](std::size_t at, std::size_t length) { show(own + at, length); },
        [&](std::size_t at, std::size_t length) { collect_from_all(output, each, at, length); });
    steps_.end();
}

/// What fits an area for each of n ranks.
std::size_t CpuBackend::piece_bytes() const { return kAreaBytes / size_ / kLine * kLine; }

/// Stages `length` bytes at `at` of every other rank's part of `buffer`.
void CpuBackend::stage_for_each(const Buffer& buffer, std::size_t each, std::size_t at, std::size_t length) {
    std::byte* area = arena_.staging(rank_, steps_.coming());
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner != rank_)
            kernels_.stream(area + owner * piece_bytes(), bytes_of(buffer) + owner * each + at, length);
    }
}

/// What that rank has staged for us.
const std::byte* CpuBackend::staged_by(std::uint32_t rank) const {
    return arena_.staging(rank, steps_.met()) + rank_ * piece_bytes();
}

void CpuBackend::reduce_scatter(Buffer output, Buffer input, ReduceOp op) {
    const std::size_t each = output.bytes();
    steps_.begin(call_of(SegmentOp::ReduceScatter, output, op));
    in_pieces(
        each, piece_bytes(),
        [&](std::size_t at, std::size_t length) { stage_for_each(input, each, at, length); },
        [&](std::size_t at, std::size_t length) {
            for (std::uint32_t r = 0; r < size_; ++r)
                sources_[r] = r == rank_ ? bytes_of(input) + rank_ * each + at : staged_by(r);
            reduction(input.dtype, op)(bytes_of(output) + at, sources_.data(), size(),
                                       length / size_of(input.dtype));
        });
    steps_.end();
}

void CpuBackend::reduce(Buffer buffer, int root, ReduceOp op) {
    steps_.begin(call_of(SegmentOp::Reduce, buffer, op, root));
    if (size_ == 1) return steps_.end();
    const bool is_root = rank_ == static_cast<std::uint32_t>(root);
    in_pieces(
        buffer.bytes(), kAreaBytes,
        [&](std::size_t at, std::size_t length) {
            if (!is_root) show(bytes_of(buffer) + at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (!is_root) return;
            std::byte* const own = bytes_of(buffer) + at;
            for (std::uint32_t r = 0; r < size_; ++r)
                sources_[r] = r == rank_ ? own : arena_.staging(r, steps_.met());
            reduction(buffer.dtype, op)(own, sources_.data(), size(), length / size_of(buffer.dtype));
        });
    steps_.end();
}

void CpuBackend::gather(Buffer output, Buffer input, int root) {
    const std::size_t each = input.bytes();
    steps_.begin(call_of(SegmentOp::Gather, input, ReduceOp::Sum, root));
    const bool is_root = rank_ == static_cast<std::uint32_t>(root);
    if (is_root && each > 0) std::memmove(bytes_of(output) + rank_ * each, input.data, each);
    in_pieces(
        each, kAreaBytes,
        [&](std::size_t at, std::size_t length) {
            if (!is_root) show(bytes_of(input) + at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (is_root) collect_from_all(output, each, at, length);
        });
    steps_.end();
}

void CpuBackend::scatter(Buffer output, Buffer input, int root) {
    const std::size_t each = output.bytes();
    steps_.begin(call_of(SegmentOp::Scatter, output, ReduceOp::Sum, root));
    const auto from = static_cast<std::uint32_t>(root);
    in_pieces(
        each, piece_bytes(),
        [&](std::size_t at, std::size_t length) {
            if (rank_ == from) stage_for_each(input, each, at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (rank_ != from) copy_bytes(bytes_of(output) + at, staged_by(from), length);
        });
    if (rank_ == from && each > 0) std::memmove(output.data, bytes_of(input) + rank_ * each, each);
    steps_.end();
}

void CpuBackend::all_to_all(Buffer output, Buffer input) {
    const std::size_t each = input.bytes() / size_;
    steps_.begin({.bytes = each, .operation = SegmentOp::AllToAll, .dtype = input.dtype});
    copy_bytes(bytes_of(output) + rank_ * each, bytes_of(input) + rank_ * each, each);
    in_pieces(
        each, piece_bytes(),
        [&](std::size_t at, std::size_t length) { stage_for_each(input, each, at, length); },
        [&](std::size_t at, std::size_t length) {
            for (std::uint32_t r = 0; r < size_; ++r) {
                if (r != rank_) copy_bytes(bytes_of(output) + r * each + at, staged_by(r), length);
            }
        });
    steps_.end();
}

// A pair that lost each other cannot keep step with the others either.
template <class Transfer>
void CpuBackend::between_two(Transfer transfer) {
    steps_.throw_if_broken();
    try {
        transfer();
    } catch (...) {
        steps_.give_up(std::current_exception());
        throw;
    }
}

void CpuBackend::send(Buffer buffer, int to) {
    between_two([&] { messages_.send(buffer, static_cast<std::uint32_t>(to)); });
}

void CpuBackend::recv(Buffer buffer, int from) {
    between_two([&] { messages_.recv(buffer, static_cast<std::uint32_t>(from)); });
}

std::vector<std::string> CpuBackend::all_gather_bytes(std::string_view mine, std::int16_t mark) {
    steps_.begin({.operation = SegmentOp::AllGather, .root = mark});
    const std::uint64_t own_length = mine.size();
    std::memcpy(steps_.mine().message(sizeof own_length), &own_length, sizeof own_length);
    meet();
    std::vector<std::string> all(size_);
    std::size_t longest = 0;
    for (std::uint32_t r = 0; r < size_; ++r) {
        std::uint64_t length = 0;
        std::memcpy(&length, steps_.shown_by(r).message(sizeof length), sizeof length);
        all[r].resize(length);
        longest = std::max(longest, static_cast<std::size_t>(length));
    }
    for (std::size_t at = 0; at < longest; at += kAreaBytes) {
        const auto part = [at](std::size_t whole) {
            return at < whole ? std::min(kAreaBytes, whole - at) : 0;
        };
        if (at < mine.size())
            kernels_.stream(arena_.staging(rank_, steps_.coming()), mine.data() + at, part(mine.size()));
        meet();
        for (std::uint32_t r = 0; r < size_; ++r) {
            if (at < all[r].size())
                std::memcpy(all[r].data() + at, arena_.staging(r, steps_.met()), part(all[r].size()));
        }
    }
    steps_.end();
    return all;
}

// ---- sub-groups

namespace {

/// What a rank says of the share that it was to take: "" when it was not to.
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

// All ranks see the same answers. What the others got for nothing is given back.
std::uint32_t CpuBackend::take_share(const std::vector<std::uint32_t>& members) {
    std::optional<ShareTaken> mine;
    if (!members.empty() && members.front() == rank_) mine = try_to_take(*segment_);
    std::uint32_t share = 0;
    std::string why_not;
    const std::vector<std::string> answers = all_gather_bytes(mine ? encode(*mine) : "", kSplitMark);
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

// ---- the process group

namespace {

using Progress = ProcessGroupOptions::Progress;

/// Decides which thread runs a collective; the backend does the rest.
class CpuGroup final : public ProcessGroup {
  public:
    CpuGroup(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
             const ProcessGroupOptions& options)
        : env_(env), wanted_(options.progress), backend_(std::move(segment), env, options.timeout) {
        settle();
    }
    CpuGroup(const CpuGroup& parent, const std::vector<std::uint32_t>& members, std::uint32_t share)
        : env_(parent.env_), wanted_(parent.wanted_), backend_(parent.backend_, members, share, parent.env_) {
        settle();
    }

    std::string describe() const override {
        return backend_.describe() + (progress_ ? ", progress thread" : "");
    }
    double communication_seconds() const override { return backend_.communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        backend_.report_progress(step, samples);
    }
    Work barrier() override {
        return run([this] { backend_.barrier(); });
    }
    std::span<std::byte> allocate_shared(std::size_t bytes) override {
        std::span<std::byte> region;
        run([&] { region = backend_.allocate_shared(bytes); }).wait();
        return region;
    }

  private:
    Work do_all_reduce(Buffer buffer, ReduceOp op) override {
        return run([this, buffer, op] { backend_.all_reduce(buffer, op); });
    }
    Work do_broadcast(Buffer buffer, int root) override {
        return run([this, buffer, root] { backend_.broadcast(buffer, root); });
    }
    Work do_all_gather(Buffer output, Buffer input) override {
        return run([this, output, input] { backend_.all_gather(output, input); });
    }
    Work do_reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        return run([this, output, input, op] { backend_.reduce_scatter(output, input, op); });
    }
    Work do_reduce(Buffer buffer, int root, ReduceOp op) override {
        return run([this, buffer, root, op] { backend_.reduce(buffer, root, op); });
    }
    Work do_gather(Buffer output, Buffer input, int root) override {
        return run([this, output, input, root] { backend_.gather(output, input, root); });
    }
    Work do_scatter(Buffer output, Buffer input, int root) override {
        return run([this, output, input, root] { backend_.scatter(output, input, root); });
    }
    Work do_all_to_all(Buffer output, Buffer input) override {
        return run([this, output, input] { backend_.all_to_all(output, input); });
    }
    Work do_send(Buffer buffer, int to) override {
        return run([this, buffer, to] { backend_.send(buffer, to); });
    }
    Work do_recv(Buffer buffer, int from) override {
        return run([this, buffer, from] { backend_.recv(buffer, from); });
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) override {
        std::vector<std::string> all;
        run([&] { all = backend_.all_gather_bytes(mine, mark); }).wait();
        return all;
    }
    std::unique_ptr<ProcessGroup> do_split(const Part& part) override {
        std::uint32_t share = 0;
        run([&] { share = backend_.take_share(part.members); }).wait();
        if (part.members.empty()) return nullptr;
        return std::make_unique<CpuGroup>(*this, part.members, share);
    }

    void settle() {
        const bool has_spare_core = backend_.roster().cpus >= 2 * backend_.roster().ranks;
        const bool threaded =
            wanted_ == Progress::Auto ? has_spare_core && backend_.size() > 1 : wanted_ == Progress::Thread;
        if (threaded) progress_.emplace();
        take_seat({.rank = backend_.rank(), .size = backend_.size(), .world_rank = env_.rank});
    }

    template <class Collective>
    Work run(Collective collective) {
        if (!progress_) return run_here(collective);
        auto state = std::make_shared<Work::State>();
        progress_->post([state, collective] {
            std::exception_ptr failure;
            try {
                collective();
            } catch (...) {
                failure = std::current_exception();
            }
            state->finish(std::move(failure));
        });
        return Work(std::move(state));
    }
    template <class Collective>
    static Work run_here(Collective& collective) {
        try {
            collective();
            return Work();
        } catch (...) {
            auto state = std::make_shared<Work::State>();
            state->finish(std::current_exception());
            return Work(std::move(state));
        }
    }

    const ddprun::WorkerEnv env_;
    const Progress wanted_;
    CpuBackend backend_;
    std::optional<ProgressThread> progress_;  // last: it ends before the backend that its tasks use
};

}  // namespace

std::unique_ptr<ProcessGroup> make_group(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options) {
    return std::make_unique<CpuGroup>(std::move(segment), env, options);
}

}  // namespace ddp::cpu
