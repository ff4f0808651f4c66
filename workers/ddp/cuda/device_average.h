#pragma once

#include "ddp/process_group.h"

namespace ddp::cuda {

/// Averages device memory over all ranks, in place, on the group's stream; does not block. Symmetric memory
/// is divided first and summed (the fast kernels only sum); other memory is divided by the group.
Work start_average(ProcessGroup& group, const Buffer& buffer);

/// Averages float32 values through `compressed` (bfloat16, as many elements): the values are rounded into it
/// and averaged there. finish_compressed puts the result back.
Work start_compressed_average(ProcessGroup& group, const Buffer& buffer, const Buffer& compressed);
void finish_compressed(ProcessGroup& group, const Buffer& compressed, const Buffer& buffer);

}  // namespace ddp::cuda
