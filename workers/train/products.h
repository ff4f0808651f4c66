#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "cublaslt_api.h"
#include "ddp/cuda/memory.h"

namespace train {

/// D = op(A) op(B), column-major, as cuBLASLt sees it. What an epilogue takes or leaves beside it.
struct Product {
    /// Everything that an algorithm is chosen by.
    struct Kind {
        lt::Operation op_a = lt::Operation::None, op_b = lt::Operation::None;
        std::size_t m = 0, n = 0, k = 0;
        std::size_t lda = 0, ldb = 0, ldd = 0;  ///< elements from one column to the next
        lt::Epilogue epilogue = lt::Epilogue::None;
        std::size_t aux_bits = 0;  ///< bits from one column of the ReLU mask to the next
        std::uint32_t align_a = 0, align_b = 0, align_d = 0;  ///< set by Products
        auto operator<=>(const Kind&) const = default;
    };
    Kind kind;
    const void* a = nullptr;
    const void* b = nullptr;
    void* d = nullptr;
    const void* bias = nullptr;  ///< read by Bias, ReluBias, ReluAuxBias; written by BgradB
    const void* aux = nullptr;   ///< written by ReluAuxBias, read by DRelu
};

struct ProductOptions {
    lt::DataType type = lt::DataType::F32;  ///< of A, B and D; sums are float32
    bool allow_tf32 = false;
    bool deterministic = false;  ///< sums over k are not split
};

/// Products on one stream. The algorithm for a kind is looked for once; a kind that cuBLASLt cannot do is
/// remembered too. Not thread-safe.
class Products {
  public:
    /// The device is current. Throws ddp::Error.
    Products(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const lt::Api> api,
             ddp::cuda::Stream stream, ProductOptions options);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    /// Queues it. False, with nothing done: cuBLASLt has no algorithm for this kind. Throws ddp::Error.
    [[nodiscard]] bool multiply(const Product& product);
    [[nodiscard]] const lt::Api& api() const { return *api_; }

  private:
    class Plan;
    Plan& plan_for(const Product& product);

    std::shared_ptr<const lt::Api> api_;
    ddp::cuda::Stream stream_;
    ProductOptions options_;
    ddp::cuda::DeviceMemory workspace_;
    lt::Handle handle_ = nullptr;
    std::map<Product::Kind, std::unique_ptr<Plan>> plans_;
};

}  // namespace train
