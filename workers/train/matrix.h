#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "compute.h"

/// Products of dense row-major float matrices: by CBLAS where the build has it, by plain loops otherwise.
namespace train {

/// The factor of a product a b that lies transposed in memory.
enum class Transposed : std::uint8_t { None, A, B };
/// c[m,n] = a[m,k] b[k,n], or c += a b. A transposed factor lies in memory as [k,m], or as [n,k]. c must not
/// overlap a or b.
void multiply(Transposed which, std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
              float* c, Into into = Into::Replace);

/// Sets the threads of the products. A rank that shares its cores with others must not start one per core.
void set_matrix_threads(int threads);
/// The reason, with the remedy, why `threads` threads cannot get memory under the limits on this process's
/// address space; "" when they can, and then their memory is allocated already. Call it first: without memory
/// OpenBLAS does not fail but retries for ever.
std::string reserve_matrix_memory(int threads);
/// The decision of reserve_matrix_memory. `limit`: bytes of address space or data; `called` as in "ulimit
/// -v".
std::string matrix_memory_shortage(std::uint64_t limit, std::string_view called, int threads);
/// "OpenBLAS" or "plain loops".
const char* matrix_library();

/// The plain loops, in every build, as the reference of tests.
namespace plain {
void multiply(Transposed which, std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
              float* c, Into into = Into::Replace);
}  // namespace plain

}  // namespace train
