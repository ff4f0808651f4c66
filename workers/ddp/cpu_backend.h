#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/kernels.h"
#include "ddp/lockstep.h"
#include "ddp/point_to_point.h"
#include "ddp/process_group.h"

namespace ddp::cpu {

/// Blocking collectives of one node over its shared segment. One thread at a time.
///
/// Three ways to reduce, all summing in rank order element by element, so the way and the sizes of its pieces
/// never change a bit of the result:
///   tiny       the message travels in the slot; one step, everybody sums everything
///   zero-copy  every rank's buffer lies in an allocate_shared region: each sums its slice over all the
///              buffers and writes the result into all of them; two steps
///   staged     pieces that others sum are copied to shared memory first; one step per piece
class CpuBackend {
  public:
    /// Joins the ranks of `env`'s node on `segment`. Throws what check_claim and join throw.
    CpuBackend(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
               std::chrono::nanoseconds timeout, Arena::Lines lines = Arena::Lines::OfTheNode);
    /// Joins some ranks of a group: `members` by their ranks in it, in the new order. See Arena for `share`.
    CpuBackend(const CpuBackend& parent, const std::vector<std::uint32_t>& members, std::uint32_t share,
               const ddprun::WorkerEnv& env);
    ~CpuBackend();
    CpuBackend(const CpuBackend&) = delete;
    CpuBackend& operator=(const CpuBackend&) = delete;

    [[nodiscard]] int rank() const { return static_cast<int>(rank_); }
    [[nodiscard]] int size() const { return static_cast<int>(size_); }
    [[nodiscard]] const Roster& roster() const { return roster_; }
    [[nodiscard]] SegmentMap& segment() const { return *segment_; }
    [[nodiscard]] std::string describe() const;

    // As ProcessGroup, with arguments that are already checked. Throw MismatchError, PeerLostError,
    // TimeoutError.
    void all_reduce(Buffer buffer, ReduceOp op);
    void broadcast(Buffer buffer, int root);
    void all_gather(Buffer output, Buffer input);
    void reduce_scatter(Buffer output, Buffer input, ReduceOp op);
    void reduce(Buffer buffer, int root, ReduceOp op);
    void gather(Buffer output, Buffer input, int root);
    void scatter(Buffer output, Buffer input, int root);
    void all_to_all(Buffer output, Buffer input);
    void send(Buffer buffer, int to);
    void recv(Buffer buffer, int from);
    void barrier();
    std::span<std::byte> allocate_shared(std::size_t bytes);
    std::vector<std::string> all_gather_bytes(std::string_view mine);

    /// Every later collective fails with `why`; peers find out by their deadlines.
    void give_up(std::exception_ptr why) { steps_.give_up(std::move(why)); }

    [[nodiscard]] double communication_seconds() const { return steps_.communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples);

  private:
    struct Region {
        std::byte* base;
        std::uint64_t offset;  ///< in the segment
        std::size_t stride;    ///< bytes per rank
    };
    struct Pieces;

    [[nodiscard]] std::uint64_t locate(const void* data, std::size_t bytes) const;
    [[nodiscard]] std::byte* shared_buffer(std::uint32_t rank, std::uint64_t location) const;
    void meet() { kernels_.fence(), steps_.meet(); }
    [[nodiscard]] ReduceFunction reduction(DType type, ReduceOp op) const;

    [[nodiscard]] std::size_t stretch_bytes() const;
    [[nodiscard]] std::size_t piece_bytes() const;
    void stage_for_each(const Buffer& buffer, std::size_t each, std::size_t at, std::size_t length);
    [[nodiscard]] const std::byte* staged_by(std::uint32_t rank) const;
    template <class Transfer>
    void between_two(Transfer transfer);

    void reduce_tiny(const Buffer& buffer, ReduceFunction combine);
    void reduce_large(const Buffer& buffer, ReduceFunction combine);
    void reduce_in_place(const Buffer& buffer, ReduceFunction combine);
    void reduce_staged(const Buffer& buffer, ReduceFunction combine, bool first_is_met);
    void stage(const Buffer& buffer, const Pieces& pieces);
    void sum_own(const Buffer& buffer, const Pieces& pieces, ReduceFunction combine);
    void collect(const Buffer& buffer, const Pieces& pieces);

    std::shared_ptr<SegmentMap> segment_;
    Arena arena_;
    const std::uint32_t rank_, size_;
    Roster roster_;
    const std::chrono::nanoseconds timeout_;
    Lockstep steps_;
    const Kernels& kernels_;
    PointToPoint messages_;
    std::vector<Region> regions_;
    std::vector<const void*> sources_;  ///< one per rank, reused
};

}  // namespace ddp::cpu
