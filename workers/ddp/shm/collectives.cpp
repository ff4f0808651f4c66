
#include <algorithm>
#include <cstring>

#include "ddp/shm/cpu_backend.h"

/// All collectives except all_reduce, which has its own file.
namespace ddp::cpu {

using ddprun::SegmentOp;

namespace {

// The root stages a piece while the others collect the one before.
constexpr std::size_t kBroadcastPieces = 8;
constexpr std::size_t kLeastBroadcastPiece = 16 * 1024;

}  // namespace

/// Makes one step for each piece of `total` bytes, `most` at a time, and at least one step: `give` shows a
/// piece, `take` reads the others' pieces. When the first piece `is_shown`, its step has been made.
template <class Give, class Take>
void CpuBackend::in_pieces(std::size_t total, std::size_t most, Give give, Take take, bool is_shown) {
    std::size_t at = 0;
    do {
        const std::size_t length = std::min(most, total - at);
        if (at > 0 || !is_shown) {
            give(at, length);
            meet();
        }
        take(at, length);
        at += length;
    } while (at < total);
}

/// The first step tells where this rank's memory lies. When that of all ranks is shared, `direct` reads and
/// writes it there, and a last step follows; otherwise it is staged in pieces, the first of them for the
/// first step.
template <class Direct, class Give, class Take>
void CpuBackend::direct_or_staged(const void* data, std::size_t bytes, Direct direct, std::size_t total,
                                  std::size_t most, Give give, Take take) {
    if (!node_.tell_place(data, bytes)) give(0, std::min(most, total));
    meet();
    const std::vector<std::byte*> buffers = node_.shared_buffers();
    if (buffers.empty()) return in_pieces(total, most, give, take, node_.ranks_in_shared_memory() == 0);
    direct(buffers);
    meet();
}

/// Stages these bytes, up to kStagedBytes, for the next step.
void CpuBackend::show(const std::byte* from, std::size_t length) {
    copy_bytes(arena_.staging(rank_, steps_.next_step()), from, length);
}

/// Copies the `most` bytes at `at` of every other rank's slice.
void CpuBackend::collect_from_all(const Buffer& output, const Slices& slices, std::size_t at,
                                  std::size_t most) {
    for (std::uint32_t r = 0; r < size_; ++r) {
        if (r == rank_) continue;
        copy_bytes(bytes_of(output) + slices.offset(r) + at, arena_.staging(r, steps_.current_step()),
                   slices.within(r, at, most));
    }
}

void CpuBackend::broadcast(const Operation& operation) {
    if (size_ == 1) return;
    const auto from = static_cast<std::uint32_t>(operation.root);
    const std::size_t bytes = operation.call.bytes;
    direct_or_staged(
        rank_ == from ? operation.in.data : operation.out.data, bytes,
        // Each rank copies a piece to all, so that the root works as much as the others.
        [&](const std::vector<std::byte*>& buffers) {
            const Pieces pieces = Pieces::cut(0, bytes, size_);
            const std::size_t end = pieces.offset(rank_ + 1);
            for (std::size_t at = pieces.offset(rank_); at < end; at += kStagedBytes) {
                for (std::uint32_t r = 0; r < size_; ++r) {
                    if (r != from)
                        copy_bytes(buffers[r] + at, buffers[from] + at, std::min(kStagedBytes, end - at));
                }
            }
        },
        bytes, std::clamp(bytes / kBroadcastPieces / kLine * kLine, kLeastBroadcastPiece, kStagedBytes),
        [&](std::size_t at, std::size_t length) {
            if (rank_ == from) show(bytes_of(operation.in) + at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (rank_ != from)
                copy_bytes(bytes_of(operation.out) + at, arena_.staging(from, steps_.current_step()), length);
        });
}

void CpuBackend::all_gather(const Buffer& output, const ConstBuffer& input, const Slices& slices) {
    std::byte* const own = bytes_of(output) + slices.offset(rank_);
    const bool is_apart = input.bytes() > 0 && input.data != own;
    if (is_apart) std::memcpy(own, input.data, input.bytes());
    if (size_ == 1) return;
    // The input, unless only the output is shared: peers read faster what this call has not written.
    const bool reads_input = is_apart && node_.is_shared(input.data, input.bytes());
    direct_or_staged(
        reads_input ? input.data : own, input.bytes(),
        [&](const std::vector<std::byte*>& buffers) {
            for (std::uint32_t r = 0; r < size_; ++r) {
                if (r != rank_) copy_bytes(bytes_of(output) + slices.offset(r), buffers[r], slices.length(r));
            }
        },
        slices.longest(), kStagedBytes,
        [&](std::size_t at, std::size_t most) { show(own + at, slices.within(rank_, at, most)); },
        [&](std::size_t at, std::size_t most) { collect_from_all(output, slices, at, most); });
}

/// Bytes that are staged for each other rank at a time.
std::size_t CpuBackend::piece_bytes() const { return kStagedBytes / std::max(size_ - 1, 1U) / kLine * kLine; }

/// The place of the piece that this rank stages for `owner`; there is no gap for its own.
std::byte* CpuBackend::piece_for(std::uint32_t owner) const {
    return arena_.staging(rank_, steps_.next_step()) + (owner < rank_ ? owner : owner - 1) * piece_bytes();
}

/// The piece that `rank` has staged for this rank.
const std::byte* CpuBackend::staged_by(std::uint32_t rank) const {
    return arena_.staging(rank, steps_.current_step()) + (rank_ < rank ? rank_ : rank_ - 1) * piece_bytes();
}

/// Stages the `most` bytes at `at` of every other rank's slice of `buffer`.
void CpuBackend::stage_for_each(const ConstBuffer& buffer, const Slices& slices, std::size_t at,
                                std::size_t most) {
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner != rank_)
            copy_bytes(piece_for(owner), bytes_of(buffer) + slices.offset(owner) + at,
                       slices.within(owner, at, most));
    }
}

void CpuBackend::reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices,
                                ReduceFunction combine) {
    const std::size_t begin = slices.offset(rank_);
    direct_or_staged(
        input.data, input.bytes(),
        [&](const std::vector<std::byte*>& buffers) {
            for (std::uint32_t r = 0; r < size_; ++r) sources_[r] = buffers[r] + begin;
            combine(output.data, sources_.data(), static_cast<int>(size_), output.count);
        },
        slices.longest(), piece_bytes(),
        [&](std::size_t at, std::size_t most) { stage_for_each(input, slices, at, most); },
        [&](std::size_t at, std::size_t most) {
            const std::size_t length = slices.within(rank_, at, most);
            if (length == 0) return;
            for (std::uint32_t r = 0; r < size_; ++r)
                sources_[r] = r == rank_ ? bytes_of(input) + begin + at : staged_by(r);
            combine(bytes_of(output) + at, sources_.data(), size(), length / size_of(input.dtype));
        });
}

void CpuBackend::reduce(const Operation& operation, ReduceFunction combine) {
    if (size_ == 1) return;
    const bool is_root = rank_ == static_cast<std::uint32_t>(operation.root);
    in_pieces(
        operation.in.bytes(), kStagedBytes,
        [&](std::size_t at, std::size_t length) {
            if (!is_root) show(bytes_of(operation.in) + at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (!is_root) return;
            for (std::uint32_t r = 0; r < size_; ++r)
                sources_[r] =
                    r == rank_ ? bytes_of(operation.in) + at : arena_.staging(r, steps_.current_step());
            combine(bytes_of(operation.out) + at, sources_.data(), size(),
                    length / size_of(operation.in.dtype));
        });
}

void CpuBackend::gather(const Operation& operation) {
    const Buffer& output = operation.out;
    const ConstBuffer& input = operation.in;
    const std::size_t each = input.bytes();
    const bool is_root = rank_ == static_cast<std::uint32_t>(operation.root);
    if (is_root && each > 0) std::memmove(bytes_of(output) + rank_ * each, input.data, each);
    in_pieces(
        each, kStagedBytes,
        [&](std::size_t at, std::size_t length) {
            if (!is_root) show(bytes_of(input) + at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (is_root) collect_from_all(output, Slices::even(each), at, length);
        });
}

void CpuBackend::scatter(const Operation& operation) {
    const Buffer& output = operation.out;
    const ConstBuffer& input = operation.in;
    const std::size_t each = output.bytes();
    const auto from = static_cast<std::uint32_t>(operation.root);
    in_pieces(
        each, piece_bytes(),
        [&](std::size_t at, std::size_t length) {
            if (rank_ == from) stage_for_each(input, Slices::even(each), at, length);
        },
        [&](std::size_t at, std::size_t length) {
            if (rank_ != from) copy_bytes(bytes_of(output) + at, staged_by(from), length);
        });
    if (rank_ == from && each > 0) std::memmove(output.data, bytes_of(input) + rank_ * each, each);
}

/// `longest` is the longest slice that any rank sends.
void CpuBackend::all_to_all(const Buffer& output, const Slices& received, const ConstBuffer& input,
                            const Slices& sent, std::size_t longest) {
    copy_bytes(bytes_of(output) + received.offset(rank_), bytes_of(input) + sent.offset(rank_),
               sent.length(rank_));
    const auto stage = [&](std::size_t at, std::size_t most) { stage_for_each(input, sent, at, most); };
    const auto collect = [&](std::size_t at, std::size_t most) {
        for (std::uint32_t r = 0; r < size_; ++r) {
            if (r == rank_) continue;
            copy_bytes(bytes_of(output) + received.offset(r) + at, staged_by(r),
                       received.within(r, at, most));
        }
    };
    // Only the sender knows where slices of different lengths lie.
    if (!received.are_even()) return in_pieces(longest, piece_bytes(), stage, collect);
    direct_or_staged(
        input.data, input.bytes(),
        [&](const std::vector<std::byte*>& buffers) {
            for (std::uint32_t r = 0; r < size_; ++r) {
                if (r != rank_)
                    copy_bytes(bytes_of(output) + r * longest, buffers[r] + rank_ * longest, longest);
            }
        },
        longest, piece_bytes(), stage, collect);
}

std::size_t agree_on_counts(const Operation& operation, Node& node, const Exchange& exchange) {
    Counts own = operation.counts();
    own.insert(own.begin(), static_cast<std::size_t>(node.env.rank));
    std::vector<Counts> all;
    for (const std::string& theirs :
         exchange({reinterpret_cast<const char*>(own.data()), own.size() * sizeof own[0]}))
        std::memcpy(all.emplace_back(theirs.size() / sizeof own[0]).data(), theirs.data(), theirs.size());
    const std::string why = compare_counts(operation.call.operation, all);
    if (!why.empty()) node.steps.fail_mismatch(why);
    return longest_of(all) * size_of(operation.call.dtype);
}

std::span<std::byte> CpuBackend::allocate_shared(std::size_t bytes) { return node_.allocate_shared(bytes); }

std::vector<std::string> CpuBackend::all_gather_bytes(std::string_view mine, std::int16_t mark) {
    return node_.all_gather_bytes(mine, mark);
}

std::unique_ptr<Backend> CpuBackend::split(const std::vector<std::uint32_t>& members,
                                           const Exchange& exchange) {
    const std::uint32_t share = node_.take_share(members, rank_, exchange);
    return members.empty() ? nullptr : std::make_unique<CpuBackend>(node_, members, share);
}

void CpuBackend::run(const Operation& operation) {
    const Call& call = operation.call;
    if (operation.is_message())
        return with_messages(operation, [this](auto messages) { node_.move(messages); });
    steps_.begin(call);
    const std::size_t longest =
        operation.is_uneven()
            ? agree_on_counts(operation, node_,
                              [&](const std::string& counts) { return node_.gather_bytes(counts); })
            : call.bytes;
    switch (call.operation) {
        case SegmentOp::AllReduce:
            all_reduce(operation.out, operation.in, node_.reduction(call.dtype, call.op));
            break;
        case SegmentOp::Broadcast: broadcast(operation); break;
        case SegmentOp::AllGather: all_gather(operation.out, operation.in, operation.slices_of_out()); break;
        case SegmentOp::ReduceScatter:
            reduce_scatter(operation.out, operation.in, operation.slices_of_in(),
                           node_.reduction(call.dtype, call.op));
            break;
        case SegmentOp::Reduce: reduce(operation, node_.reduction(call.dtype, call.op)); break;
        case SegmentOp::Gather: gather(operation); break;
        case SegmentOp::Scatter: scatter(operation); break;
        case SegmentOp::AllToAll:
            all_to_all(operation.out, operation.slices_of_out(), operation.in, operation.slices_of_in(),
                       longest);
            break;
        default:  // a barrier
            if (size_ > 1) steps_.meet();
    }
    steps_.end();
}

}  // namespace ddp::cpu
