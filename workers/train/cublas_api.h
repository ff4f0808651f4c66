#pragma once

#include <string>

#include "ddp/cuda/cuda_api.h"
#include "ddp/cuda/shared_library.h"

/// The cuBLAS calls for matrix products, found at run time like NCCL, because the library is larger than all
/// of libddp. cublas_abi_check.cpp compares them with cublas_v2.h where that header exists. In cuBLAS's
/// terms: matrices are column-major, C = alpha op(A) op(B) + beta C.
namespace train::cublas {

struct HandleObject;
using Handle = HandleObject*;

enum class Code : int { Success = 0 };
enum class DataType : int { F32 = 0, F16 = 2, BF16 = 14 };
enum class ComputeType : int { F32 = 68, Tf32 = 77 };
enum class Operation : int { AsIs = 0, Transposed = 1 };
enum class MathMode : int { NoReducedPrecisionReduction = 16 };  ///< sums parts in float32
enum class Algorithm : int { Default = -1 };

struct Api {
    std::string library;
    Code (*create)(Handle* handle);
    Code (*destroy)(Handle handle);
    Code (*get_version)(Handle handle, int* version);
    Code (*set_stream)(Handle handle, ddp::cuda::Stream stream);
    Code (*set_workspace)(Handle handle, void* workspace, std::size_t bytes);
    Code (*set_math_mode)(Handle handle, MathMode mode);
    Code (*gemm)(Handle handle, Operation op_a, Operation op_b, int m, int n, int k, const void* alpha,
                 const void* a, DataType type_a, int lda, const void* b, DataType type_b, int ldb,
                 const void* beta, void* c, DataType type_c, int ldc, ComputeType compute,
                 Algorithm algorithm);
    const char* (*get_status_string)(Code code);

    /// Throws ddp::Error "<attempt>: <cuBLAS's explanation>" unless the code is Success.
    void check(Code code, const std::string& attempt) const;
};

/// Loads DDP_CUBLAS_LIBRARY, else libcublas.so.13, .12. Error: NotFound, Mismatch naming the missing entry
/// points.
ddprun::Result<Api> load_api();
ddprun::Result<Api> api_from(const ddp::SharedLibrary& library);

}  // namespace train::cublas
