#pragma once

#include <memory>

#include "compute.h"
#include "cublaslt_api.h"
#include "ddp/cuda/gpu.h"

namespace train {

struct CudaOptions {
    Precision precision = Precision::Fp32;
    bool deterministic = false;
    /// False: products alone by cuBLASLt, as where it lacks every epilogue. For tests.
    bool epilogues = true;
    /// A rehearsal takes the fastest of cuBLASLt's algorithms, and of product with epilogue and product with
    /// a kernel. Other bits may come out in another run: never with `deterministic`.
    bool tune = false;
};

/// A CUDA device: products by cuBLASLt with bias, ReLU and their gradients in the same pass where it can, the
/// rest by train_kernels.cpp. Everything is queued on `stream`, which must outlive it. Throws ddp::Error.
std::unique_ptr<Compute> make_cuda_compute(std::shared_ptr<const ddp::cuda::Gpu> gpu,
                                           std::shared_ptr<const lt::Api> cublaslt, ddp::cuda::Stream stream,
                                           CudaOptions options);

}  // namespace train
