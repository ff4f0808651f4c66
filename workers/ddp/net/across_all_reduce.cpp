#include <algorithm>
#include <cstring>

#include "ddp/net/across_calls.h"

namespace ddp::net {

using cpu::Pieces;
using cpu::ReduceFunction;
using ddprun::SegmentOp;

/// Begun, it lets the others' pieces come; finished, ours holds what all have.
class AcrossNodes::Exchange {
  public:
    /// `scratch` is the owner's, from one call to the next.
    Exchange(AcrossNodes& owner, DType type, ReduceOp op, std::vector<std::byte>& scratch)
        : owner_(owner), type_(type), op_(op), combine_(owner.reduction(type, without_division(op))), scratch_(scratch), batch_(owner) {}

    void begin(std::span<std::byte> piece) {
        piece_ = piece;
        if (piece.empty()) return;
        rounds_ = choose_rounds(piece.size(), nodes());
        parts_ = rounds_ == Rounds::Scattered ? Pieces::cut(0, piece.size(), nodes()) : Pieces{0, piece.size(), piece.size()};
        const std::span<std::byte> own = part_of(owner_.layout_.node());
        if (scratch_.size() < own.size() * nodes()) scratch_.resize(own.size() * nodes());
        for_each_other([&](std::uint32_t node, std::uint32_t peer) { batch_.receive(peer, came_from(node)); });
        for_each_other([&](std::uint32_t node, std::uint32_t peer) { batch_.send(peer, part_of(node)); });
    }

    void finish() {
        if (piece_.empty()) return;
        batch_.wait();
        const std::span<std::byte> own = part_of(owner_.layout_.node());
        sum(own);
        if (rounds_ == Rounds::AllToAll) return;
        for_each_other([&](std::uint32_t node, std::uint32_t peer) { batch_.receive(peer, part_of(node)); });
        for_each_other([&](std::uint32_t, std::uint32_t peer) { batch_.send(peer, own); });
        batch_.wait();
    }
    [[nodiscard]] std::span<std::byte> piece() const { return piece_; }

  private:
    [[nodiscard]] std::uint32_t nodes() const { return static_cast<std::uint32_t>(owner_.layout_.nodes.size()); }
    /// What a node sums.
    [[nodiscard]] std::span<std::byte> part_of(std::uint32_t node) const {
        return rounds_ == Rounds::AllToAll ? piece_ : piece_.subspan(parts_.offset(node), parts_.length(node));
    }
    [[nodiscard]] std::span<std::byte> came_from(std::uint32_t node) {
        const std::size_t each = part_of(owner_.layout_.node()).size();
        return std::span(scratch_).subspan(node * each, each);
    }
    template <class Use>
    void for_each_other(Use use) {
        for (std::uint32_t node = 0; node < nodes(); ++node) {
            if (node != owner_.layout_.node()) use(node, owner_.layout_.nodes[node][owner_.layout_.place()]);
        }
    }
    void sum(std::span<std::byte> own) {
        if (own.empty()) return;
        std::vector<const void*> sources;
        for (std::uint32_t node = 0; node < nodes(); ++node)
            sources.push_back(node == owner_.layout_.node() ? own.data() : came_from(node).data());
        const std::size_t count = own.size() / size_of(type_);
        combine_(own.data(), sources.data(), static_cast<int>(nodes()), count);
        owner_.finish_average({own.data(), count, type_, {}}, op_);
    }

    AcrossNodes& owner_;
    const DType type_;
    const ReduceOp op_;
    const ReduceFunction combine_;
    std::span<std::byte> piece_;
    Rounds rounds_ = Rounds::AllToAll;
    Pieces parts_{};
    std::vector<std::byte>& scratch_;  ///< a part from each node
    Batch batch_;
};

void AcrossNodes::finish_average(const Buffer& buffer, ReduceOp op) const {
    if (op == ReduceOp::Avg) kernels_.divide[static_cast<std::size_t>(buffer.dtype)](buffer.data, size(), buffer.count);
}

void AcrossNodes::all_reduce(Buffer buffer, ReduceOp op) {
    in_call({.bytes = buffer.bytes(), .operation = SegmentOp::AllReduce, .dtype = buffer.dtype, .op = op}, [&] { all_reduce_now(buffer, op); });
}

void AcrossNodes::all_reduce_now(const Buffer& buffer, ReduceOp op) {
    if (buffer.bytes() <= spoken_bytes(layout_.nodes.size())) return reduce_by_speakers(buffer, op);
    reduce_by_lanes(buffer, op);
}

/// The first rank of a node sums for it, tells the others with its greeting, and hands out what all make.
void AcrossNodes::reduce_by_speakers(const Buffer& buffer, ReduceOp op) {
    const std::size_t bytes = buffer.bytes();
    const ReduceFunction combine = reduction(buffer.dtype, without_division(op));
    if (!speaks()) kernels_.stream(arena_.staging(rank_, steps_.coming()), buffer.data, bytes);
    meet_here();
    if (speaks()) {
        for (std::uint32_t place = 0; place < size_; ++place)
            sources_[place] = place == rank_ ? buffer.data : arena_.staging(place, steps_.met());
        combine(buffer.data, sources_.data(), static_cast<int>(size_), buffer.count);
        greet({bytes_of(buffer), bytes});
        hear();
        std::vector<const void*> sources;
        for (std::uint32_t node = 0; node < layout_.nodes.size(); ++node)
            sources.push_back(node == layout_.node() ? buffer.data : heard_from(node));
        combine(buffer.data, sources.data(), static_cast<int>(sources.size()), buffer.count);
        finish_average(buffer, op);
    }
    share(0, bytes_of(buffer), bytes);
}

/// Of each stretch of the buffer every lane has a piece: it sums it over the node and begins its exchange; then it ends that
/// of its piece before, and passes the result on. Where all buffers of the node are shared, sums are read from them and
/// results written to them; otherwise what others sum is staged a stretch ahead, and results are collected a stretch behind.
void AcrossNodes::reduce_by_lanes(const Buffer& buffer, ReduceOp op) {
    const std::uint32_t lanes = layout_.lanes();
    const std::size_t stretch = std::min(kLanePieceBytes, cpu::kAreaBytes / lanes / cpu::kLine * cpu::kLine) * lanes;
    const std::size_t total = buffer.bytes();
    const ReduceFunction combine = reduction(buffer.dtype, without_division(op));
    const std::uint64_t here = locate(buffer.data, total);
    steps_.mine().shared_at = here;
    meet_here();
    bool in_place = true;
    for (std::uint32_t place = 0; place < size_; ++place) in_place = in_place && steps_.shown_by(place).shared_at != cpu::kNotShared;
    std::vector<std::byte*> buffers(size_, bytes_of(buffer));
    for (std::uint32_t place = 0; in_place && place < size_; ++place) {
        if (place != rank_) buffers[place] = shared_buffer(place, steps_.shown_by(place).shared_at);
    }
    if (speaks()) greet();

    const bool staged = !in_place && size_ > 1;
    Exchange even(*this, buffer.dtype, op, scratch_[0]), odd(*this, buffer.dtype, op, scratch_[1]);
    Exchange *current = &even, *before = &odd;
    Pieces previous{}, oldest{};
    const auto pass_on = [&](const Exchange& exchange) {
        const std::span<std::byte> piece = exchange.piece();
        if (staged) return kernels_.stream(arena_.results(rank_, steps_.coming()), piece.data(), piece.size());
        const std::size_t at = static_cast<std::size_t>(piece.data() - bytes_of(buffer));
        for (std::uint32_t place = 0; place < size_ && in_place; ++place) {
            if (place != rank_) kernels_.stream(buffers[place] + at, piece.data(), piece.size());
        }
    };
    for (std::size_t at = 0; at < total; at = previous.end) {
        const Pieces pieces = Pieces::cut(at, std::min(at + stretch, total), lanes);
        if (staged) {
            stage_for_lanes(buffer, pieces, lanes);
            meet();
        }
        const std::size_t own = pieces.offset(rank_), length = pieces.length(rank_);
        for (std::uint32_t place = 0; place < size_; ++place) {
            const bool direct = place == rank_ || !staged;
            sources_[place] = direct ? buffers[place] + own : arena_.staging(place, steps_.met()) + rank_ * pieces.each;
        }
        if (length > 0 && size_ > 1) combine(bytes_of(buffer) + own, sources_.data(), static_cast<int>(size_), length / size_of(buffer.dtype));
        current->begin({bytes_of(buffer) + own, length});
        if (at > 0) {
            before->finish();
            pass_on(*before);
        }
        if (staged && oldest.end > 0) collect_from_lanes(buffer, oldest, lanes);
        oldest = previous;
        previous = pieces;
        std::swap(current, before);
    }
    if (staged && oldest.end > 0) {
        meet();
        collect_from_lanes(buffer, oldest, lanes);
    }
    before->finish();
    pass_on(*before);
    hear();
    meet();
    if (staged) collect_from_lanes(buffer, previous, lanes);
}

void AcrossNodes::stage_for_lanes(const Buffer& buffer, const Pieces& pieces, std::uint32_t lanes) {
    std::byte* const area = arena_.staging(rank_, steps_.coming());
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        if (lane != rank_) kernels_.stream(area + lane * pieces.each, bytes_of(buffer) + pieces.offset(lane), pieces.length(lane));
    }
}

void AcrossNodes::collect_from_lanes(const Buffer& buffer, const Pieces& pieces, std::uint32_t lanes) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        if (lane != rank_) copy_bytes(bytes_of(buffer) + pieces.offset(lane), arena_.results(lane, steps_.met()), pieces.length(lane));
    }
}

}  // namespace ddp::net
