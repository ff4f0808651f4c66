#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "env/unique_fd.h"

namespace ddprun {

/// Reads a log file (LogFile) from its oldest rotated piece on, in whole lines and in order, while it grows
/// and is rotated.
class FollowedLog {
  public:
    /// Gets one or more whole lines, each with its newline.
    using Lines = std::function<void(std::string_view lines)>;
    /// Gets a sentence when pieces were rotated away before they could be read.
    using Loss = std::function<void(const std::string& what)>;

    FollowedLog(std::string path, Lines lines, Loss loss)
        : path_(std::move(path)), lines_(std::move(lines)), loss_(std::move(loss)) {}

    /// Hands over the new lines. True when the file exists, or did.
    bool read_new();
    /// Hands over the rest at the file's end, with a newline after a half line.
    void read_rest();

  private:
    struct Piece {
        UniqueFd fd;
        dev_t device = 0;
        ino_t inode = 0;
    };

    [[nodiscard]] std::vector<Piece> pieces() const;
    [[nodiscard]] std::size_t place_in(const std::vector<Piece>& pieces) const;
    void read_to_end();
    void hand_over(std::string_view bytes);

    std::string path_;
    Lines lines_;
    Loss loss_;
    Piece here_;        ///< being read
    std::string held_;  ///< an unfinished line, so that lines of several files are not mixed
};

}  // namespace ddprun
