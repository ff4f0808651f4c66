#include "products.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "ddp/types.h"

namespace train {
namespace {

/// What cuBLAS takes for itself on the newest chips.
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

/// The largest power of two, to 256, that divides an address: algorithms that need more are left out.
std::uint32_t alignment_of(const void* address) {
    constexpr std::uintptr_t kMost = 256;
    const std::uintptr_t lowest = reinterpret_cast<std::uintptr_t>(address) | kMost;
    return static_cast<std::uint32_t>(lowest & -lowest);
}

std::string describe(const Product::Kind& kind) {
    return fmt::format("multiplying matrices ({} x {} x {}, epilogue {})", kind.m, kind.n, kind.k,
                       static_cast<int>(kind.epilogue));
}

}  // namespace

/// Descriptors of one kind and the algorithm that was found for it.
class Products::Plan {
  public:
    Plan(std::shared_ptr<const lt::Api> api, const ProductOptions& options, const Product::Kind& kind)
        : api_(std::move(api)), kind_(kind) {
        const auto compute = options.allow_tf32 ? lt::ComputeType::Tf32 : lt::ComputeType::F32;
        check(api_->matmul_desc_create(&desc_, compute, lt::DataType::F32));
        set(lt::MatmulAttribute::TransA, kind.op_a);
        set(lt::MatmulAttribute::TransB, kind.op_b);
        set(lt::MatmulAttribute::Epilogue, kind.epilogue);
        const bool a_as_is = kind.op_a == lt::Operation::None, b_as_is = kind.op_b == lt::Operation::None;
        lay_out(a_, options.type, a_as_is ? kind.m : kind.k, a_as_is ? kind.k : kind.m, kind.lda);
        lay_out(b_, options.type, b_as_is ? kind.k : kind.n, b_as_is ? kind.n : kind.k, kind.ldb);
        lay_out(d_, options.type, kind.m, kind.n, kind.ldd);
    }
    ~Plan() {
        for (const lt::Layout layout : {a_, b_, d_}) {
            if (layout != nullptr) api_->layout_destroy(layout);
        }
        if (desc_ != nullptr) api_->matmul_desc_destroy(desc_);
    }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    /// The pointers first: the choice of an algorithm looks at their alignment.
    void point(const Product& product) {
        if (product.bias != nullptr) set(lt::MatmulAttribute::BiasPointer, product.bias);
        if (product.aux == nullptr) return;
        set(lt::MatmulAttribute::AuxPointer, product.aux);
        set(lt::MatmulAttribute::AuxLd, static_cast<std::int64_t>(kind_.aux_bits));
    }

    void find_algorithm(lt::Handle handle, bool deterministic) {
        lt::Preference preference = nullptr;
        check(api_->preference_create(&preference));
        const auto prefer = [&](lt::PreferenceAttribute attribute, auto value) {
            check(api_->preference_set(preference, attribute, &value, sizeof(value)));
        };
        prefer(lt::PreferenceAttribute::MaxWorkspaceBytes, std::uint64_t{kWorkspaceBytes});
        if (deterministic) prefer(lt::PreferenceAttribute::ReductionSchemeMask, lt::kNoReduction);
        prefer(lt::PreferenceAttribute::MinAlignmentA, kind_.align_a);
        prefer(lt::PreferenceAttribute::MinAlignmentB, kind_.align_b);
        prefer(lt::PreferenceAttribute::MinAlignmentC, kind_.align_d);
        prefer(lt::PreferenceAttribute::MinAlignmentD, kind_.align_d);
        lt::Heuristic result{};
        int found = 0;
        const lt::Code code =
            api_->get_heuristic(handle, desc_, a_, b_, d_, d_, preference, 1, &result, &found);
        api_->preference_destroy(preference);
        const bool none = code == lt::Code::NotSupported || code == lt::Code::InvalidValue;
        if (!none) check(code);
        exists_ = !none && found > 0 && result.state == lt::Code::Success;
        algorithm_ = result.algorithm;
    }
    [[nodiscard]] bool exists() const { return exists_; }

    void run(lt::Handle handle, const Product& product, const ddp::cuda::DeviceMemory& workspace,
             ddp::cuda::Stream stream) const {
        const float one = 1, zero = 0;
        check(api_->matmul(handle, desc_, &one, product.a, a_, product.b, b_, &zero, product.d, d_, product.d,
                           d_, &algorithm_, workspace.get(), workspace.bytes(), stream));
    }

  private:
    void check(lt::Code code) const {
        if (code != lt::Code::Success) api_->check(code, describe(kind_));
    }
    template <class T>
    void set(lt::MatmulAttribute attribute, const T& value) {
        check(api_->matmul_desc_set(desc_, attribute, &value, sizeof(value)));
    }
    void lay_out(lt::Layout& layout, lt::DataType type, std::size_t rows, std::size_t columns,
                 std::size_t leading) {
        check(api_->layout_create(&layout, type, rows, columns, static_cast<std::int64_t>(leading)));
    }

    std::shared_ptr<const lt::Api> api_;
    Product::Kind kind_;
    lt::MatmulDesc desc_ = nullptr;
    lt::Layout a_ = nullptr, b_ = nullptr, d_ = nullptr;
    lt::Algorithm algorithm_{};
    bool exists_ = false;
};

Products::Products(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const lt::Api> api,
                   ddp::cuda::Stream stream, ProductOptions options)
    : api_(std::move(api)), stream_(stream), options_(options), workspace_(std::move(gpu), kWorkspaceBytes) {
    api_->check(api_->create(&handle_), "starting cuBLASLt");
}

Products::~Products() {
    plans_.clear();
    api_->destroy(handle_);
}

Products::Plan& Products::plan_for(const Product& product) {
    Product::Kind kind = product.kind;
    kind.align_a = alignment_of(product.a);
    kind.align_b = alignment_of(product.b);
    kind.align_d = alignment_of(product.d);
    std::unique_ptr<Plan>& plan = plans_[kind];
    if (plan) {
        plan->point(product);
        return *plan;
    }
    auto made = std::make_unique<Plan>(api_, options_, kind);
    made->point(product);
    made->find_algorithm(handle_, options_.deterministic);
    plan = std::move(made);
    return *plan;
}

bool Products::multiply(const Product& product) {
    Plan& plan = plan_for(product);
    if (!plan.exists()) return false;
    plan.run(handle_, product, workspace_, stream_);
    return true;
}

}  // namespace train
