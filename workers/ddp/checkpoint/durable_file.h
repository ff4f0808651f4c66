#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "env/unique_fd.h"

namespace ddp {

/// A file that gets its name, and replaces an older one of that name, once it is whole and on the disk;
/// without commit() it is removed. Blocking. Every failure throws FileError: "<path>: <attempt>: <cause>".
class DurableFile {
  public:
    /// Creates the file under the name unfinished(path).
    explicit DurableFile(std::string path);
    ~DurableFile();
    DurableFile(const DurableFile&) = delete;
    DurableFile& operator=(const DurableFile&) = delete;

    void write(const void* bytes, std::size_t count);
    /// The name survives a power cut after sync_directory().
    void commit();
    /// Its name before it is committed.
    static std::string unfinished(const std::string& path);
    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    std::string path_;
    ddprun::UniqueFd fd_;
    bool committed_ = false;
};

/// Replaces (or makes) `path` in one step, on the disk when it returns.
void replace_file(const std::string& path, std::string_view content);
/// Makes entries of a directory durable: renamed or new ones survive a power cut.
void sync_directory(const std::string& directory);
/// Fills `into` from byte `offset` of the file. Throws InvalidInput when the file ends before that.
void read_at(int fd, const std::string& path, std::uint64_t offset, std::span<std::byte> into);

}  // namespace ddp
