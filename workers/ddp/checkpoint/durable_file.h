#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "env/unique_fd.h"

namespace ddp {

/// A new file that is either committed, whole and on the disk, or removed. Blocking. Every failure throws
/// FileError: "<path>: <attempt>: <cause>".
class DurableFile {
  public:
    /// Creates the file, or empties an existing one.
    explicit DurableFile(std::string path);
    ~DurableFile();
    DurableFile(const DurableFile&) = delete;
    DurableFile& operator=(const DurableFile&) = delete;

    void write(const void* bytes, std::size_t count);
    void commit();

  private:
    std::string path_;
    ddprun::UniqueFd fd_;
    bool committed_ = false;
};

/// Replaces (or makes) `path` in one step: a reader sees the old or the new content, never a mixture.
void replace_file(const std::string& path, std::string_view content);
/// Makes entries of a directory durable: renamed or new ones survive a power cut.
void sync_directory(const std::string& directory);
/// Fills `into` from byte `offset` of the file. Throws InvalidInput when the file ends before that.
void read_at(int fd, const std::string& path, std::uint64_t offset, std::span<std::byte> into);

}  // namespace ddp
