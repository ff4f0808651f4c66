#pragma once

#include <cstdint>
#include <string_view>

#include "env/clock.h"
#include "env/unique_fd.h"

namespace ddprun::os {

/// Writes lines to a descriptor that others share (stderr) without ever being held up by it for long.
///
/// Where the kernel allows it, it opens the pipe or terminal behind `fd` again for itself, so that
/// "non-blocking" holds for its own writes and not for the user's shell. Never raises SIGPIPE.
class LineWriter {
  public:
    explicit LineWriter(int fd);

    /// False: the line, or its end, was lost: nobody reads, or an error. The first lost line may have waited
    /// 100 ms, those after it do not wait at all.
    bool write(std::string_view line);
    /// The last byte that got through was not the end of a line.
    [[nodiscard]] bool is_mid_line() const { return mid_line_; }

  private:
    bool write_bytes(std::string_view bytes);
    [[nodiscard]] bool is_nonblocking() const { return kind_ == Kind::Socket || own_; }
    /// False, with EAGAIN, when a write now could block past the deadline.
    [[nodiscard]] bool may_write(TimePoint deadline) const;
    bool wait_until_writable(TimePoint deadline) const;
    [[nodiscard]] ssize_t write_some(std::string_view bytes) const;

    enum class Kind : std::uint8_t { Socket, Other };
    int fd_;
    UniqueFd own_;
    Kind kind_ = Kind::Other;
    bool stalled_ = false;
    bool mid_line_ = false;
};

}  // namespace ddprun::os
