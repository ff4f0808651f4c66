#pragma once

#include "ddp/process_group.h"

namespace ddp::cuda {

/// Averages device memory over all ranks, in place, behind the group's stream; does not block. Symmetric
/// memory is divided first and summed (the fast kernels know sums only); for any other the group divides.
Work start_average(ProcessGroup& group, const Buffer& buffer);

/// The same through `compressed` (bfloat16, as many elements): float32 values are rounded into it and
/// averaged there. finish_compressed puts the result back.
Work start_compressed_average(ProcessGroup& group, const Buffer& buffer, const Buffer& compressed);
void finish_compressed(ProcessGroup& group, const Buffer& compressed, const Buffer& buffer);

}  // namespace ddp::cuda
