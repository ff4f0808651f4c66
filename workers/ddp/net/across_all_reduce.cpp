#include <algorithm>

#include "ddp/net/across_nodes.h"

namespace ddp::net {

using cpu::Pieces;

/// begin() starts the exchange of a piece with the other nodes; after finish() it holds the sum of all nodes.
class AcrossNodes::Exchange {
  public:
    /// `scratch` is the owner's, kept between calls.
    Exchange(AcrossNodes& owner, const Sum& how, std::vector<std::byte>& scratch)
        : owner_(owner), how_(how), scratch_(scratch), batch_(owner) {}

    /// The place for the node's sum of a piece of the buffer: the piece itself, unless the sum is wide.
    std::byte* take(std::span<std::byte> piece) {
        piece_ = piece;
        rounds_ = choose_rounds(how_.partial_bytes(piece.size()), nodes());
        parts_ = rounds_ == Rounds::Scattered ? Pieces::cut(0, piece.size(), nodes())
                                              : Pieces{0, piece.size(), piece.size()};
        const std::size_t own = how_.is_wide() ? how_.partial_bytes(piece.size()) : 0;
        const std::size_t came = how_.partial_bytes(part_of(piece, owner_.layout_.node()).size()) * nodes();
        if (scratch_.size() < own + came) scratch_.resize(own + came);
        came_ = scratch_.data() + own;
        return sum_ = how_.is_wide() ? scratch_.data() : piece.data();
    }

    void begin() {
        if (piece_.empty()) return;
        for_each_other(
            [&](std::uint32_t node, std::uint32_t peer) { batch_.receive(peer, came_from(node)); });
        for_each_other([&](std::uint32_t node, std::uint32_t peer) { batch_.send(peer, partial_of(node)); });
    }

    void finish() {
        if (piece_.empty()) return;
        batch_.wait();
        const std::span<std::byte> own = part_of(piece_, owner_.layout_.node());
        add_up(own);
        if (rounds_ == Rounds::AllToAll) return;
        for_each_other(
            [&](std::uint32_t node, std::uint32_t peer) { batch_.receive(peer, part_of(piece_, node)); });
        for_each_other([&](std::uint32_t, std::uint32_t peer) { batch_.send(peer, own); });
        batch_.wait();
    }
    [[nodiscard]] std::span<std::byte> piece() const { return piece_; }

  private:
    [[nodiscard]] std::uint32_t nodes() const {
        return static_cast<std::uint32_t>(owner_.layout_.nodes.size());
    }
    /// The part that a node sums.
    [[nodiscard]] std::span<std::byte> part_of(std::span<std::byte> piece, std::uint32_t node) const {
        return rounds_ == Rounds::AllToAll ? piece : piece.subspan(parts_.offset(node), parts_.length(node));
    }
    /// This node's partial sum of that part.
    [[nodiscard]] std::span<std::byte> partial_of(std::uint32_t node) const {
        const std::span<std::byte> part = part_of(piece_, node);
        return {sum_ + how_.partial_bytes(static_cast<std::size_t>(part.data() - piece_.data())),
                how_.partial_bytes(part.size())};
    }
    [[nodiscard]] std::span<std::byte> came_from(std::uint32_t node) const {
        const std::size_t each = partial_of(owner_.layout_.node()).size();
        return {came_ + node * each, each};
    }
    template <class Use>
    void for_each_other(Use use) {
        for (std::uint32_t node = 0; node < nodes(); ++node) {
            if (node != owner_.layout_.node()) use(node, owner_.layout_.nodes[node][owner_.layout_.place()]);
        }
    }
    void add_up(std::span<std::byte> own) {
        if (own.empty()) return;
        const std::span<std::byte> sum = partial_of(owner_.layout_.node());
        std::vector<const void*> sources;
        for (std::uint32_t node = 0; node < nodes(); ++node)
            sources.push_back(node == owner_.layout_.node() ? sum.data() : came_from(node).data());
        how_.across(sum.data(), sources.data(), static_cast<int>(nodes()), own.size() / size_of(how_.type));
        owner_.finish_sum(how_, own.data(), sum.data(), own.size());
    }

    AcrossNodes& owner_;
    const Sum how_;
    std::span<std::byte> piece_;
    Rounds rounds_ = Rounds::AllToAll;
    Pieces parts_{};
    std::vector<std::byte>& scratch_;  ///< the node's sum when it is wide, then a part from each node
    std::byte *sum_ = nullptr, *came_ = nullptr;
    Batch batch_;
};

AcrossNodes::Sum AcrossNodes::sum_of(DType type, ReduceOp op) const {
    const cpu::Kernels::Wide& wide = kernels_.wide[static_cast<std::size_t>(type)];
    const ReduceOp step = without_division(op);
    const bool rounds = wide.sum != nullptr && (step == ReduceOp::Sum || step == ReduceOp::Product);
    if (!rounds) return {type, type, node_.reduction(type, step), node_.reduction(type, step), op};
    return {type, DType::F32, step == ReduceOp::Sum ? wide.sum : wide.product,
            node_.reduction(DType::F32, step), op};
}

void AcrossNodes::finish_sum(const Sum& how, void* to, std::byte* sum, std::size_t bytes) const {
    const std::size_t count = bytes / size_of(how.type);
    if (how.op == ReduceOp::Avg) kernels_.divide[static_cast<std::size_t>(how.partial)](sum, size(), count);
    if (how.is_wide())
        kernels_.wide[static_cast<std::size_t>(how.type)].round(to, reinterpret_cast<const float*>(sum),
                                                                count);
    else copy_bytes(to, sum, bytes);
}

/// Every lane has a piece of each range of the buffer: it sums the piece over the node and begins its
/// exchange; then it finishes the exchange of its previous piece, and publishes the result. When all buffers
/// of the node are shared, sums read them and results are written to them; otherwise pieces for other lanes
/// are staged one range ahead, and results are collected one range behind.
void AcrossNodes::all_reduce(const Buffer& buffer, ReduceOp op) {
    const Sum how = sum_of(buffer.dtype, op);
    const std::uint32_t lanes = layout_.lanes();
    const std::size_t stretch =
        std::min(kLanePieceBytes, cpu::kAreaBytes / lanes / cpu::kLine * cpu::kLine) * lanes;
    const std::size_t total = buffer.bytes();
    node_.tell_place(buffer.data, total);
    meet_on_node();
    std::vector<std::byte*> buffers = node_.shared_buffers();
    const bool in_place = !buffers.empty();
    if (!in_place) buffers.assign(size_, bytes_of(buffer));
    if (is_leader()) send_header();

    const bool staged = !in_place && size_ > 1;
    Exchange even(*this, how, scratch_[0]), odd(*this, how, scratch_[1]);
    Exchange *current = &even, *before = &odd;
    Pieces previous{}, oldest{};
    const auto publish = [&](const Exchange& exchange) {
        const std::span<std::byte> piece = exchange.piece();
        if (staged)
            return kernels_.stream(arena_.results(rank_, steps_.next_step()), piece.data(), piece.size());
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
            sources_[place] = direct ? buffers[place] + own
                                     : arena_.staging(place, steps_.current_step()) + rank_ * pieces.each;
        }
        std::byte* const sum = current->take({bytes_of(buffer) + own, length});
        if (size_ > 1 || how.is_wide())
            how.here(sum, sources_.data(), static_cast<int>(size_), length / size_of(buffer.dtype));
        current->begin();
        if (at > 0) {
            before->finish();
            publish(*before);
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
    publish(*before);
    receive_headers();
    meet();
    if (staged) collect_from_lanes(buffer, previous, lanes);
}

void AcrossNodes::stage_for_lanes(const Buffer& buffer, const Pieces& pieces, std::uint32_t lanes) {
    std::byte* const area = arena_.staging(rank_, steps_.next_step());
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        if (lane != rank_)
            kernels_.stream(area + lane * pieces.each, bytes_of(buffer) + pieces.offset(lane),
                            pieces.length(lane));
    }
}

void AcrossNodes::collect_from_lanes(const Buffer& buffer, const Pieces& pieces, std::uint32_t lanes) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        if (lane != rank_)
            copy_bytes(bytes_of(buffer) + pieces.offset(lane), arena_.results(lane, steps_.current_step()),
                       pieces.length(lane));
    }
}

}  // namespace ddp::net
