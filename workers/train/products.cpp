#include "products.h"

#include <fmt/core.h>

#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/types.h"

namespace train {
namespace {

/// The workspace that cuBLAS uses on the newest chips; with it cuBLAS allocates nothing in a captured step.
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

cublas::DataType type_of(Precision precision) {
    switch (precision) {
        case Precision::Bf16: return cublas::DataType::BF16;
        case Precision::Fp16: return cublas::DataType::F16;
        case Precision::Fp32:
        case Precision::Tf32: break;
    }
    return cublas::DataType::F32;
}

}  // namespace

Products::Products(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const cublas::Api> api,
                   ddp::cuda::Stream stream, Precision precision)
    : gpu_(std::move(gpu)),
      api_(std::move(api)),
      stream_(stream),
      precision_(precision),
      workspace_(gpu_, kWorkspaceBytes) {
    api_->check(api_->create(&handle_), "starting cuBLAS");
    api_->check(api_->set_stream(handle_, stream), "giving cuBLAS its stream");
    // After set_stream, which resets the workspace.
    api_->check(api_->set_workspace(handle_, workspace_.get(), workspace_.bytes()),
                "giving cuBLAS its workspace");
    api_->check(api_->set_math_mode(handle_, cublas::MathMode::NoReducedPrecisionReduction),
                "telling cuBLAS how to add");
}

Products::~Products() { api_->destroy(handle_); }

void Products::multiply(const Matrix& to, const Matrix& left, Operation op_left, const Matrix& right,
                        Operation op_right, Into into) const {
    const float one = 1, keep = into == Into::Add ? 1 : 0;
    const auto type = type_of(precision_);
    const auto compute = precision_ == Precision::Tf32 ? cublas::ComputeType::Tf32 : cublas::ComputeType::F32;
    const auto size = [](std::size_t number) { return static_cast<int>(number); };
    const std::size_t inner = op_left == Operation::AsIs ? left.columns : left.rows;
    // cuBLAS sees a row-major matrix as its transpose, so compute to^T = right^T left^T.
    const cublas::Code code =
        api_->gemm(handle_, op_right, op_left, size(to.columns), size(to.rows), size(inner), &one, right.data,
                   type, size(right.stride), left.data, type, size(left.stride), &keep, to.data, type,
                   size(to.stride), compute, cublas::Algorithm::Default);
    if (code != cublas::Code::Success)
        throw_error(code, fmt::format("a {} product of {} x {} x {} on CUDA device {}", name_of(precision_),
                                      to.columns, to.rows, inner, gpu_->index()));
}

void Products::throw_error(cublas::Code code, const std::string& product) const {
    // On a failed device the library refuses every call: then this reports the failure, and throws.
    if (!ddp::cuda::is_capturing(stream_)) ddp::cuda::synchronize(stream_);
    throw ddp::Error(
        fmt::format("{} did not start {}: {}", api_->library, product, api_->get_status_string(code)));
}

std::string Products::version() const {
    int number = 0;
    api_->check(api_->get_version(handle_, &number), "asking cuBLAS for its version");
    // Both 120905 and 130100 occur: the last two numbers have two digits each.
    return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

}  // namespace train
