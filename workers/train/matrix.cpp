#include "matrix.h"

#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <vector>

#include "ddp/reduce/loops.h"
#include "env/text.h"

#ifdef TRAIN_HAVE_CBLAS
#include <cblas.h>
#endif

namespace train {

void plain::multiply(Transposed which, std::size_t m, std::size_t n, std::size_t k, const float* a,
                     const float* b, float* c, Into into) {
    if (into == Into::Replace) std::fill_n(c, m * n, 0.0F);
    for (std::size_t i = 0; i < m; ++i) {
        float* const row = c + i * n;
        if (which == Transposed::B) {
            for (std::size_t j = 0; j < n; ++j) row[j] += ddp::dot(a + i * k, b + j * k, k);
            continue;
        }
        for (std::size_t p = 0; p < k; ++p)
            ddp::add_scaled(row, b + p * n, which == Transposed::A ? a[p * m + i] : a[i * k + p], n);
    }
}

std::string matrix_memory_shortage(std::uint64_t limit, std::string_view called, int threads) {
    // Each thread needs one buffer of 128 MiB, its stack and heap; kProgram is the rest, as measured.
    constexpr std::uint64_t kProgram = std::uint64_t{64} << 20, kThread = std::uint64_t{192} << 20;
    const std::uint64_t needed = kProgram + kThread * static_cast<std::uint64_t>(threads);
    if (limit >= needed) return "";
    return fmt::format("{} allows {}, and OpenBLAS with {} thread{} needs {}: raise it{}", called,
                       ddprun::format_bytes(limit), threads, threads == 1 ? "" : "s",
                       ddprun::format_bytes(needed), threads == 1 ? "" : ", or set OMP_NUM_THREADS=1");
}

#ifdef TRAIN_HAVE_CBLAS

namespace {

/// A product large enough for OpenBLAS to allocate its buffer, which it keeps.
void multiply_once() {
    constexpr std::size_t kSide = 128;
    const std::vector<float> ones(kSide * kSide, 1.0F);
    std::vector<float> product(kSide * kSide);
    multiply(Transposed::None, kSide, kSide, kSide, ones.data(), ones.data(), product.data());
}

/// The row stride; CBLAS refuses 0 for an empty matrix.
blasint stride(std::size_t columns) { return static_cast<blasint>(std::max<std::size_t>(columns, 1)); }

}  // namespace

void multiply(Transposed which, std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
              float* c, Into into) {
    const bool is_a = which == Transposed::A, is_b = which == Transposed::B;
    cblas_sgemm(CblasRowMajor, is_a ? CblasTrans : CblasNoTrans, is_b ? CblasTrans : CblasNoTrans,
                static_cast<blasint>(m), static_cast<blasint>(n), static_cast<blasint>(k), 1, a,
                stride(is_a ? m : k), b, stride(is_b ? k : n), into == Into::Add ? 1 : 0, c, stride(n));
}

void set_matrix_threads(int threads) { openblas_set_num_threads(threads); }
std::string reserve_matrix_memory(int threads) {
    // The threads that OpenBLAS started before main have their buffers, or try to get them.
    const int most = std::max(threads, openblas_get_num_threads());
    bool limited = false;
    for (const auto& [resource, called] :
         {std::pair{RLIMIT_AS, "ulimit -v"}, std::pair{RLIMIT_DATA, "ulimit -d"}}) {
        rlimit limit{};
        if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
        limited = true;
        if (std::string lack = matrix_memory_shortage(limit.rlim_cur, called, most); !lack.empty())
            return lack;
    }
    if (limited) multiply_once();
    return "";
}
const char* matrix_library() { return "OpenBLAS"; }

#else

void multiply(Transposed which, std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
              float* c, Into into) {
    plain::multiply(which, m, n, k, a, b, c, into);
}
void set_matrix_threads(int /*threads*/) {}
std::string reserve_matrix_memory(int /*threads*/) { return ""; }
const char* matrix_library() { return "plain loops"; }

#endif

}  // namespace train
