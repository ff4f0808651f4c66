#pragma once

#include <memory>

#include "compute.h"
#include "cublas_api.h"
#include "ddp/cuda/gpu.h"

namespace train {

/// Computes on a CUDA device: products by cuBLAS, the rest by train_kernels.cu. All work is queued on
/// `stream`, which must outlive the compute. Throws ddp::Error.
std::unique_ptr<Compute> make_cuda_compute(std::shared_ptr<const ddp::cuda::Gpu> gpu,
                                           std::shared_ptr<const cublas::Api> cublas,
                                           ddp::cuda::Stream stream, Precision precision);

}  // namespace train
