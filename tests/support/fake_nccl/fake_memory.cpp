#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>

#include "tests/support/fake_nccl/fake_cuda.h"

namespace fake {

namespace {

/// Allocated and registered memory, by address.
struct Allocations {
    struct Piece {
        std::size_t bytes;
        Memory kind;
    };
    std::mutex mutex;
    std::map<std::uintptr_t, Piece> pieces;

    /// True if registered memory has a byte of [begin, end).
    bool has_registered(std::uintptr_t begin, std::uintptr_t end) const {
        return std::any_of(pieces.begin(), pieces.end(), [&](const auto& one) {
            return one.second.kind == Memory::Registered && one.first < end &&
                   one.first + one.second.bytes > begin;
        });
    }
    /// True if the address was known as memory of that kind.
    bool erase(void* address, Memory kind) {
        const auto found = pieces.find(reinterpret_cast<std::uintptr_t>(address));
        if (found == pieces.end() || found->second.kind != kind) return false;
        pieces.erase(found);
        return true;
    }
};
Allocations& allocations() {
    static auto* const all = new Allocations;
    return *all;
}

}  // namespace

void* allocate(std::size_t bytes, Memory kind) {
    constexpr std::size_t kAlignment = 256;
    void* const address = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
    if (address == nullptr) return nullptr;
    const std::lock_guard lock(allocations().mutex);
    allocations().pieces[reinterpret_cast<std::uintptr_t>(address)] = {std::max<std::size_t>(bytes, 1), kind};
    return address;
}

void release(void* address) {
    {
        const std::lock_guard lock(allocations().mutex);
        allocations().pieces.erase(reinterpret_cast<std::uintptr_t>(address));
    }
    std::free(address);
}

bool release_when_idle(void* address, Memory kind) {
    {
        const std::lock_guard lock(allocations().mutex);
        if (!allocations().erase(address, kind)) return false;
    }
    const std::shared_ptr<void> last_reference(address, std::free);
    for (const auto& stream : all_streams()) stream->post_now([last_reference] {});
    return true;
}

int lock_pages(void* address, std::size_t bytes) {
    constexpr std::uintptr_t kPage = 4096;
    if (address == nullptr || bytes == 0) return kInvalidValue;
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(allocations().mutex);
    // Registration covers whole pages, each at most once.
    if (allocations().has_registered(begin / kPage * kPage, (begin + bytes + kPage - 1) / kPage * kPage))
        return kHostMemoryAlreadyRegistered;
    allocations().pieces[begin] = {bytes, Memory::Registered};
    return 0;
}

int unlock_pages(void* address) {
    const std::lock_guard lock(allocations().mutex);
    return allocations().erase(address, Memory::Registered) ? 0 : kHostMemoryNotRegistered;
}

std::optional<Memory> kind_of(const void* address) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(allocations().mutex);
    const auto next = allocations().pieces.upper_bound(at);
    if (next == allocations().pieces.begin()) return std::nullopt;
    const auto& [begin, piece] = *std::prev(next);
    return at < begin + piece.bytes ? std::optional(piece.kind) : std::nullopt;
}

}  // namespace fake
