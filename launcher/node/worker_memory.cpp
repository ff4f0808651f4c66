#include "launcher/node/worker_memory.h"

#include <fmt/core.h>
#include <linux/membarrier.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {

namespace {

/// Makes every running thread of this host pass a full memory barrier, so that the workers need none (in
/// Python they can have none). Kernels without it (a nohz_full host, a seccomp filter) leave the processors
/// to empty their store buffers by themselves, which takes far less than a microsecond; wait 10 ms.
void fence_all_processes() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (::syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0) return;
    const timespec span{0, 10'000'000};
    ::nanosleep(&span, nullptr);
}

}  // namespace

Result<std::unique_ptr<SegmentFile>> SegmentFile::create(os::System& system, const SegmentShape& shape) {
    const auto local_size = static_cast<std::uint32_t>(shape.local_world_size);
    // Without room for scalars (ulimit -f) there is none for collectives, but programs may need neither.
    const std::uint64_t scalars = segment_scalars_offset(local_size),
                        rings = segment_arena_offset(local_size) - scalars;
    const bool has_scalars = room_in_memory_file(scalars, rings) == rings;
    const std::uint64_t arena = has_scalars ? scalars + rings : scalars;
    const std::uint64_t arena_bytes = room_in_memory_file(arena, kArenaBytes);
    Result<UniqueFd> fd = system.make_segment(arena + arena_bytes);
    if (!fd) return fd.error();
    void* base = ::mmap(nullptr, arena, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
    if (base == MAP_FAILED) return Error::system("mmap the shared segment");

    auto* header = new (base) SegmentHeader{};
    header->version = kSegmentVersion;
    header->local_world_size = local_size;
    header->world_size = static_cast<std::uint32_t>(shape.world_size);
    header->first_rank = static_cast<std::uint32_t>(shape.first_rank);
    header->generation = shape.generation;
    header->scalars_offset = has_scalars ? scalars : 0;
    header->arena_offset = arena;
    header->arena_bytes = arena_bytes;
    header->cpus = static_cast<std::uint32_t>(shape.cpus);
    header->magic.store(kSegmentMagic, std::memory_order_release);
    return std::unique_ptr<SegmentFile>(
        new SegmentFile(std::move(*fd), base, arena, shape.local_world_size, has_scalars ? scalars : 0));
}

SegmentFile::~SegmentFile() { ::munmap(base_, bytes_); }

void SegmentFile::abort(int rank) {
    std::uint32_t none = 0;
    header().aborted.compare_exchange_strong(none, static_cast<std::uint32_t>(rank) + 1);
}

void SegmentFile::propose_stop(std::uint64_t step, const std::string& why) {
    char* const reason = header().stop_reason;
    reason[why.copy(reason, sizeof(header().stop_reason) - 1)] = '\0';
    for (int i = 0; i < size(); ++i) line(i).stop.store(stop_word(step, false), std::memory_order_release);
    fence_all_processes();
}

void SegmentFile::decide_stop(std::uint64_t step) {
    for (int i = 0; i < size(); ++i) {
        std::atomic<std::uint64_t>& stop = line(i).stop;
        if (step > 0) stop.store(stop_word(step, true), std::memory_order_release);
        else if (!stop_is_agreed(stop.load(std::memory_order_relaxed)))
            stop.store(0, std::memory_order_release);
    }
}

RankLine& SegmentFile::line(int local_rank) {
    return reinterpret_cast<RankLine*>(static_cast<char*>(base_) + kRankLinesOffset)[local_rank];
}

const RankLine& SegmentFile::line(int local_rank) const {
    return const_cast<SegmentFile*>(this)->line(local_rank);
}

ScalarRing* SegmentFile::scalars(int local_rank) {
    if (scalars_offset_ == 0) return nullptr;
    return reinterpret_cast<ScalarRing*>(static_cast<char*>(base_) + scalars_offset_) + local_rank;
}

std::string describe_line(const RankLine& line) {
    const std::uint64_t started = line.started_seq.load(std::memory_order_acquire);
    const std::uint64_t finished = line.finished_seq.load(std::memory_order_acquire);
    if (started == 0) return {};
    const char* operation =
        segment_op_name(static_cast<SegmentOp>(line.operation.load(std::memory_order_relaxed)));
    if (started == finished) return fmt::format("finished {} #{}", operation, finished);
    return fmt::format("in {} #{} ({})", operation, started,
                       format_bytes(line.bytes.load(std::memory_order_relaxed)));
}

Result<std::unique_ptr<KeptFile>> KeptFile::create(os::System& system, int workers, Duration wait) {
    const auto count = static_cast<std::uint32_t>(workers);
    const std::uint64_t slots = kept_slots_offset(count), wanted = kKeptSlots * count * kKeptSlotBytes;
    const std::uint64_t slot_bytes = room_in_memory_file(slots, wanted) == wanted ? kKeptSlotBytes : 0;
    Result<UniqueFd> fd = system.make_segment(slots + kKeptSlots * count * slot_bytes);
    if (!fd) return fd.error();
    void* base = ::mmap(nullptr, slots, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
    if (base == MAP_FAILED) return Error::system("mmap the kept memory");

    auto* header = new (base) KeptHeader{};
    header->version = kKeptVersion;
    header->workers = count;
    header->wait_ns = wait.count();
    header->slots_offset = slots;
    header->slot_bytes = slot_bytes;
    header->magic.store(kKeptMagic, std::memory_order_release);
    return std::unique_ptr<KeptFile>(new KeptFile(std::move(*fd), base, slots));
}

KeptFile::~KeptFile() { ::munmap(base_, bytes_); }

const KeptLine& KeptFile::line(int local_rank) const {
    return reinterpret_cast<const KeptLine*>(static_cast<const char*>(base_) + kKeptLinesOffset)[local_rank];
}

std::int64_t KeptFile::commits(int local_rank) const {
    if (line(local_rank).generation.load(std::memory_order_acquire) == 0) return -1;
    return static_cast<std::int64_t>(line(local_rank).commits.load(std::memory_order_relaxed));
}

Duration KeptFile::useful(int local_rank) const {
    return Duration(line(local_rank).useful_ns.load(std::memory_order_relaxed));
}

}  // namespace ddprun
