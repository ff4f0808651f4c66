#pragma once

#include <memory>
#include <string>

#include "compute.h"
#include "cublas_api.h"
#include "ddp/cuda/memory.h"

namespace train {

using cublas::Operation;

/// Products of row-major matrices by cuBLAS, on one stream. They have the same bits in every run on the same
/// device and library, as cuBLAS promises for a handle used by one stream. Not thread-safe.
class Products {
  public:
    /// The device must be current. Throws ddp::Error.
    Products(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const cublas::Api> api,
             ddp::cuda::Stream stream, Precision precision);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    /// Queues to = left right, or to += left right, with each operand as it is or transposed. `to` overlaps
    /// neither, and no size is 0. Throws ddp::Error.
    void multiply(const Matrix& to, const Matrix& left, Operation op_left, const Matrix& right,
                  Operation op_right, Into into = Into::Replace) const;
    /// "13.1.0"
    [[nodiscard]] std::string version() const;

  private:
    [[noreturn]] void throw_error(cublas::Code code, const std::string& product) const;

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    std::shared_ptr<const cublas::Api> api_;
    ddp::cuda::Stream stream_;
    Precision precision_;
    ddp::cuda::DeviceMemory workspace_;
    cublas::Handle handle_ = nullptr;
};

}  // namespace train
