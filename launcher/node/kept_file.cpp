#include "launcher/node/kept_file.h"

#include <sys/mman.h>

#include <new>

#include "env/io/file.h"

namespace ddprun {

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
