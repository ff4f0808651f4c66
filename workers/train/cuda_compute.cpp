#include "cuda_compute.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <compare>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/module.h"
#include "products.h"
#include "relu_masks.h"
#include "tuner.h"
#include "tuning.h"

DDP_KERNEL_IMAGE(train_kernels)

namespace train {
namespace {

using ddp::cuda::Function;
using U64 = unsigned long long;  // as the kernels take them

/// Sums of the score: row r of a batch adds to slot r % kSlots, always in the same order.
constexpr std::size_t kSlots = 8192;
/// Elements that a kernel moves at once (kernel_dialect.h).
constexpr std::size_t kPack = 8;
/// Bits: what cuBLASLt wants the columns of a ReLU mask to be a multiple of.
constexpr std::size_t kMaskBits = 128;

std::size_t rounded_up(std::size_t value, std::size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

std::size_t packs_of(std::size_t columns) { return (columns + kPack - 1) / kPack; }

/// The most runs of rows that a bias gradient of that width is summed in before the runs are: as many threads
/// as keep a large device's memory busy, each with a pack of columns of one run. It does not ask the device:
/// the order of sums, and with it their bits, would be another on another one.
std::size_t most_parts_for(std::size_t columns) {
    constexpr std::size_t kThreads = std::size_t{1} << 17, kMost = 1024;
    return std::clamp<std::size_t>(kThreads / packs_of(columns), 1, kMost);
}
/// For runs that are not worth a thread there are fewer.
std::size_t parts_for(std::size_t rows, std::size_t columns) {
    constexpr std::size_t kRowsOfARun = 16;
    return std::clamp<std::size_t>(rows / kRowsOfARun, 1, most_parts_for(columns));
}

ddp::DType dtype_of(Precision precision) {
    switch (precision) {
        case Precision::Fp32:
        case Precision::Tf32:
            return ddp::DType::F32;
        case Precision::Bf16:
            return ddp::DType::BF16;
        case Precision::Fp16:
            return ddp::DType::F16;
    }
    return ddp::DType::F32;
}

lt::DataType data_type_of(ddp::DType type) {
    switch (type) {
        case ddp::DType::BF16:
            return lt::DataType::BF16;
        case ddp::DType::F16:
            return lt::DataType::F16;
        default:
            return lt::DataType::F32;
    }
}

/// The kernels of one element type.
struct Kernels {
    Function stage, cross_entropy, add_bias, relu_gradient, column_sums, sum_parts;

    static Kernels of(const ddp::cuda::Module& module, ddp::DType type) {
#define TRAIN_KERNELS(suffix)                                                                            \
    Kernels {                                                                                            \
        module.function("train_stage_" #suffix), module.function("train_cross_entropy_" #suffix),        \
            module.function("train_add_bias_" #suffix), module.function("train_relu_gradient_" #suffix), \
            module.function("train_column_sums_" #suffix), module.function("train_sum_parts_" #suffix)   \
    }
        switch (type) {
            case ddp::DType::BF16:
                return TRAIN_KERNELS(bf16);
            case ddp::DType::F16:
                return TRAIN_KERNELS(f16);
            default:
                return TRAIN_KERNELS(f32);
        }
#undef TRAIN_KERNELS
    }
};

class Captured final : public Compute::Recorded {
  public:
    Captured(std::unique_ptr<ddp::cuda::Graph> graph, ddp::cuda::Stream stream)
        : graph_(std::move(graph)), stream_(stream) {}
    void run() override { graph_->launch(stream_); }

  private:
    std::unique_ptr<ddp::cuda::Graph> graph_;
    ddp::cuda::Stream stream_;
};

constexpr lt::Operation kAsIs = lt::Operation::None, kTransposed = lt::Operation::Transpose;

/// to = left right, or with one of them transposed. To cuBLASLt a row-major matrix is its transpose, so
/// to^T = right^T left^T is asked for.
Product product_of(const Matrix& to, const Matrix& left, lt::Operation op_left, const Matrix& right,
                   lt::Operation op_right) {
    Product product;
    product.kind = {.op_a = op_right,
                    .op_b = op_left,
                    .m = to.columns,
                    .n = to.rows,
                    .k = op_left == kAsIs ? left.columns : left.rows,
                    .lda = right.stride,
                    .ldb = left.stride,
                    .ldd = to.stride};
    product.a = right.data;
    product.b = left.data;
    product.d = to.data;
    return product;
}
Product with_bias(Product product, lt::Epilogue epilogue, const void* bias) {
    product.kind.epilogue = epilogue;
    product.bias = bias;
    return product;
}
Product with_mask(Product product, lt::Epilogue epilogue, const void* mask) {
    product.kind.epilogue = epilogue;
    product.kind.aux_bits = rounded_up(product.kind.m, kMaskBits);
    product.aux = mask;
    return product;
}

/// Something that can be done in several ways: of which shape, and what there is to it.
struct Task {
    enum class What { Linear, LinearWithRelu, LinearGradients, InputGradient, InputGradientByMask } what;
    Product::Kind product;  ///< without an epilogue
    auto operator<=>(const Task&) const = default;
};
/// The ways: what is in one pass comes first, a product and a kernel of our own last.
constexpr std::size_t kLinearWithMask = 0, kLinearFused = 1, kLinearPlain = 2, kLinearWays = 3;
constexpr std::size_t kGradientFused = 0, kGradientPlain = 1, kGradientWays = 2;

const char* name_of(Task::What what) {
    switch (what) {
        case Task::What::Linear:
            return "linear (-, epilogue, kernel)";
        case Task::What::LinearWithRelu:
            return "linear with ReLU (mask, epilogue, kernel)";
        case Task::What::LinearGradients:
            return "gradient of weight and bias (epilogue, kernel)";
        case Task::What::InputGradient:
            return "gradient of input (-, kernel)";
        case Task::What::InputGradientByMask:
            return "gradient of input (mask, kernel)";
    }
    return "?";
}

/// The last way is the fastest, and not for want of another.
bool is_plain(const std::vector<double>& times) {
    const std::size_t last = times.size() - 1;
    return fastest(times) == last &&
           std::isfinite(*std::min_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(last)));
}

class CudaCompute final : public Compute {
  public:
    CudaCompute(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const lt::Api> cublaslt,
                ddp::cuda::Stream stream, CudaOptions options)
        : gpu_(std::move(gpu)),
          stream_(stream),
          options_(options),
          module_(gpu_, {"train_kernels", train_kernels_image}),
          kernels_(Kernels::of(module_, dtype_of(options.precision))),
          stage_labels_(module_.function("train_stage_labels")),
          tuner_(make_tuner()),
          products_(gpu_, std::move(cublaslt), stream,
                    {.type = data_type_of(dtype_of(options.precision)),
                     .allow_tf32 = options.precision == Precision::Tf32,
                     .deterministic = options.deterministic},
                    tuner_.get()),
          losses_(gpu_, kSlots * sizeof(double)),
          hits_(gpu_, kSlots * sizeof(U64)),
          read_back_(gpu_, kSlots * (sizeof(double) + sizeof(U64))) {
        losses_.clear(stream_);
        hits_.clear(stream_);
    }

    ddp::Device device() const override { return {ddp::Device::Kind::Cuda, gpu_->index()}; }
    ddp::DType dtype() const override { return dtype_of(options_.precision); }
    std::string describe() const override {
        return fmt::format("cuBLASLt {}, {}{}{}", products_.api().version(), name_of(options_.precision),
                           options_.deterministic ? ", deterministic" : "", tuner_ ? ", tuned" : "");
    }
    std::string describe_tuning() const override {
        if (!tuner_ || products_.tuned().kinds == 0) return "";
        return fmt::format(
            "timed {} kinds of products in {:.1f} s: {} by another algorithm than cuBLASLt's first, {} with "
            "a "
            "kernel after them instead of an epilogue",
            products_.tuned().kinds, tuner_->seconds(), products_.tuned().moved,
            std::count_if(times_.begin(), times_.end(),
                          [](const auto& task) { return is_plain(task.second); }));
    }
    std::vector<Timing> timings() const override {
        std::vector<Timing> all = products_.timings();
        for (const auto& [task, times] : times_)
            all.push_back({fmt::format("{} {} x {} x {}", name_of(task.what), task.product.m, task.product.n,
                                       task.product.k),
                           times, fastest(times)});
        return all;
    }

    Memory allocate(std::size_t bytes) override {
        auto memory = std::make_shared<ddp::cuda::DeviceMemory>(gpu_, bytes);
        if (bytes > 0) memory->clear(stream_);
        return {memory->get(), [memory](std::byte*) {}};
    }

    /// 16 bytes: what the device moves at once.
    std::size_t stride_for(std::size_t columns) const override {
        return rounded_up(columns, 16 / ddp::size_of(dtype()));
    }
    std::size_t mask_bytes(std::size_t rows, std::size_t columns) const override {
        return rows * rounded_up(columns, kMaskBits) / 8;
    }

    void upload(const void* from, const ddp::Buffer& to) override {
        ddp::cuda::copy(*gpu_, to.data, from, to.bytes(), stream_);
        ddp::cuda::synchronize(*gpu_, stream_);
    }
    void round(const ddp::Buffer& from, const ddp::Buffer& to) override {
        launch_stage(static_cast<const float*>(from.data), nullptr, {to.data, 1, to.count, to.count});
    }

    void stage(const BatchSource& from, const Matrix& to, std::int32_t* labels) override {
        launch_stage(from.values, from.order, to);
        stage_labels_.launch(gpu_->grid_for(from.count), stream_, from.labels, from.order, labels,
                             U64{from.count});
    }

    void linear(const Linear& layer) override {
        if (layer.output.rows == 0) return;
        const bool relu = layer.activation == Activation::Relu;
        const Product product = product_of(layer.output, layer.input, kAsIs, layer.weight, kTransposed);
        const auto run = [&](std::size_t way) { return linear_by(way, layer, product); };
        const auto* const times = times_of(
            {relu ? Task::What::LinearWithRelu : Task::What::Linear, product.kind}, kLinearWays, run);
        go(times != nullptr ? forward_way(layer, *times) : kLinearWithMask, kLinearWays, run, product);
    }

    void linear_gradients(const LinearGradients& layer) override {
        if (layer.delta.rows == 0) {
            clear(layer.weight_gradient);
            clear({layer.bias_gradient, 1, layer.delta.columns, layer.delta.columns});
            return;
        }
        const Product product =
            product_of(layer.weight_gradient, layer.delta, kTransposed, layer.input, kAsIs);
        const auto run = [&](std::size_t way) { return linear_gradients_by(way, layer, product); };
        const auto* const times = times_of({Task::What::LinearGradients, product.kind}, kGradientWays, run);
        go(times != nullptr ? fastest(*times) : kGradientFused, kGradientWays, run, product);
    }

    void input_gradient(const InputGradient& layer) override {
        if (layer.delta.rows == 0) return;
        const Product product = product_of(layer.below_delta, layer.delta, kAsIs, layer.weight, kAsIs);
        const bool by_mask = masks_.is_written(layer.below_mask);
        const auto run = [&](std::size_t way) { return input_gradient_by(way, layer, product); };
        const auto* const times =
            times_of({by_mask ? Task::What::InputGradientByMask : Task::What::InputGradient, product.kind},
                     kGradientWays, run);
        if (times != nullptr && by_mask)
            masks_.note_backward({layer.below_mask, layer.delta.rows},
                                 {(*times)[kGradientFused], (*times)[kGradientPlain]});
        go(times != nullptr ? fastest(*times) : kGradientFused, kGradientWays, run, product);
    }

    void cross_entropy(const CrossEntropy& loss) override {
        if (loss.logits.rows == 0) return;
        kernels_.cross_entropy.launch(gpu_->grid_for_rows(std::min<U64>(loss.logits.rows, kSlots)), stream_,
                                      static_cast<const void*>(loss.logits.data), U64{loss.logits.stride},
                                      loss.labels, loss.delta.data, U64{loss.delta.stride},
                                      U64{loss.logits.rows}, U64{loss.logits.columns}, loss.loss_scale,
                                      losses_.as<double>(), hits_.as<U64>(), U64{kSlots});
    }

    std::unique_ptr<Recorded> record(std::function<void()> work) override {
        ddp::cuda::Capture capture(gpu_, stream_);
        work();
        return std::make_unique<Captured>(capture.end(), stream_);
    }

    bool rehearse(const std::function<void()>& pass) override {
        if (!tuner_) return false;
        const Tuner::Session session = tuner_->open();
        pass();
        return true;
    }

    Score take_score() override {
        auto* const losses = read_back_.as<double>();
        auto* const hits = reinterpret_cast<U64*>(losses + kSlots);
        ddp::cuda::copy(*gpu_, losses, losses_.get(), losses_.bytes(), stream_);
        ddp::cuda::copy(*gpu_, hits, hits_.get(), hits_.bytes(), stream_);
        losses_.clear(stream_);
        hits_.clear(stream_);
        ddp::cuda::synchronize(*gpu_, stream_);
        return {std::accumulate(losses, losses + kSlots, 0.0), std::accumulate(hits, hits + kSlots, U64{0})};
    }

  private:
    void launch_stage(const float* from, const std::uint32_t* order, const Matrix& to) {
        kernels_.stage.launch(gpu_->grid_for(to.rows * to.columns), stream_, from, order, to.data,
                              U64{to.rows}, U64{to.columns}, U64{to.stride});
    }

    std::unique_ptr<Tuner> make_tuner() const {
        if (!options_.tune || options_.deterministic) return nullptr;
        return std::make_unique<Tuner>(gpu_, stream_);
    }

    /// How long each way takes; null when nothing is timed, or not now. Leaves the result of any of them.
    const std::vector<double>* times_of(const Task& task, std::size_t ways, const Tuner::Run& run) {
        if (!tuner_) return nullptr;
        const auto found = times_.find(task);
        if (found != times_.end()) return &found->second;
        if (!tuner_->may_time()) return nullptr;
        return &times_.emplace(task, tuner_->time(ways, run)).first->second;
    }

    /// The preferred way, or the first of the others that there is.
    void go(std::size_t preferred, std::size_t ways, const Tuner::Run& run, const Product& product) const {
        if (run(preferred)) return;
        for (std::size_t way = 0; way < ways; ++way) {
            if (way != preferred && run(way)) return;
        }
        throw ddp::Error(
            fmt::format("{} has no algorithm for a {} product of {} x {} x {} on CUDA device {} ({})",
                        products_.api().library, name_of(options_.precision), product.kind.m, product.kind.n,
                        product.kind.k, gpu_->index(), products_.refusal()));
    }

    std::size_t forward_way(const Linear& layer, const std::vector<double>& times) {
        std::vector<double> without_mask = times;
        without_mask[kLinearWithMask] = kNever;
        const std::size_t other = fastest(without_mask);
        const ReluMasks::Layer known{layer.mask, layer.output.rows};
        masks_.note_forward(known, {times[kLinearWithMask], without_mask[other]});
        const bool has_mask = times[kLinearWithMask] != kNever;
        return has_mask && masks_.is_wanted(known) ? kLinearWithMask : other;
    }

    // Each of these queues one way, or does nothing and returns false: the library cannot do it so.

    bool linear_by(std::size_t way, const Linear& layer, const Product& product) {
        const bool relu = layer.activation == Activation::Relu;
        switch (way) {
            case kLinearWithMask: {
                // The way back is cheaper then.
                if (!relu) return false;
                const Product masked = with_mask(with_bias(product, lt::Epilogue::None, layer.bias),
                                                 lt::Epilogue::ReluAuxBias, layer.mask);
                if (!multiply_fused(masked)) return false;
                break;
            }
            case kLinearFused:
                if (!multiply_fused(
                        with_bias(product, relu ? lt::Epilogue::ReluBias : lt::Epilogue::Bias, layer.bias)))
                    return false;
                break;
            default:
                if (!products_.multiply(product)) return false;
                kernels_.add_bias.launch(gpu_->grid_for(layer.output.rows * layer.output.columns), stream_,
                                         layer.output.data, U64{layer.output.stride}, layer.bias,
                                         U64{layer.output.rows}, U64{layer.output.columns}, int{relu});
        }
        if (relu) masks_.set_written(layer.mask, way == kLinearWithMask);
        return true;
    }

    bool linear_gradients_by(std::size_t way, const LinearGradients& layer, const Product& product) {
        if (way == kGradientFused) {
            // How the epilogue adds is the library's affair; our kernel's order is always the same.
            return !options_.deterministic &&
                   multiply_fused(with_bias(product, lt::Epilogue::BgradB, layer.bias_gradient));
        }
        if (!products_.multiply(product)) return false;
        bias_gradient(layer.delta, layer.bias_gradient);
        return true;
    }

    bool input_gradient_by(std::size_t way, const InputGradient& layer, const Product& product) {
        if (way == kGradientFused) {
            return masks_.is_written(layer.below_mask) &&
                   multiply_fused(with_mask(product, lt::Epilogue::DRelu, layer.below_mask));
        }
        if (!products_.multiply(product)) return false;
        const Matrix& below = layer.below_delta;
        kernels_.relu_gradient.launch(gpu_->grid_for(below.rows * below.columns), stream_, below.data,
                                      static_cast<const void*>(layer.below_output.data), U64{below.stride},
                                      U64{below.rows}, U64{below.columns});
        return true;
    }

    [[nodiscard]] bool multiply_fused(const Product& product) {
        return options_.epilogues && products_.multiply(product);
    }

    /// Rows without gaps.
    void clear(const Matrix& matrix) const {
        gpu_->api().check(gpu_->api().memset_async(
                              matrix.data, 0, matrix.rows * matrix.columns * ddp::size_of(dtype()), stream_),
                          "clearing gradients on a CUDA device");
    }

    void bias_gradient(const Matrix& delta, void* to) {
        const std::size_t packs = packs_of(delta.columns), parts = parts_for(delta.rows, delta.columns);
        // One for each width, for good: a captured step goes on using it.
        const auto [found, is_new] = parts_.try_emplace(
            delta.columns, gpu_, most_parts_for(delta.columns) * packs * kPack * sizeof(float));
        const ddp::cuda::DeviceMemory& sums = found->second;
        // grid_for gives every thread a pack.
        kernels_.column_sums.launch(gpu_->grid_for(parts * packs * kPack), stream_,
                                    static_cast<const void*>(delta.data), U64{delta.stride}, U64{delta.rows},
                                    U64{delta.columns}, sums.as<float>(), U64{parts});
        kernels_.sum_parts.launch(gpu_->grid_for_rows(packs), stream_, sums.as<const float>(), U64{parts},
                                  U64{delta.columns}, to);
    }

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    CudaOptions options_;
    ddp::cuda::Module module_;
    Kernels kernels_;
    Function stage_labels_;
    std::unique_ptr<Tuner> tuner_;  ///< null: nothing is timed
    Products products_;
    ddp::cuda::DeviceMemory losses_, hits_;
    ddp::cuda::PinnedMemory read_back_;
    std::map<std::size_t, ddp::cuda::DeviceMemory> parts_;  ///< sums of runs of rows, by columns
    ReluMasks masks_;
    std::map<Task, std::vector<double>> times_;  ///< of the ways of each
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(std::shared_ptr<const ddp::cuda::Gpu> gpu,
                                           std::shared_ptr<const lt::Api> cublaslt, ddp::cuda::Stream stream,
                                           CudaOptions options) {
    return std::make_unique<CudaCompute>(std::move(gpu), std::move(cublaslt), stream, options);
}

}  // namespace train
