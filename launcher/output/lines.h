#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"

namespace ddprun {

/// Said behind the part of a line that is shown before its end has come, and before what follows of it.
inline constexpr std::string_view kUnfinishedMark = " [line goes on]";
inline constexpr std::string_view kContinuedMark = "[line continued] ";
/// A longer line is passed on in pieces of about this size, marked in the same way.
inline constexpr std::size_t kMaxLineBytes = 1 << 20;

/// Calls `visit` with each line of a block of whole lines, with its newline.
template <class Visit>
void for_each_line(std::string_view block, const Visit& visit) {
    while (!block.empty()) {
        const std::size_t end = block.find('\n') + 1;
        visit(block.substr(0, end));
        block.remove_prefix(end);
    }
}

/// Puts the pieces in which one stream arrives together to whole lines.
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

    /// When an unfinished line should be shown: kNever while there is none.
    [[nodiscard]] TimePoint due(Duration half_line_after) const {
        return partial_.empty() ? kNever : deadline_after(since_, half_line_after);
    }
    /// The unfinished line so far, marked, as one line. Call only while due() is not kNever.
    [[nodiscard]] std::string cut();
    /// What is left at the end of the stream as one line, or "".
    [[nodiscard]] std::string finish();

  private:
    [[nodiscard]] std::string take();

    std::string partial_;
    TimePoint since_{};       ///< when the first byte of partial_ came
    bool continued_ = false;  ///< the beginning of this line has been shown
};

/// What a prefix template can name, as text.
struct PrefixValues {
    std::string rank, local_rank, role_name, host, time;
};

/// torchrun's own, of its --tee.
inline constexpr std::string_view kTorchrunPrefix = "[${role_name}${local_rank}]:";

/// One place that lines come to: a console, a file of filtered lines.
struct PrefixPlace {
    int ranks = 0;  ///< how many ranks of this node are shown there
    bool is_terminal = false;
    bool is_whole_job = false;  ///< these ranks are all that the job can have
};
/// What stands before lines where the user did not say: "[${rank}]: ", or nothing where all lines are of one
/// rank and a prefix would only keep the next program in the pipe from reading them. People at a terminal see
/// which rank it is unless there is no other.
std::string_view default_prefix(const PrefixPlace& place);

/// Whether a prefix can have this variable.
bool is_prefix_variable(std::string_view name);
/// "${rank}, ${local_rank}, ...", for errors and documentation.
std::string prefix_variables();

/// "[${rank}]: " taken apart once, as Python's string.Template reads it for torchrun: "$rank" is "${rank}",
/// "$$" is a dollar, unknown variables stay as they are written.
class PrefixTemplate {
  public:
    explicit PrefixTemplate(std::string_view text);
    [[nodiscard]] std::string render(const PrefixValues& values) const;
    /// False: the prefix of a stream never changes.
    [[nodiscard]] bool names_time() const { return names_time_; }

  private:
    struct Part {
        std::string literal;
        std::string PrefixValues::*variable;  ///< null for a literal
    };
    std::vector<Part> parts_;
    bool names_time_ = false;
};

/// The prefix in the colour of this rank, with the reset behind it.
std::string colored_prefix(const std::string& prefix, int rank);

}  // namespace ddprun
