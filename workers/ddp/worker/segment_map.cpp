#include "ddp/worker/segment_map.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "ddp/types.h"
#include "env/io/file.h"

namespace ddp {

using ddprun::RankLine;
using ddprun::SegmentHeader;
using ddprun::UniqueFd;

namespace {

[[noreturn]] void throw_system(const char* attempt) {
    throw Error(fmt::format("shared memory segment: {}: {}", attempt, std::strerror(errno)));
}

/// The bytes of the header and the rank lines.
std::uint64_t control_bytes(std::uint32_t local_world_size) {
    return ddprun::segment_scalars_offset(local_world_size);
}

/// `offset` begins a page, of up to 64 KiB.
void* map_shared(int fd, std::uint64_t offset, std::size_t bytes) {
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                           static_cast<off_t>(offset));
    if (address == MAP_FAILED) throw_system("mmap");
    return address;
}

}  // namespace

UniqueFd make_segment(const SegmentShape& shape) {
    UniqueFd fd(::memfd_create("ddp-segment", MFD_CLOEXEC));
    if (!fd) throw_system("memfd_create");
    const std::uint64_t arena = control_bytes(shape.local_world_size);
    const std::uint64_t arena_bytes = ddprun::room_in_memory_file(arena, shape.arena_bytes);
    if (const ddprun::Status sized = ddprun::resize_memory_file(fd.get(), arena + arena_bytes); !sized)
        throw Error(sized.error().what);

    const auto bytes = static_cast<std::size_t>(ddprun::kRankLinesOffset);
    void* page = map_shared(fd.get(), 0, bytes);
    auto* header = new (page) SegmentHeader{};
    header->version = ddprun::kSegmentVersion;
    header->local_world_size = shape.local_world_size;
    header->world_size = shape.world_size;
    header->first_rank = shape.first_rank;
    header->generation = shape.generation;
    header->arena_offset = arena;
    header->arena_bytes = arena_bytes;
    header->cpus = shape.cpus;
    header->magic.store(ddprun::kSegmentMagic, std::memory_order_release);
    ::munmap(page, bytes);
    return fd;
}

SegmentMap::SegmentMap(UniqueFd fd) : fd_(std::move(fd)) {
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0) throw_system("fstat");
    file_bytes_ = static_cast<std::uint64_t>(status.st_size);
    if (file_bytes_ < ddprun::kRankLinesOffset) {
        throw InvalidInput(fmt::format("descriptor {} is not a ddprun segment: it has only {} bytes",
                                       fd_.get(), file_bytes_));
    }
    header_ = reinterpret_cast<SegmentHeader*>(map(0, ddprun::kRankLinesOffset));
    try {
        check_header();
        // The rank lines follow the header page, which holds their number.
        const std::uint64_t bytes = control_bytes(header_->local_world_size) - ddprun::kRankLinesOffset;
        lines_ = reinterpret_cast<RankLine*>(map(ddprun::kRankLinesOffset, bytes));
    } catch (...) {
        for (const auto& [offset, piece] : pieces_) ::munmap(piece.address, piece.bytes);
        throw;
    }
}

SegmentMap::~SegmentMap() {
    for (const auto& [offset, piece] : pieces_) ::munmap(piece.address, piece.bytes);
}

void SegmentMap::check_header() const {
    const SegmentHeader& header = *header_;
    if (header.magic.load(std::memory_order_acquire) != ddprun::kSegmentMagic) {
        throw InvalidInput(fmt::format("descriptor {} is not a ddprun segment: wrong magic", fd_.get()));
    }
    if (header.version != ddprun::kSegmentVersion) {
        throw InvalidInput(
            fmt::format("the segment has layout version {}, this libddp knows {}: the launcher and "
                        "the worker are of different releases",
                        header.version, ddprun::kSegmentVersion));
    }
    const bool fits =
        header.local_world_size >= 1 && header.arena_offset >= control_bytes(header.local_world_size) &&
        header.arena_offset <= file_bytes_ && header.arena_bytes <= file_bytes_ - header.arena_offset;
    if (!fits) throw InvalidInput("the segment's header contradicts its size; it is damaged");
}

std::byte* SegmentMap::map(std::uint64_t offset, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    // A piece begins with the page of its first byte.
    const std::uint64_t before = offset % static_cast<std::uint64_t>(::getpagesize());
    // The latest mapping of an offset is the largest and comes first.
    if (const auto found = pieces_.lower_bound(offset);
        found != pieces_.end() && found->first == offset && found->second.bytes >= before + bytes) {
        return static_cast<std::byte*>(found->second.address) + before;
    }
    if (offset > file_bytes_ || bytes > file_bytes_ - offset) {
        throw Error(fmt::format("shared memory segment: {} bytes at {} lie outside of its {} bytes", bytes,
                                offset, file_bytes_));
    }
    const auto mapped = static_cast<std::size_t>(before + bytes);
    void* address = map_shared(fd_.get(), offset - before, mapped);
    // A smaller piece at the same offset may still be in use, so it stays mapped.
    pieces_.emplace_hint(pieces_.lower_bound(offset), offset, Piece{address, mapped});
    return static_cast<std::byte*>(address) + before;
}

bool SegmentMap::discard(std::uint64_t offset, std::uint64_t bytes) {
    return ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                       static_cast<off_t>(bytes)) == 0;
}

namespace {

/// A lock on the first byte of the rank's line. No process ever waits for one.
struct flock lock_of(std::uint32_t local_rank, int type) {
    struct flock lock {};
    lock.l_type = static_cast<short>(type);
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(ddprun::kRankLinesOffset + sizeof(RankLine) * local_rank);
    lock.l_len = 1;
    return lock;
}

}  // namespace

bool SegmentMap::mark_present(std::uint32_t local_rank) {
    const std::lock_guard guard(mutex_);
    // fd_ may be an open file description that all ranks inherited, and would share its locks.
    if (!marks_) marks_.reset(::open(fmt::format("/proc/self/fd/{}", fd_.get()).c_str(), O_RDWR | O_CLOEXEC));
    struct flock mark = lock_of(local_rank, F_RDLCK);
    return marks_ && ::fcntl(marks_.get(), F_OFD_SETLK, &mark) == 0;
}

bool SegmentMap::is_marked(std::uint32_t local_rank) const {
    struct flock found = lock_of(local_rank, F_WRLCK);
    return ::fcntl(fd_.get(), F_OFD_GETLK, &found) != 0 || found.l_type != F_UNLCK;
}

void populate(std::byte* address, std::size_t bytes) {
    ::madvise(address, bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
    ::madvise(address, bytes, MADV_POPULATE_WRITE);
#endif
}

}  // namespace ddp
