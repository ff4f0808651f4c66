#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// The whole file. Reads pipes and /proc files too, to their end. Error: System ("read /a/b: Permission
/// denied"), Limit when it is longer than `max_bytes`.
Result<std::string> read_file(const std::string& path, std::size_t max_bytes);

/// Opens a file for reading, where others chose its name: a pipe that nobody writes to would hold us for
/// ever. Error: System ("/a/b: Permission denied"), InvalidArgument ("/a/b: is a directory, not a file").
Result<UniqueFd> open_regular_file(const std::string& path);
/// The whole of it. Error: as open_regular_file and read_file.
Result<std::string> read_regular_file(const std::string& path, std::size_t max_bytes);

/// The first executable of that name in the directories of a PATH (an empty one counts as none); a name with
/// a slash is a path itself. "" there is none.
std::string find_executable(std::string_view name, std::string_view path);

/// The names in a directory without "." and "..", sorted; none where it cannot be read.
std::vector<std::string> names_in(const std::string& directory);
/// Those of them that are numbers above 0, in ascending order: processes, threads.
std::vector<int> numbers_in(const std::string& directory);

/// Replaces `path` as a whole: a reader, or a crash at any moment, meets the old content or the new one, on
/// disk too. Permissions become `mode` less the umask. A symbolic link is replaced, not followed. On an error
/// the old file is untouched and nothing of ours is left beside it. Error: System ("write /a/b: No space left
/// on device").
Status write_file_atomically(const std::string& path, std::string_view content, mode_t mode);
/// Whether that could be done now: the directory is there and may be written, and what is at `path` is a
/// file, or nothing. Error: InvalidArgument with the remedy.
Status check_replaceable(const std::string& path);

/// mkdir -p. Error: System naming the directory that failed.
Status make_directories(const std::string& path);

/// ftruncate of a file in memory (memfd). The soft limit on file sizes (ulimit -f) is meant for disks and
/// does not count; it stays as it is. Error: System; Limit where the hard limit is too small, with the
/// remedy.
Status resize_memory_file(int fd, std::uint64_t bytes);
/// `wanted` bytes behind the first `before` of a memory file, or as many as the hard limit on file sizes
/// leaves: whole pages, 0 where it leaves nothing.
std::uint64_t room_in_memory_file(std::uint64_t before, std::uint64_t wanted);

/// The times of files come from a clock of their own that ticks this slowly at most.
inline constexpr Duration kFileClockTick = std::chrono::milliseconds(10);
/// When a file was last written, on the monotonic clock, up to a tick too early; TimePoint{} when there is
/// none.
TimePoint last_write(const std::string& path);

}  // namespace ddprun
