// Compiled where cublas_v2.h exists; its only result are errors.
#include <cublas_v2.h>

#include "cublas_api.h"
#include "ddp/cuda/abi_check.h"

namespace train::cublas {

static_assert(static_cast<int>(Code::Success) == CUBLAS_STATUS_SUCCESS);
static_assert(static_cast<int>(DataType::F32) == CUDA_R_32F);
static_assert(static_cast<int>(DataType::F16) == CUDA_R_16F);
static_assert(static_cast<int>(DataType::BF16) == CUDA_R_16BF);
static_assert(static_cast<int>(ComputeType::F32) == CUBLAS_COMPUTE_32F);
static_assert(static_cast<int>(ComputeType::Tf32) == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(static_cast<int>(Operation::AsIs) == CUBLAS_OP_N);
static_assert(static_cast<int>(Operation::Transposed) == CUBLAS_OP_T);
static_assert(static_cast<int>(MathMode::NoReducedPrecisionReduction) ==
              CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
static_assert(static_cast<int>(Algorithm::Default) == CUBLAS_GEMM_DEFAULT);

// cublas_v2.h maps plain names to the second interface, whose functions end with _v2 in the library.
#define SAME_CALL(ours, theirs) static_assert(ddp::same_call<decltype(Api::ours), decltype(&theirs)>)
SAME_CALL(create, cublasCreate_v2);
SAME_CALL(destroy, cublasDestroy_v2);
SAME_CALL(get_version, cublasGetVersion_v2);
SAME_CALL(set_stream, cublasSetStream_v2);
SAME_CALL(set_workspace, cublasSetWorkspace_v2);
SAME_CALL(set_math_mode, cublasSetMathMode);
SAME_CALL(get_status_string, cublasGetStatusString);
// In C++ the header also declares an older function of that name.
using Gemm = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                const void*, const void*, cudaDataType, int, const void*, cudaDataType, int,
                                const void*, void*, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);
static_assert(ddp::same_call<decltype(Api::gemm), decltype(static_cast<Gemm>(&cublasGemmEx))>);

}  // namespace train::cublas
