#include "products.h"

#include <fmt/core.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "ddp/types.h"
#include "tuning.h"

namespace train {
namespace {

/// What cuBLAS takes for itself on the newest chips.
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

/// How many algorithms the library is asked for.
constexpr int kMostCandidates = 16;

/// The largest power of two, to 64, that divides an address: algorithms that need more are left out. None
/// does, and gradients begin at multiples of 64: what is laid out anew stays of one kind.
std::uint32_t alignment_of(const void* address) {
    constexpr std::uintptr_t kMost = 64;
    const std::uintptr_t lowest = reinterpret_cast<std::uintptr_t>(address) | kMost;
    return static_cast<std::uint32_t>(lowest & -lowest);
}

/// An address that is aligned no better than alignment_of says. Null stays null. Nobody reads there.
const void* barely_aligned(const void* address) {
    if (address == nullptr) return nullptr;
    return static_cast<const std::byte*>(address) +
           (reinterpret_cast<std::uintptr_t>(address) % (2 * alignment_of(address)) == 0
                ? alignment_of(address)
                : 0);
}

/// How sums over k may be split: by default also into pieces that are added up in the type of D.
std::uint32_t reductions_of(const ProductOptions& options) {
    if (options.deterministic) return lt::kNoReduction;
    return options.type == lt::DataType::F32 ? lt::kAnyReduction : lt::kFloat32Reduction;
}

/// The algorithm does not go with this product after all: another one may. Everything else is trouble.
bool is_refusal(lt::Code code) {
    switch (code) {
        case lt::Code::InvalidValue:
        case lt::Code::ArchMismatch:
        case lt::Code::InternalError:
        case lt::Code::NotSupported:
            return true;
        case lt::Code::Success:
            break;
    }
    return false;
}

std::string describe(const Product::Kind& kind) {
    return fmt::format("product {} x {} x {}, epilogue {}", kind.m, kind.n, kind.k,
                       static_cast<int>(kind.epilogue));
}

}  // namespace

/// Descriptors of one kind and the algorithms that were found for it, the one to take first.
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

    void point(const void* bias, const void* aux) {
        if (bias != nullptr) set(lt::MatmulAttribute::BiasPointer, bias);
        if (aux == nullptr) return;
        set(lt::MatmulAttribute::AuxPointer, aux);
        set(lt::MatmulAttribute::AuxLd, static_cast<std::int64_t>(kind_.aux_bits));
    }

    void find_algorithms(Products& owner) {
        lt::Preference preference = nullptr;
        check(api_->preference_create(&preference));
        const auto prefer = [&](lt::PreferenceAttribute attribute, auto value) {
            check(api_->preference_set(preference, attribute, &value, sizeof(value)));
        };
        prefer(lt::PreferenceAttribute::MaxWorkspaceBytes, std::uint64_t{kWorkspaceBytes});
        prefer(lt::PreferenceAttribute::ReductionSchemeMask, reductions_of(owner.options_));
        prefer(lt::PreferenceAttribute::MinAlignmentA, kind_.align_a);
        prefer(lt::PreferenceAttribute::MinAlignmentB, kind_.align_b);
        prefer(lt::PreferenceAttribute::MinAlignmentC, kind_.align_d);
        prefer(lt::PreferenceAttribute::MinAlignmentD, kind_.align_d);
        std::array<lt::Heuristic, kMostCandidates> results{};
        int found = 0;
        const lt::Code code = api_->get_heuristic(owner.handle_, desc_, a_, b_, d_, d_, preference,
                                                  kMostCandidates, results.data(), &found);
        api_->preference_destroy(preference);
        if (owner.note_refusal(code)) return;
        check(code);
        for (std::size_t i = 0; i < static_cast<std::size_t>(found); ++i) {
            if (results[i].state == lt::Code::Success && results[i].workspace_bytes <= kWorkspaceBytes)
                algorithms_.push_back(results[i].algorithm);
        }
    }

    /// Queues it by the first algorithm that is not refused. False: there is none.
    bool run(Products& owner, const Product& product) {
        while (!algorithms_.empty()) {
            if (attempt(owner, product, algorithms_.front())) return true;
            algorithms_.erase(algorithms_.begin());
        }
        return false;
    }

    [[nodiscard]] bool is_tuned() const { return is_tuned_; }
    /// Puts the fastest first and leaves out those that were refused. True if that is another than the first
    /// that runs.
    bool tune(Products& owner, const Product& product, Tuner& tuner) {
        is_tuned_ = true;
        times_ = tuner.time(algorithms_.size(),
                            [&](std::size_t i) { return attempt(owner, product, algorithms_[i]); });
        const std::size_t best = fastest(times_);
        std::vector<lt::Algorithm> left;
        bool is_moved = false;
        for (std::size_t i = 0; i < algorithms_.size(); ++i) {
            if (times_[i] == kNever) continue;
            if (i == best) is_moved = !left.empty();
            left.insert(i == best ? left.begin() : left.end(), algorithms_[i]);
        }
        algorithms_ = std::move(left);
        return is_moved;
    }
    [[nodiscard]] Timing timing() const { return {describe(kind_), times_, fastest(times_)}; }

  private:
    bool attempt(Products& owner, const Product& product, const lt::Algorithm& algorithm) const {
        const float one = 1, zero = 0;
        const lt::Code code = api_->matmul(owner.handle_, desc_, &one, product.a, a_, product.b, b_, &zero,
                                           product.d, d_, product.d, d_, &algorithm, owner.workspace_.get(),
                                           owner.workspace_.bytes(), owner.stream_);
        if (owner.note_refusal(code)) return false;
        check(code);
        return true;
    }
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
    std::vector<lt::Algorithm> algorithms_;
    std::vector<double> times_;  ///< of those that the library had found
    bool is_tuned_ = false;
};

Products::Products(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const lt::Api> api,
                   ddp::cuda::Stream stream, ProductOptions options, Tuner* tuner)
    : gpu_(std::move(gpu)),
      api_(std::move(api)),
      stream_(stream),
      options_(options),
      tuner_(tuner),
      workspace_(gpu_, kWorkspaceBytes) {
    api_->check(api_->create(&handle_), "starting cuBLASLt");
}

Products::~Products() {
    plans_.clear();
    api_->destroy(handle_);
}

bool Products::note_refusal(lt::Code code) {
    if (!is_refusal(code)) return false;
    refusal_ = code;
    // What CUDA may have said to the library is not to be taken for an error of whoever asks next. An error
    // that the device cannot recover from is not forgotten by this.
    static_cast<void>(gpu_->api().get_last_error());
    return true;
}

Products::Plan& Products::plan_for(const Product& product) {
    Product::Kind kind = product.kind;
    kind.align_a = alignment_of(product.a);
    kind.align_b = alignment_of(product.b);
    kind.align_d = alignment_of(product.d);
    kind.align_bias = alignment_of(product.bias);
    kind.align_aux = alignment_of(product.aux);
    std::unique_ptr<Plan>& plan = plans_[kind];
    if (!plan) {
        auto made = std::make_unique<Plan>(api_, options_, kind);
        // How far these two are aligned the library sees by their values: it may see no more than the next
        // pointers of this kind will keep.
        made->point(barely_aligned(product.bias), barely_aligned(product.aux));
        made->find_algorithms(*this);
        plan = std::move(made);
    }
    plan->point(product.bias, product.aux);
    return *plan;
}

std::vector<Timing> Products::timings() const {
    std::vector<Timing> all;
    for (const auto& [kind, plan] : plans_) {
        // Null: making it has failed.
        if (plan && plan->is_tuned()) all.push_back(plan->timing());
    }
    return all;
}

bool Products::multiply(const Product& product) {
    Plan& plan = plan_for(product);
    if (tuner_ != nullptr && !plan.is_tuned() && tuner_->may_time()) {
        if (plan.tune(*this, product, *tuner_)) ++tuned_.moved;
        ++tuned_.kinds;
    }
    return plan.run(*this, product);
}

}  // namespace train
