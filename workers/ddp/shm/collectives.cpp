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
            if (rank_ != from)
                copy_bytes(bytes_of(buffer) + at, arena_.staging(from, steps_.current_step()), length);
        });
    steps_.end();
}

void CpuBackend::all_gather(Buffer output, Buffer input) {
    steps_.begin(call_of(SegmentOp::AllGather, input));
    gather_slices(output, input, Slices::even(input.bytes()));
    steps_.end();
}

void CpuBackend::gather_slices(const Buffer& output, const Buffer& input, const Slices& slices) {
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
void CpuBackend::stage_for_each(const Buffer& buffer, const Slices& slices, std::size_t at,
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

void CpuBackend::reduce_scatter(Buffer output, Buffer input, ReduceOp op) {
    steps_.begin(call_of(SegmentOp::ReduceScatter, output, op));
    reduce_slices(output, input, Slices::even(output.bytes()), reduction(input.dtype, op));
    steps_.end();
}

void CpuBackend::reduce_slices(const Buffer& output, const Buffer& input, const Slices& slices,
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
                sources_[r] = r == rank_ ? own : arena_.staging(r, steps_.current_step());
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
            if (is_root) collect_from_all(output, Slices::even(each), at, length);
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
            if (rank_ == from) stage_for_each(input, Slices::even(each), at, length);
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
    exchange_slices(output, Slices::even(each), input, Slices::even(each), each);
    steps_.end();
}

/// `longest` is the longest slice that any rank sends.
void CpuBackend::exchange_slices(const Buffer& output, const Slices& received, const Buffer& input,
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

namespace {

Call uneven(SegmentOp operation, const Buffer& whole, ReduceOp op = ReduceOp::Sum) {
    return call_of(operation, whole, op, kUnevenMark);
}

}  // namespace

/// Every rank's counts, in the form that unequal_counts and unmatched_counts take.
std::vector<Counts> CpuBackend::exchange_counts(const Counts& own) {
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
    return all_counts;
}

void CpuBackend::require_equal_counts(const Counts& counts) {
    if (const std::string why = unequal_counts(exchange_counts(counts)); !why.empty())
        steps_.fail_mismatch(why);
}

void CpuBackend::all_gather_v(Buffer output, Buffer input, const Counts& counts) {
    steps_.begin(uneven(SegmentOp::AllGather, output));
    require_equal_counts(counts);
    gather_slices(output, input, Slices(counts, output.dtype));
    steps_.end();
}

void CpuBackend::reduce_scatter_v(Buffer output, Buffer input, const Counts& counts, ReduceOp op) {
    steps_.begin(uneven(SegmentOp::ReduceScatter, input, op));
    require_equal_counts(counts);
    reduce_slices(output, input, Slices(counts, input.dtype), reduction(input.dtype, op));
    steps_.end();
}

void CpuBackend::all_to_all_v(Buffer output, const Counts& received, Buffer input, const Counts& sent) {
    // Without the length, which differs between ranks.
    steps_.begin(uneven(SegmentOp::AllToAll, {nullptr, 0, input.dtype, {}}));
    Counts both = sent;
    both.insert(both.end(), received.begin(), received.end());
    const std::vector<Counts> all_counts = exchange_counts(both);
    if (const std::string why = unmatched_counts(all_counts); !why.empty()) steps_.fail_mismatch(why);
    std::size_t longest = 0;
    for (const Counts& one : all_counts)
        longest = std::max(longest, *std::max_element(one.begin() + 1, one.end()));
    exchange_slices(output, Slices(received, output.dtype), input, Slices(sent, input.dtype),
                    longest * size_of(input.dtype));
    steps_.end();
}

// After a failed transfer the pair cannot take part in collectives either.
template <class Transfer>
void CpuBackend::run_transfer(Transfer transfer) {
    steps_.throw_if_broken();
    try {
        transfer();
    } catch (...) {
        steps_.mark_broken(std::current_exception());
        throw;
    }
}

void CpuBackend::send(Buffer buffer, int to) {
    run_transfer([&] { messages_.send(buffer, static_cast<std::uint32_t>(to)); });
}

void CpuBackend::recv(Buffer buffer, int from) {
    run_transfer([&] { messages_.recv(buffer, static_cast<std::uint32_t>(from)); });
}

void CpuBackend::batch(const std::vector<Message>& messages) { batch_here(messages, {}); }

void CpuBackend::batch_here(const std::vector<Message>& messages, const std::function<bool()>& meanwhile) {
    run_transfer([&] { messages_.move(messages, meanwhile); });
}

std::vector<std::string> CpuBackend::all_gather_bytes(std::string_view mine, std::int16_t mark) {
    steps_.begin({.operation = SegmentOp::AllGather, .root = mark});
    std::vector<std::string> all = gather_bytes(mine);
    steps_.end();
    return all;
}

std::vector<std::string> CpuBackend::gather_bytes(std::string_view mine) {
    const std::uint64_t own_length = mine.size();
    std::memcpy(steps_.own_slot().message(sizeof own_length), &own_length, sizeof own_length);
    meet();
    std::vector<std::string> all(size_);
    std::size_t longest = 0;
    for (std::uint32_t r = 0; r < size_; ++r) {
        std::uint64_t length = 0;
        std::memcpy(&length, steps_.slot_of(r).message(sizeof length), sizeof length);
        all[r].resize(length);
        longest = std::max(longest, static_cast<std::size_t>(length));
    }
    for (std::size_t at = 0; at < longest; at += kAreaBytes) {
        const auto part = [at](std::size_t whole) {
            return at < whole ? std::min(kAreaBytes, whole - at) : 0;
        };
        if (at < mine.size())
            kernels_.stream(arena_.staging(rank_, steps_.next_step()), mine.data() + at, part(mine.size()));
        meet();
        for (std::uint32_t r = 0; r < size_; ++r) {
            if (at < all[r].size())
                std::memcpy(all[r].data() + at, arena_.staging(r, steps_.current_step()),
                            part(all[r].size()));
        }
    }
    return all;
}

}  // namespace ddp::cpu
