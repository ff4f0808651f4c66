#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cublaslt_api.h"
#include "ddp/cuda/memory.h"
#include "tuner.h"
#include "tuning.h"

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
        /// Set by Products. The library looks at those of bias and mask too, by their pointers.
        std::uint32_t align_a = 0, align_b = 0, align_d = 0, align_bias = 0, align_aux = 0;
        auto operator<=>(const Kind&) const = default;
    };
    Kind kind;
    const void* a = nullptr;
    const void* b = nullptr;
    void* d = nullptr;           ///< apart from everything that is read
    const void* bias = nullptr;  ///< read by Bias, ReluBias, ReluAuxBias; written by BgradB
    const void* aux = nullptr;   ///< written by ReluAuxBias, read by DRelu
};

struct ProductOptions {
    lt::DataType type = lt::DataType::F32;  ///< of A, B and D; sums are float32
    bool allow_tf32 = false;
    bool deterministic = false;  ///< sums over k are not split
};

/// Products on one stream. Algorithms for a kind are looked for once; a kind that cuBLASLt cannot do is
/// remembered too, and an algorithm that it refuses when it comes to it is not tried again. Not thread-safe.
class Products {
  public:
    /// With a tuner (borrowed) the first use of a kind while it may time times its algorithms, and waits for
    /// the stream; until then, and without one, the library's first that runs is taken. The device is
    /// current. Throws ddp::Error.
    Products(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const lt::Api> api,
             ddp::cuda::Stream stream, ProductOptions options, Tuner* tuner);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    /// Queues it. m, n and k are not 0. False, with nothing done: cuBLASLt has no algorithm for this kind.
    /// Throws ddp::Error.
    [[nodiscard]] bool multiply(const Product& product);
    /// What the library said last when it would not do a product: "CUBLAS_STATUS_NOT_SUPPORTED".
    [[nodiscard]] std::string refusal() const { return api_->get_status_string(refusal_); }
    [[nodiscard]] const lt::Api& api() const { return *api_; }

    /// What tuning has come to.
    struct Tuned {
        std::size_t kinds = 0;
        std::size_t moved = 0;  ///< those for which the library would have taken another algorithm first
    };
    [[nodiscard]] Tuned tuned() const { return tuned_; }
    /// Of the algorithms of each kind.
    [[nodiscard]] std::vector<Timing> timings() const;

  private:
    class Plan;
    Plan& plan_for(const Product& product);
    [[nodiscard]] bool note_refusal(lt::Code code);

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    std::shared_ptr<const lt::Api> api_;
    ddp::cuda::Stream stream_;
    ProductOptions options_;
    Tuner* tuner_;
    ddp::cuda::DeviceMemory workspace_;
    lt::Handle handle_ = nullptr;
    std::map<Product::Kind, std::unique_ptr<Plan>> plans_;
    Tuned tuned_;
    lt::Code refusal_ = lt::Code::NotSupported;
};

}  // namespace train
