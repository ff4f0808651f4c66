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

/// Reads a whole file; pipes and /proc files too, to their end. Error: System ("read /a/b: Permission
/// denied"), Limit when it is longer than `max_bytes`.
Result<std::string> read_file(const std::string& path, std::size_t max_bytes);

/// Opens a file whose name others chose for reading; refuses a pipe, which could hold us for ever. Error:
/// System ("/a/b: Permission denied"), InvalidArgument ("/a/b: is a directory, not a file").
Result<UniqueFd> open_regular_file(const std::string& path);
/// Reads such a file whole. Error: as open_regular_file and read_file.
Result<std::string> read_regular_file(const std::string& path, std::size_t max_bytes);

/// The first executable of that name in the directories of a PATH (empty entries do not count); a name with a
/// slash is a path itself. "" none.
std::string find_executable(std::string_view name, std::string_view path);

/// The directory of the program that runs; "" when it cannot be read.
std::string own_directory();

/// The names in a directory without "." and "..", sorted; empty when it cannot be read.
std::vector<std::string> names_in(const std::string& directory);
/// The names in a directory that are numbers above 0, ascending: processes, threads.
std::vector<int> numbers_in(const std::string& directory);

/// Replaces `path` as a whole: a reader, or a crash at any moment, finds the old content or the new, on disk
/// too. Permissions become `mode` less the umask. A symbolic link is replaced, not followed. On an error the
/// old file is unchanged and no temporary file is left. Error: System ("write /a/b: No space left on
/// device").
Status write_file_atomically(const std::string& path, std::string_view content, mode_t mode);
/// Checks that write_file_atomically() can work now: the directory is writable, and `path` is a file or does
/// not exist. Error: InvalidArgument with the remedy.
Status check_replaceable(const std::string& path);

/// Checks that make_directories() can work now, and that files can be made there: the nearest of `path` and
/// its parents that exists is a writable directory. Error: InvalidArgument with the remedy.
Status check_makeable(const std::string& path);
/// mkdir -p. Error: System naming the directory that failed.
Status make_directories(const std::string& path);

/// Resizes a file in memory (memfd). Ignores the soft limit on file sizes (ulimit -f), which is meant for
/// disks, and keeps it. Error: System; Limit when the hard limit is too small, with the remedy.
Status resize_memory_file(int fd, std::uint64_t bytes);
/// The number of bytes, at most `wanted`, that the hard limit on file sizes allows after the first `before`
/// bytes of a memory file: whole pages, or 0.
std::uint64_t room_in_memory_file(std::uint64_t before, std::uint64_t wanted);

/// The longest tick of the clock that stamps files.
inline constexpr Duration kFileClockTick = std::chrono::milliseconds(10);
/// The time of a file's last write, on the monotonic clock, up to a tick too early; TimePoint{} when the file
/// does not exist.
TimePoint last_write(const std::string& path);

}  // namespace ddprun
