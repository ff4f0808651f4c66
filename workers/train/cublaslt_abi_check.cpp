// Compiled where cublasLt.h is there; produces nothing but errors.
#include <cublasLt.h>

#include "cublaslt_api.h"
#include "ddp/abi_check.h"

namespace train::lt {

static_assert(static_cast<int>(Code::Success) == CUBLAS_STATUS_SUCCESS);
static_assert(static_cast<int>(Code::InvalidValue) == CUBLAS_STATUS_INVALID_VALUE);
static_assert(static_cast<int>(Code::ArchMismatch) == CUBLAS_STATUS_ARCH_MISMATCH);
static_assert(static_cast<int>(Code::InternalError) == CUBLAS_STATUS_INTERNAL_ERROR);
static_assert(static_cast<int>(Code::NotSupported) == CUBLAS_STATUS_NOT_SUPPORTED);
static_assert(static_cast<int>(DataType::F32) == CUDA_R_32F);
static_assert(static_cast<int>(DataType::F16) == CUDA_R_16F);
static_assert(static_cast<int>(DataType::BF16) == CUDA_R_16BF);
static_assert(static_cast<int>(ComputeType::F32) == CUBLAS_COMPUTE_32F);
static_assert(static_cast<int>(ComputeType::Tf32) == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(static_cast<int>(Operation::None) == CUBLAS_OP_N);
static_assert(static_cast<int>(Operation::Transpose) == CUBLAS_OP_T);
static_assert(static_cast<int>(Epilogue::None) == CUBLASLT_EPILOGUE_DEFAULT);
static_assert(static_cast<int>(Epilogue::Bias) == CUBLASLT_EPILOGUE_BIAS);
static_assert(static_cast<int>(Epilogue::ReluBias) == CUBLASLT_EPILOGUE_RELU_BIAS);
static_assert(static_cast<int>(Epilogue::ReluAuxBias) == CUBLASLT_EPILOGUE_RELU_AUX_BIAS);
static_assert(static_cast<int>(Epilogue::DRelu) == CUBLASLT_EPILOGUE_DRELU);
static_assert(static_cast<int>(Epilogue::BgradB) == CUBLASLT_EPILOGUE_BGRADB);
static_assert(static_cast<int>(MatmulAttribute::TransA) == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(static_cast<int>(MatmulAttribute::TransB) == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(static_cast<int>(MatmulAttribute::Epilogue) == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(static_cast<int>(MatmulAttribute::BiasPointer) == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(static_cast<int>(MatmulAttribute::AuxPointer) == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
static_assert(static_cast<int>(MatmulAttribute::AuxLd) == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
static_assert(static_cast<int>(PreferenceAttribute::MaxWorkspaceBytes) ==
              CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(static_cast<int>(PreferenceAttribute::ReductionSchemeMask) ==
              CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
static_assert(static_cast<int>(PreferenceAttribute::MinAlignmentA) ==
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(static_cast<int>(PreferenceAttribute::MinAlignmentB) ==
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(static_cast<int>(PreferenceAttribute::MinAlignmentC) ==
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(static_cast<int>(PreferenceAttribute::MinAlignmentD) ==
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(kNoReduction == CUBLASLT_REDUCTION_SCHEME_NONE);
static_assert(kFloat32Reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
static_assert(kAnyReduction == CUBLASLT_REDUCTION_SCHEME_MASK);
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(Heuristic, workspace_bytes) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Heuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));

#define SAME_CALL(ours, theirs) static_assert(ddp::same_call<decltype(Api::ours), decltype(&theirs)>)
SAME_CALL(get_version, cublasLtGetVersion);
SAME_CALL(create, cublasLtCreate);
SAME_CALL(destroy, cublasLtDestroy);
SAME_CALL(matmul_desc_create, cublasLtMatmulDescCreate);
SAME_CALL(matmul_desc_destroy, cublasLtMatmulDescDestroy);
SAME_CALL(matmul_desc_set, cublasLtMatmulDescSetAttribute);
SAME_CALL(layout_create, cublasLtMatrixLayoutCreate);
SAME_CALL(layout_destroy, cublasLtMatrixLayoutDestroy);
SAME_CALL(preference_create, cublasLtMatmulPreferenceCreate);
SAME_CALL(preference_destroy, cublasLtMatmulPreferenceDestroy);
SAME_CALL(preference_set, cublasLtMatmulPreferenceSetAttribute);
SAME_CALL(get_heuristic, cublasLtMatmulAlgoGetHeuristic);
SAME_CALL(matmul, cublasLtMatmul);
SAME_CALL(get_status_string, cublasLtGetStatusString);

}  // namespace train::lt
