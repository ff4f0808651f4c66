#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ddp/cuda_api.h"
#include "ddp/shared_library.h"

/// The few calls of cuBLASLt that products of matrices need, found at run time like CUDA itself.
/// cublaslt_abi_check.cpp compares them with cublasLt.h where that header is there. The library's own words:
/// matrices are column-major there, D = alpha op(A) op(B) + beta C.
namespace train::lt {

struct HandleObject;
struct MatmulDescObject;
struct LayoutObject;
struct PreferenceObject;
using Handle = HandleObject*;
using MatmulDesc = MatmulDescObject*;
using Layout = LayoutObject*;
using Preference = PreferenceObject*;

/// Those that we tell apart; there are others.
enum class Code : int {
    Success = 0,
    InvalidValue = 7,
    ArchMismatch = 8,
    InternalError = 14,
    NotSupported = 15
};
enum class DataType : int { F32 = 0, F16 = 2, BF16 = 14 };
enum class ComputeType : int { F32 = 68, Tf32 = 77 };
enum class Operation : int { None = 0, Transpose = 1 };
enum class Epilogue : int {
    None = 1,
    Bias = 4,
    ReluBias = 2 | 4,
    ReluAuxBias = 2 | 128 | 4,
    DRelu = 8 | 128,
    BgradB = 512
};
enum class MatmulAttribute : int {
    TransA = 3,
    TransB = 4,
    Epilogue = 7,
    BiasPointer = 8,
    AuxPointer = 11,
    AuxLd = 12
};
enum class PreferenceAttribute : int {
    MaxWorkspaceBytes = 1,
    ReductionSchemeMask = 3,
    MinAlignmentA = 5,
    MinAlignmentB = 6,
    MinAlignmentC = 7,
    MinAlignmentD = 8
};
/// Of the ReductionSchemeMask: sums over k are never split; pieces are added up in float32; anything goes.
inline constexpr std::uint32_t kNoReduction = 0, kFloat32Reduction = 2, kAnyReduction = 7;

struct Algorithm {
    std::uint64_t opaque[8];
};
struct Heuristic {
    Algorithm algorithm;
    std::size_t workspace_bytes;
    Code state;
    float waves;
    int reserved[4];
};

struct Api {
    std::string library;
    std::size_t (*get_version)();
    Code (*create)(Handle* handle);
    Code (*destroy)(Handle handle);
    Code (*matmul_desc_create)(MatmulDesc* desc, ComputeType compute, DataType scale);
    Code (*matmul_desc_destroy)(MatmulDesc desc);
    Code (*matmul_desc_set)(MatmulDesc desc, MatmulAttribute attribute, const void* value, std::size_t bytes);
    Code (*layout_create)(Layout* layout, DataType type, std::uint64_t rows, std::uint64_t columns,
                          std::int64_t leading);
    Code (*layout_destroy)(Layout layout);
    Code (*preference_create)(Preference* preference);
    Code (*preference_destroy)(Preference preference);
    Code (*preference_set)(Preference preference, PreferenceAttribute attribute, const void* value,
                           std::size_t bytes);
    Code (*get_heuristic)(Handle handle, MatmulDesc desc, Layout a, Layout b, Layout c, Layout d,
                          Preference preference, int wanted, Heuristic* results, int* found);
    Code (*matmul)(Handle handle, MatmulDesc desc, const void* alpha, const void* a, Layout a_layout,
                   const void* b, Layout b_layout, const void* beta, const void* c, Layout c_layout, void* d,
                   Layout d_layout, const Algorithm* algorithm, void* workspace, std::size_t workspace_bytes,
                   ddp::cuda::Stream stream);
    const char* (*get_status_string)(Code code);

    /// Throws ddp::Error "<attempt>: <cuBLASLt's explanation>" unless the code is Success.
    void check(Code code, const std::string& attempt) const;
    /// "13.1.0"
    [[nodiscard]] std::string version() const;
};

/// DDP_CUBLASLT_LIBRARY, else libcublasLt.so.13, .12. Error: NotFound, Mismatch naming what it lacks.
ddprun::Result<Api> load_api();
ddprun::Result<Api> api_from(const ddp::SharedLibrary& library);

}  // namespace train::lt
