#include "launcher/tools/followed_log.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "launcher/output/log_files.h"

namespace ddprun {
namespace {

/// The limit on an unfinished line that is held back.
constexpr std::size_t kMaxHeldLine = 1024 * 1024;

}  // namespace

/// The pieces, newest first. In this order a rotation meanwhile shows a piece twice but hides none: one newer
/// than the first is found the next time.
std::vector<FollowedLog::Piece> FollowedLog::pieces() const {
    std::vector<Piece> found;
    for (int number = 0; number <= LogFile::kKept; ++number) {
        const std::string path = number == 0 ? path_ : fmt::format("{}.{}", path_, number);
        Piece piece{UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), 0, 0};
        struct stat status {};
        if (!piece.fd || ::fstat(piece.fd.get(), &status) != 0) continue;
        piece.device = status.st_dev;
        piece.inode = status.st_ino;
        const auto same = [&](const Piece& other) {
            return other.device == piece.device && other.inode == piece.inode;
        };
        if (std::none_of(found.begin(), found.end(), same)) found.push_back(std::move(piece));
    }
    return found;
}

/// The index of the piece that is being read; the number of pieces when it is gone.
std::size_t FollowedLog::place_in(const std::vector<Piece>& pieces) const {
    std::size_t place = 0;
    while (place < pieces.size() &&
           (pieces[place].device != here_.device || pieces[place].inode != here_.inode))
        ++place;
    return place;
}

bool FollowedLog::read_new() {
    for (;;) {
        read_to_end();
        std::vector<Piece> all = pieces();
        if (all.empty()) return static_cast<bool>(here_.fd);
        const std::size_t place = here_.fd ? place_in(all) : all.size();
        if (place == 0) return true;
        // The piece has been rotated: it no longer grows, but may have grown since it was read.
        read_to_end();
        if (here_.fd && place == all.size())
            loss_(fmt::format("{}: some lines were rotated away before they could be read", path_));
        here_ = std::move(all[place - 1]);
    }
}

void FollowedLog::read_rest() {
    read_new();
    if (!held_.empty()) lines_(std::exchange(held_, {}) + '\n');
}

void FollowedLog::read_to_end() {
    if (!here_.fd) return;
    char bytes[64 * 1024];
    for (ssize_t n = 0; (n = ::read(here_.fd.get(), bytes, sizeof bytes)) > 0;)
        hand_over({bytes, static_cast<std::size_t>(n)});
}

void FollowedLog::hand_over(std::string_view bytes) {
    held_.append(bytes);
    const std::size_t end = held_.rfind('\n');
    if (end != std::string::npos) {
        lines_(std::string_view(held_).substr(0, end + 1));
        held_.erase(0, end + 1);
    } else if (held_.size() > kMaxHeldLine) {
        held_ += '\n';
        lines_(std::exchange(held_, {}));
    }
}

}  // namespace ddprun
