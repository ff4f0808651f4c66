#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace fake {

inline constexpr int kMaxRanks = 16;
inline constexpr std::size_t kAreaBytes = 1 << 20;        ///< the largest message of a collective
inline constexpr std::size_t kMailboxBytes = 256 * 1024;  ///< the largest message between two ranks

/// Shared memory in which the ranks of a communicator meet, whether they are threads or processes.
class Meeting {
  public:
    /// Creates the file and returns its name for the unique id. The file is removed at exit if no rank has
    /// mapped it.
    static std::string create();
    /// Maps the file. The last of `ranks` to map it removes the name.
    Meeting(const std::string& name, int rank, int ranks);
    ~Meeting();
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;

    [[nodiscard]] bool complete() const;
    /// Waits for all ranks at the next step. False: `aborted` became true.
    bool arrive(const std::atomic<bool>& aborted);
    [[nodiscard]] std::byte* area(int rank) const;
    void finalize();
    [[nodiscard]] bool all_finalized() const;
    void note_abort();
    [[nodiscard]] bool somebody_aborted() const;

    /// A mailbox holds one message; both calls wait for the other side. False: `aborted` became true.
    bool post(int to, std::span<const std::byte> message, const std::atomic<bool>& aborted);
    bool fetch(int from, std::span<std::byte> message, const std::atomic<bool>& aborted);

  private:
    struct Shared;
    struct Mailbox;
    Shared* shared_;
    int rank_, ranks_;
    std::uint64_t step_ = 0;
};

/// Yields the processor briefly.
void nap();

}  // namespace fake
