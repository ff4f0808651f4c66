#pragma once

#include <cstdint>
#include <string_view>

#include "env/clock.h"
#include "env/unique_fd.h"

namespace ddprun::os {

/// Writes lines to a descriptor that others share (stderr) without blocking for long.
///
/// Opens the pipe or terminal behind `fd` again if the kernel allows it, so that O_NONBLOCK holds for its own
/// writes and not for the user's shell. Never raises SIGPIPE.
class LineWriter {
  public:
    explicit LineWriter(int fd);

    /// False when the line, or its end, was lost: the reader is slow or gone, or an error. The first lost
    /// line may have waited 100 ms; later ones do not wait.
    bool write(std::string_view line);
    /// True when the last byte written was not the end of a line.
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
