// Makes a test program see a kernel with pages of 64 KiB, as aarch64 and ppc64le have them: these definitions
// replace libc's in the program, and libddp calls them. sys/mman.h is not included, which renames mmap.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

constexpr std::size_t kPage = 65536;
constexpr int kNoAccess = 0, kFixed = 0x10, kAnonymousPrivate = 0x22;

void* call_mmap(void* at, std::size_t bytes, int protection, int flags, int fd, long offset) {
    return reinterpret_cast<void*>(::syscall(SYS_mmap, at, bytes, protection, flags, fd, offset));
}

void* map(void* at, std::size_t bytes, int protection, int flags, int fd, long offset) {
    if (static_cast<std::size_t>(offset) % kPage != 0 || (flags & kFixed) != 0) {
        errno = EINVAL;
        return reinterpret_cast<void*>(-1);
    }
    // Address space that begins at a page, in a piece that is longer by one.
    void* const room = call_mmap(at, bytes + kPage, kNoAccess, kAnonymousPrivate, -1, 0);
    const auto begin = (reinterpret_cast<std::uintptr_t>(room) + kPage - 1) / kPage * kPage;
    return call_mmap(reinterpret_cast<void*>(begin), bytes, protection, flags | kFixed, fd, offset);
}

}  // namespace

extern "C" {
void* mmap(void* at, std::size_t bytes, int protection, int flags, int fd, long offset) {
    return map(at, bytes, protection, flags, fd, offset);
}
void* mmap64(void* at, std::size_t bytes, int protection, int flags, int fd, long offset) {
    return map(at, bytes, protection, flags, fd, offset);
}
/// The kernel rounds the length up to whole pages.
int madvise(void* at, std::size_t bytes, int advice) {
    if (reinterpret_cast<std::uintptr_t>(at) % kPage != 0) {
        errno = EINVAL;
        return -1;
    }
    return static_cast<int>(::syscall(SYS_madvise, at, (bytes + kPage - 1) / kPage * kPage, advice));
}
int getpagesize() { return kPage; }
}
