#include "matrix.h"

#include <algorithm>
#include <array>

#ifdef TRAIN_HAVE_CBLAS
#include <cblas.h>
#endif

namespace train {
namespace plain {
namespace {

void add_scaled(float* __restrict__ to, const float* __restrict__ from, float factor, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

/// Independent partial sums: the compiler may not reorder one sum, so one sum would not be vectorised.
float dot(const float* __restrict__ a, const float* __restrict__ b, std::size_t count) {
    constexpr std::size_t kLanes = 16;
    std::array<float, kLanes> sums = {};
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    float sum = 0;
    for (; i < count; ++i) sum += a[i] * b[i];
    for (const float partial : sums) sum += partial;
    return sum;
}

}  // namespace

void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c) {
    std::fill_n(c, m * n, 0.0F);
    for (std::size_t i = 0; i < m; ++i)
        for (std::size_t p = 0; p < k; ++p) add_scaled(c + i * n, b + p * n, a[i * k + p], n);
}

void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c) {
    for (std::size_t i = 0; i < m; ++i)
        for (std::size_t j = 0; j < n; ++j) c[i * n + j] = dot(a + i * k, b + j * k, k);
}

void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c) {
    std::fill_n(c, m * n, 0.0F);
    for (std::size_t p = 0; p < k; ++p)
        for (std::size_t i = 0; i < m; ++i) add_scaled(c + i * n, b + p * n, a[p * m + i], n);
}

}  // namespace plain

#ifdef TRAIN_HAVE_CBLAS

namespace {

/// The step from one row to the next; CBLAS refuses 0 for an empty matrix.
blasint stride(std::size_t columns) { return static_cast<blasint>(std::max<std::size_t>(columns, 1)); }

}  // namespace

void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(m), static_cast<blasint>(n),
                static_cast<blasint>(k), 1, a, stride(k), b, stride(n), 0, c, stride(n));
}

void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(m), static_cast<blasint>(n),
                static_cast<blasint>(k), 1, a, stride(k), b, stride(k), 0, c, stride(n));
}

void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, static_cast<blasint>(m), static_cast<blasint>(n),
                static_cast<blasint>(k), 1, a, stride(m), b, stride(n), 0, c, stride(n));
}

void set_matrix_threads(int threads) { openblas_set_num_threads(threads); }
const char* matrix_library() { return "OpenBLAS"; }

#else

void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c) {
    plain::multiply(m, n, k, a, b, c);
}
void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c) {
    plain::multiply_transposed_b(m, n, k, a, b, c);
}
void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c) {
    plain::multiply_transposed_a(m, n, k, a, b, c);
}
void set_matrix_threads(int /*threads*/) {}
const char* matrix_library() { return "plain loops"; }

#endif

}  // namespace train
