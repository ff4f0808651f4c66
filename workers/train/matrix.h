#pragma once

#include <cstddef>

/// Products of dense row-major float matrices: by CBLAS where the build has it, by plain loops otherwise.
/// c is overwritten and must not overlap a or b.
namespace train {

/// c[m,n] = a[m,k] b[k,n]
void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c);
/// c[m,n] = a[m,k] b[n,k]^T
void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c);
/// c[m,n] = a[k,m]^T b[k,n]
void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c);

/// Threads of the products above. A rank that shares its cores with others must not start one per core.
void set_matrix_threads(int threads);
/// "OpenBLAS" or "plain loops".
const char* matrix_library();

/// The loops, whatever the build has: what the tests compare with.
namespace plain {
void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c);
void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c);
void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c);
}  // namespace plain

}  // namespace train
