#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fake {

inline constexpr int kMaxRanks = 16;
inline constexpr std::size_t kAreaBytes = 1 << 20;  ///< the largest message

/// Shared memory in which the ranks of a communicator meet, whether they are threads or processes.
class Meeting {
  public:
    /// Makes the file; the name goes into the unique id. Removed at exit if nobody came.
    static std::string create();
    /// Maps it. The last of `ranks` to come removes the name.
    Meeting(const std::string& name, int rank, int ranks);
    ~Meeting();
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;

    [[nodiscard]] bool complete() const;
    /// Waits for all ranks at the next step. False when `aborted` became true.
    bool arrive(const std::atomic<bool>& aborted);
    [[nodiscard]] std::byte* area(int rank) const;
    void finalize();
    [[nodiscard]] bool all_finalized() const;

  private:
    struct Shared;
    Shared* shared_;
    int rank_, ranks_;
    std::uint64_t step_ = 0;
};

/// Lets others run for a moment.
void nap();

}  // namespace fake
