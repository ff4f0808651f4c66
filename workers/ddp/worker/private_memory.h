#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace ddp {

/// Zeroed host memory of this process, aligned to a cache line.
inline std::shared_ptr<std::byte> private_memory(std::size_t bytes) {
    constexpr std::align_val_t kLine{64};
    return {new (kLine) std::byte[bytes]{}, [](std::byte* all) { ::operator delete[](all, kLine); }};
}

}  // namespace ddp
