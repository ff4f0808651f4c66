#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace ddprun::test {

/// A program's calls of CUDA, in the format that tests/gpu/check_trace.py reads:
///
///     # cuda-trace 1
///     <thread> <depth> <start> <end> <function> [<kernel>]
///
/// Depth 0 is a call of the program, 1 one that the CUDA runtime made for it; times are nanoseconds. Lines
/// stand in the order in which calls ended. Kept in memory until the process exits: a call costs well under a
/// microsecond. Thread-safe. One per process, never destroyed: calls may come until the very end.
class TraceLog {
  public:
    /// The file is written at exit() when there was a call. "%p" in its name is this process's id.
    explicit TraceLog(std::string file);
    TraceLog(const TraceLog&) = delete;
    TraceLog& operator=(const TraceLog&) = delete;

    /// Of the calling thread, from `start` until now.
    void add(int depth, std::uint64_t start, std::string_view function, std::string_view kernel);
    [[nodiscard]] static std::uint64_t now();

  private:
    struct Call {
        int thread;
        int depth;
        std::uint64_t start, end;
        const char* function;
        const char* kernel;
    };
    const char* keep(std::string_view name);
    void write();

    std::string file_;
    std::mutex mutex_;
    std::deque<Call> calls_;
    std::set<std::string, std::less<>> names_;  ///< each once: there are few
};

}  // namespace ddprun::test
