#pragma once

#include <cstddef>
#include <vector>

#include "ddp/types.h"

namespace ddp::cpu {

/// out[i] = sources[0][i] op sources[1][i] op ... in that order, n elements. `out` may be one of the sources;
/// any other overlap is an error. No alignment needed. bf16 and f16 accumulate in float and round once, to
/// nearest even. A NaN in any source gives a NaN. Avg divides the sum by `count`.
using ReduceFunction = void (*)(void* out, const void* const* sources, int count, std::size_t n);

/// The inner loops for one instruction set. All sets give the same bits.
struct Kernels {
    const char* name;
    ReduceFunction reduce[kDTypes][5];  ///< by DType and ReduceOp; null unless is_reducible
    /// By DType, null except for bf16 and f16: reductions into float32, for sums that continue elsewhere, and
    /// the rounding of the result.
    struct Wide {
        ReduceFunction sum, product;
        void (*round)(void* to, const float* from, std::size_t n);
    } wide[kDTypes];
    /// By DType, null for integers: divides n values in place.
    void (*divide[kDTypes])(void* values, int by, std::size_t n);
    /// Copies around the caches, for data that another core reads. Call fence() before telling that core.
    void (*stream)(void* to, const void* from, std::size_t bytes);
    void (*fence)();
};

/// The best set for this CPU.
const Kernels& kernels();
std::vector<const Kernels*> supported_kernels();

}  // namespace ddp::cpu
