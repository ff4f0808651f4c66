#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "ddp/shm/cpu_backend.h"

/// All collectives except all_reduce, which has its own file.
namespace ddp::cpu {

using ddprun::SegmentOp;

/// Makes one step for each piece of `total` bytes, `most` at a time, and at least one step: `give` shows a
/// piece, `take` reads the others' pieces.
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

/// Stages these bytes, up to kAreaBytes, for the next step.
void CpuBackend::show(const std::byte* from, std::size_t length) {
    kernels_.stream(arena_.staging(rank_, steps_.next_step()), from, length);
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
    in_pieces(
        operation.call.bytes, kAreaBytes,
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
    if (input.bytes() > 0) std::memmove(own, input.data, input.bytes());
    if (size_ == 1) return;
    in_pieces(
        slices.longest(), kAreaBytes,
        // Not `input`, which may overlap the output.
        [&](std::size_t at, std::size_t most) { show(own + at, slices.within(rank_, at, most)); },
        [&](std::size_t at, std::size_t most) { collect_from_all(output, slices, at, most); });
}

/// Bytes for each of n ranks in one area.
std::size_t CpuBackend::piece_bytes() const { return kAreaBytes / size_ / kLine * kLine; }

/// Stages the `most` bytes at `at` of every other rank's slice of `buffer`.
void CpuBackend::stage_for_each(const ConstBuffer& buffer, const Slices& slices, std::size_t at,
                                std::size_t most) {
    std::byte* area = arena_.staging(rank_, steps_.next_step());
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner == rank_) continue;
        kernels_.stream(area + owner * piece_bytes(), bytes_of(buffer) + slices.offset(owner) + at,
                        slices.within(owner, at, most));
    }
}

const std::byte* CpuBackend::staged_by(std::uint32_t rank) const {
    return arena_.staging(rank, steps_.current_step()) + rank_ * piece_bytes();
}

void CpuBackend::reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices,
                                ReduceFunction combine) {
    in_pieces(
        slices.longest(), piece_bytes(),
        [&](std::size_t at, std::size_t most) { stage_for_each(input, slices, at, most); },
        [&](std::size_t at, std::size_t most) {
            const std::size_t length = slices.within(rank_, at, most);
            if (length == 0) return;
            for (std::uint32_t r = 0; r < size_; ++r)
                sources_[r] = r == rank_ ? bytes_of(input) + slices.offset(r) + at : staged_by(r);
            combine(bytes_of(output) + at, sources_.data(), size(), length / size_of(input.dtype));
        });
}

void CpuBackend::reduce(const Operation& operation, ReduceFunction combine) {
    if (size_ == 1) return;
    const bool is_root = rank_ == static_cast<std::uint32_t>(operation.root);
    in_pieces(
        operation.in.bytes(), kAreaBytes,
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
        each, kAreaBytes,
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
    in_pieces(
        longest, piece_bytes(),
        [&](std::size_t at, std::size_t most) { stage_for_each(input, sent, at, most); },
        [&](std::size_t at, std::size_t most) {
            for (std::uint32_t r = 0; r < size_; ++r) {
                if (r == rank_) continue;
                copy_bytes(bytes_of(output) + received.offset(r) + at, staged_by(r),
                           received.within(r, at, most));
            }
        });
}

/// Throws MismatchError when the counts of the ranks do not fit each other. Returns the length of the longest
/// slice of any rank.
std::size_t CpuBackend::agree_on_counts(const Operation& operation) {
    const Counts own = operation.counts();
    const std::size_t bytes = (own.size() + 1) * sizeof own[0];
    if (bytes > kTinyBytes)
        throw InvalidInput(fmt::format("rank {}: uneven collectives do not support {} ranks on a node",
                                       arena_.global_rank(rank_), size_));
    const auto rank = static_cast<std::size_t>(arena_.global_rank(rank_));
    std::byte* const mine = steps_.own_slot().message(bytes);
    std::memcpy(mine, &rank, sizeof rank);
    std::memcpy(mine + sizeof rank, own.data(), bytes - sizeof rank);
    meet();
    std::vector<Counts> all_counts(size_, Counts(own.size() + 1));
    for (std::uint32_t r = 0; r < size_; ++r)
        std::memcpy(all_counts[r].data(), steps_.slot_of(r).message(bytes), bytes);
    const Call& call = operation.call;
    if (const std::string why = compare_counts(call.operation, all_counts); !why.empty())
        steps_.fail_mismatch(why);
    return longest_of(all_counts) * size_of(call.dtype);
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
    const std::size_t longest = operation.is_uneven() ? agree_on_counts(operation) : call.bytes;
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
