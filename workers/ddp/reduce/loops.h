#pragma once

#include "ddp/types.h"

namespace ddp {

/// Multiplies all elements in host memory by `factor`. Throws InvalidInput for integer types.
void scale_elements(const Buffer& buffer, double factor);

}  // namespace ddp
