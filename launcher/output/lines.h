#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"

namespace ddprun {

/// Marks after a part of a line that is shown before its end has arrived, and before the part that follows.
inline constexpr std::string_view kUnfinishedMark = " [line goes on]";
inline constexpr std::string_view kContinuedMark = "[line continued] ";
/// A longer line is passed on in pieces of about this size, with the same marks.
inline constexpr std::size_t kMaxLineBytes = 1 << 20;

/// Lines that could not be kept, for the report.
struct OutputLoss {
    std::uint64_t bytes = 0;
    std::string why;  ///< the first cause: "write /logs/3/stdout.log: No space left on device"
};

/// Calls `visit` with each line of a block of whole lines, with its newline.
template <class Visit>
void for_each_line(std::string_view block, const Visit& visit) {
    while (!block.empty()) {
        const std::size_t end = block.find('\n') + 1;
        visit(block.substr(0, end));
        block.remove_prefix(end);
    }
}

/// Joins the pieces of one stream to whole lines.
///
/// Pure: time is an argument. `emit` is called with blocks of whole lines; every block ends with a newline.
class LineAssembler {
  public:
    template <class Emit>
    void feed(std::string_view chunk, TimePoint now, const Emit& emit) {
        if (!partial_.empty() || continued_) {
            const std::size_t end = chunk.find('\n');
            if (partial_.empty()) since_ = now;
            partial_.append(chunk.substr(0, end == std::string_view::npos ? end : end + 1));
            if (end == std::string_view::npos) {
                if (partial_.size() > kMaxLineBytes) emit(cut());
                return;
            }
            emit(take());
            chunk.remove_prefix(end + 1);
        }
        // Most bytes pass here without being copied: everything up to the last newline of the chunk.
        const void* last = ::memrchr(chunk.data(), '\n', chunk.size());
        if (last != nullptr) {
            const auto whole = static_cast<std::size_t>(static_cast<const char*>(last) - chunk.data()) + 1;
            emit(chunk.substr(0, whole));
            chunk.remove_prefix(whole);
        }
        if (chunk.empty()) return;
        partial_ = chunk;
        since_ = now;
    }

    /// The time at which an unfinished line should be shown; kNever: no line is unfinished.
    [[nodiscard]] TimePoint due(Duration half_line_after) const {
        return partial_.empty() ? kNever : deadline_after(since_, half_line_after);
    }
    /// Counts the unfinished line's age from `now`: its rest has come and waits to be read.
    void restart_age(TimePoint now) { since_ = now; }
    /// The unfinished line so far, marked, as one line. Call only while due() is not kNever.
    [[nodiscard]] std::string cut();
    /// The rest at the end of the stream as one line, or "".
    [[nodiscard]] std::string finish();

  private:
    [[nodiscard]] std::string take();

    std::string partial_;
    TimePoint since_{};       ///< when the first byte of partial_ arrived, or restart_age()
    bool continued_ = false;  ///< the beginning of this line has been shown
};

/// The values of the variables of a prefix template.
struct PrefixValues {
    std::string rank, local_rank, role_name, host, time;
};

/// The prefix that torchrun puts before lines of --tee.
inline constexpr std::string_view kTorchrunPrefix = "[${role_name}${local_rank}]:";

/// A destination of lines: a console, or a file of filtered lines.
struct PrefixPlace {
    int ranks = 0;  ///< how many ranks of this node are shown there
    bool is_terminal = false;
    bool is_whole_job = false;  ///< the job can have no other ranks
};
/// The prefix when the user sets none: "[${rank}]: ", or "" when all lines are of one rank, so that the next
/// program in a pipe reads them unchanged. A terminal gets the prefix unless the job has only one rank.
std::string_view default_prefix(const PrefixPlace& place);

/// True when a prefix can have this variable.
bool is_prefix_variable(std::string_view name);
/// "${rank}, ${local_rank}, ...", for errors and documentation.
std::string prefix_variables();

/// A parsed prefix such as "[${rank}]: ", by the rules of Python's string.Template, which torchrun uses:
/// "$rank" is "${rank}", "$$" is a dollar, unknown variables stay as they are.
class PrefixTemplate {
  public:
    explicit PrefixTemplate(std::string_view text);
    [[nodiscard]] std::string render(const PrefixValues& values) const;
    /// False when the prefix of a stream never changes.
    [[nodiscard]] bool names_time() const { return names_time_; }

  private:
    struct Part {
        std::string literal;
        std::string PrefixValues::*variable;  ///< null for a literal
    };
    std::vector<Part> parts_;
    bool names_time_ = false;
};

/// The prefix in the colour of this rank, followed by the reset.
std::string colored_prefix(const std::string& prefix, int rank);

}  // namespace ddprun
