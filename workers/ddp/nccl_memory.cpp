#include "ddp/nccl_memory.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddp::nccl {

DeviceMemory::DeviceMemory(const Api& nccl, const cuda::Api& cuda, std::size_t bytes)
    : nccl_(nccl), cuda_(cuda), bytes_(bytes) {
    from_nccl_ = nccl.mem_alloc != nullptr && nccl.mem_alloc(&address_, bytes) == Code::Success;
    if (from_nccl_) return;
    if (nccl.mem_alloc != nullptr) cuda.get_last_error();  // NCCL's, where it runs on the same runtime
    cuda.check(cuda.malloc(&address_, bytes),
               fmt::format("allocating {} on the device", ddprun::format_bytes(bytes)).c_str());
}

// Windows need the memory that only NCCL makes; of a mere allocation zero-copy transfers are all one can
// have.
Registration DeviceMemory::best_registration() const {
    if (from_nccl_ && nccl_.comm_window_register != nullptr) return Registration::Symmetric;
    return nccl_.comm_register != nullptr ? Registration::Plain : Registration::None;
}

DeviceMemory::~DeviceMemory() {
    from_nccl_ ? static_cast<void>(nccl_.mem_free(address_)) : static_cast<void>(cuda_.free(address_));
}

}  // namespace ddp::nccl
