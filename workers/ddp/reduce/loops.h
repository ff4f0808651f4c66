#pragma once

#include "ddp/types.h"

namespace ddp {

/// Multiplies all elements in host memory. Throws InvalidInput for types that are not floating.
void scale_elements(const Buffer& buffer, double factor);

}  // namespace ddp
