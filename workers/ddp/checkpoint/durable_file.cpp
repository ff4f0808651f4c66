#include "ddp/checkpoint/durable_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "ddp/types.h"

namespace ddp {
namespace {

[[noreturn]] void fail(const std::string& path, const char* attempt) {
    throw FileError(fmt::format("{}: {}: {}", path, attempt, std::strerror(errno)));
}

/// Some kernels refuse single transfers of 2 GiB and more.
constexpr std::size_t kTransferLimit = std::size_t{1} << 30;

}  // namespace

DurableFile::DurableFile(std::string path)
    : path_(std::move(path)),
      fd_(::open(unfinished(path_).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (!fd_) fail(path_, "create");
}

DurableFile::~DurableFile() {
    if (!committed_) ::unlink(unfinished(path_).c_str());
}

void DurableFile::write(const void* bytes, std::size_t count) {
    const auto* next = static_cast<const char*>(bytes);
    while (count > 0) {
        const ssize_t n = ::write(fd_.get(), next, std::min(count, kTransferLimit));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(path_, "write");
        next += n;
        count -= static_cast<std::size_t>(n);
    }
}

void DurableFile::commit() {
    if (::fsync(fd_.get()) != 0) fail(path_, "fsync");
    // close reports delayed write errors on network file systems.
    if (::close(fd_.release()) != 0) fail(path_, "close");
    if (::rename(unfinished(path_).c_str(), path_.c_str()) != 0) fail(path_, "rename");
    committed_ = true;
}

std::string DurableFile::unfinished(const std::string& path) { return path + ".part"; }

void replace_file(const std::string& path, std::string_view content) {
    DurableFile file(path);
    file.write(content.data(), content.size());
    file.commit();
    const std::string parent = std::filesystem::path(path).parent_path();
    sync_directory(parent.empty() ? "." : parent);
}

void sync_directory(const std::string& directory) {
    const ddprun::UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd) fail(directory, "open");
    // Some file systems cannot sync a directory and return EINVAL, which has no remedy; ignoring it.
    if (::fsync(fd.get()) != 0 && errno != EINVAL) fail(directory, "fsync");
}

void read_at(int fd, const std::string& path, std::uint64_t offset, std::span<std::byte> into) {
    while (!into.empty()) {
        const ssize_t n =
            ::pread(fd, into.data(), std::min(into.size(), kTransferLimit), static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(path, "read");
        if (n == 0) throw InvalidInput(fmt::format("{}: truncated: it ends at byte {}", path, offset));
        into = into.subspan(static_cast<std::size_t>(n));
        offset += static_cast<std::uint64_t>(n);
    }
}

}  // namespace ddp
