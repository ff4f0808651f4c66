#include "ddp/kernels.h"

namespace ddp::cpu {

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> sets{&kernels_baseline};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) sets.push_back(&kernels_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        sets.push_back(&kernels_avx512);
    }
#endif
    return sets;
}

const Kernels& kernels() {
    static const Kernels& best = *supported_kernels().back();
    return best;
}

bool is_reducible(DType type, ReduceOp op) {
    return kernels_baseline.reduce[static_cast<std::size_t>(type)][static_cast<std::size_t>(op)] != nullptr;
}

}  // namespace ddp::cpu
