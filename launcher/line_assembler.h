#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "env/clock.h"

namespace ddprun {

/// Said behind the part of a line that is shown before its end has come, and before what follows of it.
inline constexpr std::string_view kUnfinishedMark = " [line goes on]";
inline constexpr std::string_view kContinuedMark = "[line continued] ";
/// A longer line is passed on in pieces of about this size, marked in the same way.
inline constexpr std::size_t kMaxLineBytes = 1 << 20;

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

}  // namespace ddprun
