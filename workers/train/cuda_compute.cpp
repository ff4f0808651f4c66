#include "cuda_compute.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/module.h"
#include "products.h"

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

/// A row-major matrix is its transpose to cuBLASLt: out[s, o] = in[s, i] w[o, i]^T becomes
/// out^T = (w^T)^T in^T with columns of `stride`.
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
          products_(gpu_, std::move(cublaslt), stream,
                    {.type = data_type_of(dtype_of(options.precision)),
                     .allow_tf32 = options.precision == Precision::Tf32,
                     .deterministic = options.deterministic}),
          losses_(gpu_, kSlots * sizeof(double)),
          hits_(gpu_, kSlots * sizeof(U64)),
          read_back_(gpu_, kSlots * (sizeof(double) + sizeof(U64))) {
        losses_.clear(stream_);
        hits_.clear(stream_);
    }

    ddp::Device device() const override { return {ddp::Device::Kind::Cuda, gpu_->index()}; }
    ddp::DType dtype() const override { return dtype_of(options_.precision); }
    std::string describe() const override {
        return fmt::format("cuBLASLt {}, {}{}", products_.api().version(), name_of(options_.precision),
                           options_.deterministic ? ", deterministic" : "");
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
        Product product = forward_product(layer);
        const bool relu = layer.activation == Activation::Relu;
        // With the mask first: the way back is cheaper then.
        if (relu) {
            product.kind.epilogue = lt::Epilogue::ReluAuxBias;
            product.kind.aux_bits = rounded_up(layer.output.columns, kMaskBits);
            product.aux = layer.mask;
            if (multiply_fused(product)) {
                masks_.insert(layer.mask);
                return;
            }
            product.kind.aux_bits = 0;
            product.aux = nullptr;
            masks_.erase(layer.mask);
        }
        product.kind.epilogue = relu ? lt::Epilogue::ReluBias : lt::Epilogue::Bias;
        if (multiply_fused(product)) return;
        product.kind.epilogue = lt::Epilogue::None;
        product.bias = nullptr;
        must_multiply(product);
        kernels_.add_bias.launch(gpu_->grid_for(layer.output.rows * layer.output.columns), stream_,
                                 layer.output.data, U64{layer.output.stride}, layer.bias,
                                 U64{layer.output.rows}, U64{layer.output.columns}, int{relu});
    }

    void linear_gradients(const LinearGradients& layer) override {
        Product product;
        product.kind = {.op_a = lt::Operation::None,
                        .op_b = lt::Operation::Transpose,
                        .m = layer.input.columns,
                        .n = layer.delta.columns,
                        .k = layer.delta.rows,
                        .lda = layer.input.stride,
                        .ldb = layer.delta.stride,
                        .ldd = layer.weight_gradient.stride};
        product.a = layer.input.data;
        product.b = layer.delta.data;
        product.d = layer.weight_gradient.data;
        // How the epilogue adds is the library's affair; our kernel's order is always the same.
        if (!options_.deterministic) {
            product.kind.epilogue = lt::Epilogue::BgradB;
            product.bias = layer.bias_gradient;
            if (multiply_fused(product)) return;
            product.kind.epilogue = lt::Epilogue::None;
            product.bias = nullptr;
        }
        must_multiply(product);
        bias_gradient(layer.delta, layer.bias_gradient);
    }

    void input_gradient(const InputGradient& layer) override {
        Product product;
        product.kind = {.op_a = lt::Operation::None,
                        .op_b = lt::Operation::None,
                        .m = layer.below_delta.columns,
                        .n = layer.delta.rows,
                        .k = layer.delta.columns,
                        .lda = layer.weight.stride,
                        .ldb = layer.delta.stride,
                        .ldd = layer.below_delta.stride};
        product.a = layer.weight.data;
        product.b = layer.delta.data;
        product.d = layer.below_delta.data;
        if (masks_.contains(layer.below_mask)) {
            product.kind.epilogue = lt::Epilogue::DRelu;
            product.kind.aux_bits = rounded_up(layer.below_delta.columns, kMaskBits);
            product.aux = layer.below_mask;
            if (multiply_fused(product)) return;
            product.kind.epilogue = lt::Epilogue::None;
            product.kind.aux_bits = 0;
            product.aux = nullptr;
        }
        must_multiply(product);
        const Matrix& below = layer.below_delta;
        kernels_.relu_gradient.launch(gpu_->grid_for(below.rows * below.columns), stream_, below.data,
                                      static_cast<const void*>(layer.below_output.data), U64{below.stride},
                                      U64{below.rows}, U64{below.columns});
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

    static Product forward_product(const Linear& layer) {
        Product product;
        product.kind = {.op_a = lt::Operation::Transpose,
                        .op_b = lt::Operation::None,
                        .m = layer.output.columns,
                        .n = layer.output.rows,
                        .k = layer.input.columns,
                        .lda = layer.weight.stride,
                        .ldb = layer.input.stride,
                        .ldd = layer.output.stride};
        product.a = layer.weight.data;
        product.b = layer.input.data;
        product.d = layer.output.data;
        product.bias = layer.bias;
        return product;
    }

    /// False: the library cannot do it in one pass.
    [[nodiscard]] bool multiply_fused(const Product& product) {
        return options_.epilogues && products_.multiply(product);
    }

    void must_multiply(const Product& product) {
        if (products_.multiply(product)) return;
        throw ddp::Error(fmt::format("{} has no algorithm for a {} product of {} x {} x {} on CUDA device {}",
                                     products_.api().library, name_of(options_.precision), product.kind.m,
                                     product.kind.n, product.kind.k, gpu_->index()));
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
    Products products_;
    ddp::cuda::DeviceMemory losses_, hits_;
    ddp::cuda::PinnedMemory read_back_;
    std::map<std::size_t, ddp::cuda::DeviceMemory> parts_;  ///< sums of runs of rows, by columns
    std::unordered_set<const void*> masks_;                 ///< those that cuBLASLt has written, and can read
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(std::shared_ptr<const ddp::cuda::Gpu> gpu,
                                           std::shared_ptr<const lt::Api> cublaslt, ddp::cuda::Stream stream,
                                           CudaOptions options) {
    return std::make_unique<CudaCompute>(std::move(gpu), std::move(cublaslt), stream, options);
}

}  // namespace train
