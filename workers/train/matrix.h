#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "compute.h"

/// Products of dense row-major float matrices: by CBLAS where the build has it, by plain loops otherwise.
/// c is overwritten, or added to, and must not overlap a or b.
namespace train {

/// c[m,n] = a[m,k] b[k,n]
void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c);
/// c[m,n] = a[m,k] b[n,k]^T
void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c);
/// c[m,n] = a[k,m]^T b[k,n]
void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c, Into into);

/// Threads of the products above. A rank that shares its cores with others must not start one per core.
void set_matrix_threads(int threads);
/// Why the products could not be had with so many threads under the limits on this process's address space,
/// and what to do; "" where they can. Then what they need has been taken already. To be asked before anything
/// else: OpenBLAS does not fail where it gets no memory, it tries for ever.
std::string take_matrix_memory(int threads);
/// The same as a decision. `limit`: bytes of the address space, or of its data; `called` as in "ulimit -v".
std::string lack_of_matrix_memory(std::uint64_t limit, std::string_view called, int threads);
/// "OpenBLAS" or "plain loops".
const char* matrix_library();

/// The loops, whatever the build has: what the tests compare with.
namespace plain {
void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c);
void multiply_transposed_b(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c);
void multiply_transposed_a(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                           float* c, Into into);
}  // namespace plain

}  // namespace train
