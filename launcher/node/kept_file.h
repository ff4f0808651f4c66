#pragma once

#include <cstdint>
#include <memory>

#include "env/clock.h"
#include "env/kept.h"
#include "env/os/system.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

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
