#include <algorithm>

#include "ddp/shm/cpu_backend.h"

namespace ddp::cpu {

namespace {

constexpr std::size_t kBlockBytes = 64 * 1024;  // summed and copied while it is in the nearest cache

// Limit for all ranks together: below it, reading everything costs less than another step.
constexpr std::size_t kSmallBytes = 128 * 1024;

}  // namespace

void CpuBackend::all_reduce(const Buffer& buffer, const ConstBuffer& input, ReduceFunction combine) {
    if (size_ > 1 && buffer.bytes() <= kTinyBytes) return reduce_tiny(buffer, input, combine);
    if (size_ > 1 && buffer.bytes() * size_ <= kSmallBytes) return reduce_small(buffer, input, combine);
    copy_bytes(buffer.data, input.data, buffer.bytes());
    if (size_ > 1) reduce_large(buffer, combine);  // the reduction of one value is that value
}

void CpuBackend::reduce_tiny(const Buffer& buffer, const ConstBuffer& input, ReduceFunction combine) {
    const std::size_t bytes = buffer.bytes();
    copy_bytes(steps_.own_slot().message(bytes), input.data, bytes);
    steps_.meet();
    for (std::uint32_t r = 0; r < size_; ++r) sources_[r] = steps_.slot_of(r).message(bytes);
    sources_[rank_] = input.data;  // the same bytes, and already in the nearest cache
    combine(buffer.data, sources_.data(), size(), buffer.count);
}

// Uses ordinary copies: such small data is still in a cache when the other ranks read it.
void CpuBackend::reduce_small(const Buffer& buffer, const ConstBuffer& input, ReduceFunction combine) {
    copy_bytes(arena_.staging(rank_, steps_.next_step()), input.data, buffer.bytes());
    steps_.meet();
    for (std::uint32_t r = 0; r < size_; ++r) sources_[r] = arena_.staging(r, steps_.current_step());
    sources_[rank_] = input.data;
    combine(buffer.data, sources_.data(), size(), buffer.count);
}

// The algorithm depends on every rank's buffer, so the first step publishes the places. That is free in the
// staged algorithm, whose first range is staged by then.
void CpuBackend::reduce_large(const Buffer& buffer, ReduceFunction combine) {
    if (!node_.tell_place(buffer.data, buffer.bytes()))
        stage(buffer, Pieces::cut(0, std::min(buffer.bytes(), stretch_bytes()), size_));
    meet();
    const std::vector<std::byte*> buffers = node_.shared_buffers();
    if (!buffers.empty()) return reduce_in_place(buffers, buffer, combine);
    reduce_staged(buffer, combine, node_.ranks_in_shared_memory() == 0);
}

void CpuBackend::reduce_in_place(const std::vector<std::byte*>& buffers, const Buffer& buffer,
                                 ReduceFunction combine) {
    const Pieces slices = Pieces::cut(0, buffer.bytes(), size_);
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

// One step per range: before it a rank stages range k and writes the results of k - 1; after it, the rank
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

std::size_t CpuBackend::stretch_bytes() const { return piece_bytes() * size_; }

void CpuBackend::stage(const Buffer& buffer, const Pieces& pieces) {
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner != rank_)
            copy_bytes(piece_for(owner), bytes_of(buffer) + pieces.offset(owner), pieces.length(owner));
    }
}

void CpuBackend::sum_own(const Buffer& buffer, const Pieces& pieces, ReduceFunction combine) {
    std::byte* own = bytes_of(buffer) + pieces.offset(rank_);
    std::byte* result = arena_.results(rank_, steps_.next_step());
    const std::size_t length = pieces.length(rank_);
    for (std::size_t at = 0; at < length; at += kBlockBytes) {
        const std::size_t block = std::min(kBlockBytes, length - at);
        for (std::uint32_t r = 0; r < size_; ++r) {
            sources_[r] = r == rank_ ? own + at : staged_by(r) + at;
        }
        combine(own + at, sources_.data(), size(), block / size_of(buffer.dtype));
        copy_bytes(result + at, own + at, block);
    }
}

void CpuBackend::collect(const Buffer& buffer, const Pieces& pieces) {
    for (std::uint32_t owner = 0; owner < size_; ++owner) {
        if (owner == rank_) continue;
        copy_bytes(bytes_of(buffer) + pieces.offset(owner), arena_.results(owner, steps_.current_step()),
                   pieces.length(owner));
    }
}

}  // namespace ddp::cpu
