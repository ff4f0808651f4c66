#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/kept.h"
#include "env/os/system.h"
#include "env/result.h"
#include "env/segment.h"
#include "env/unique_fd.h"

namespace ddprun {

struct SegmentShape {
    int local_world_size = 1;
    int world_size = 1;
    int first_rank = 0;
    std::uint64_t generation = 0;
    int cpus = 0;  ///< CPUs the workers share; 0 not known
};

/// The launcher's side of one generation's shared segment: makes it, hands its descriptor to the workers,
/// reads their lines. Owns the memfd and the mapping of its first pages; the memory lives until the last
/// worker is gone. The workers can write to all of the memory, so nothing in it decides where or how much is
/// read.
class SegmentFile {
  public:
    /// Error: System (memfd_create, ftruncate, mmap).
    static Result<std::unique_ptr<SegmentFile>> create(os::System& system, const SegmentShape& shape);
    ~SegmentFile();
    SegmentFile(const SegmentFile&) = delete;
    SegmentFile& operator=(const SegmentFile&) = delete;

    [[nodiscard]] int fd() const { return fd_.get(); }
    /// Ends the generation's collectives: every rank that waits in one gives up, naming `rank`.
    /// The first caller wins.
    void abort(int rank);
    /// Writes into every rank's line that it may have to stop after `step`, and why. After the call each rank
    /// that has not asked about that step yet will find it there. Blocks for some 10 ms (a memory barrier in
    /// all processes).
    void propose_stop(std::uint64_t step, const std::string& why);
    /// Makes `step` the one after which every rank stops; 0 takes a proposal back.
    void decide_stop(std::uint64_t step);
    [[nodiscard]] RankLine& line(int local_rank);
    [[nodiscard]] const RankLine& line(int local_rank) const;
    /// The scalars that this worker tells; null where a limit on file sizes left no room for them.
    [[nodiscard]] ScalarRing* scalars(int local_rank);
    [[nodiscard]] int size() const { return size_; }

  private:
    SegmentFile(UniqueFd fd, void* base, std::size_t bytes, int size, std::uint64_t scalars_offset)
        : fd_(std::move(fd)), base_(base), bytes_(bytes), size_(size), scalars_offset_(scalars_offset) {}
    [[nodiscard]] SegmentHeader& header() const { return *static_cast<SegmentHeader*>(base_); }

    UniqueFd fd_;
    void* base_;
    std::size_t bytes_;
    int size_;                      ///< number of rank lines
    std::uint64_t scalars_offset_;  ///< 0: there are no rings
};

/// "all_reduce #812 (25 MiB)" for a rank that is inside a collective, "finished all_reduce #811" for one that
/// is not, "" for one that never called libddp.
std::string describe_line(const RankLine& line);

/// The launcher's side of one node's kept memory (env/kept.h): makes it, hands its descriptor to the workers,
/// reads their lines. It is made anew when all workers start again, because then nothing of them is kept.
class KeptFile {
  public:
    /// `wait`: how long a worker that has left its generation waits for the next one.
    /// Error: System (memfd_create, ftruncate, mmap).
    static Result<std::unique_ptr<KeptFile>> create(os::System& system, int workers, Duration wait);
    ~KeptFile();
    KeptFile(const KeptFile&) = delete;
    KeptFile& operator=(const KeptFile&) = delete;

    [[nodiscard]] int fd() const { return fd_.get(); }
    /// The units that this rank's processes have committed; -1: none yet.
    [[nodiscard]] std::int64_t commits(int local_rank) const;
    /// The time that its processes have spent on units that they committed.
    [[nodiscard]] Duration useful(int local_rank) const;
    [[nodiscard]] const KeptLine& line(int local_rank) const;

  private:
    KeptFile(UniqueFd fd, void* base, std::size_t bytes) : fd_(std::move(fd)), base_(base), bytes_(bytes) {}

    UniqueFd fd_;
    void* base_;  ///< of the header and the lines
    std::size_t bytes_;
};

}  // namespace ddprun
