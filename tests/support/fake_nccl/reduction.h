#pragma once

#include <cstddef>

#include "ddp/nccl/api.h"
#include "tests/support/fake_nccl/meeting.h"

namespace fake {

std::size_t bytes_of(ddp::nccl::Type type);

/// The ranks whose areas hold the inputs.
struct Ranks {
    const Meeting& meeting;
    int count;
};
/// out[i] = the reduction over all ranks of element first + i.
void reduce(const Ranks& ranks, ddp::nccl::Type type, std::size_t first, std::size_t count, ddp::nccl::Op op,
            void* out);

}  // namespace fake
