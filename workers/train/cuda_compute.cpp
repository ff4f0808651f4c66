#include "cuda_compute.h"

#include <fmt/core.h>

#include <numeric>
#include <utility>
#include <vector>

#include "ddp/cuda/graph.h"
#include "layer_kernels.h"
#include "layer_products.h"
#include "relu_masks.h"
#include "tuner.h"
#include "tuning.h"
#include "ways.h"

namespace train {
namespace {

using U64 = unsigned long long;  // as the kernels take them

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

class Captured final : public Compute::Recorded {
  public:
    Captured(std::unique_ptr<ddp::cuda::Graph> graph, ddp::cuda::Stream stream)
        : graph_(std::move(graph)), stream_(stream) {}
    void run() override { graph_->launch(stream_); }

  private:
    std::unique_ptr<ddp::cuda::Graph> graph_;
    ddp::cuda::Stream stream_;
};

class CudaCompute final : public Compute {
  public:
    CudaCompute(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const lt::Api> cublaslt,
                ddp::cuda::Stream stream, CudaOptions options)
        : gpu_(std::move(gpu)),
          stream_(stream),
          options_(options),
          kernels_(gpu_, stream, dtype_of(options.precision)),
          tuner_(make_tuner()),
          products_(gpu_, std::move(cublaslt), stream,
                    {.type = data_type_of(dtype_of(options.precision)),
                     .allow_tf32 = options.precision == Precision::Tf32,
                     .deterministic = options.deterministic},
                    tuner_.get()),
          ways_(tuner_.get()),
          losses_(gpu_, LayerKernels::kSlots * sizeof(double)),
          hits_(gpu_, LayerKernels::kSlots * sizeof(U64)),
          read_back_(gpu_, LayerKernels::kSlots * (sizeof(double) + sizeof(U64))) {
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
            "timed {} kinds of products in {:.1f} s: {} take another algorithm than cuBLASLt's first; {} "
            "tasks "
            "are done by product and kernel, not by an epilogue",
            products_.tuned().kinds, tuner_->seconds(), products_.tuned().moved, ways_.plain());
    }
    std::vector<Timing> timings() const override {
        std::vector<Timing> all = products_.timings();
        const std::vector<Timing> of_ways = ways_.timings();
        all.insert(all.end(), of_ways.begin(), of_ways.end());
        return all;
    }

    Memory allocate(std::size_t bytes) override {
        auto memory = std::make_shared<ddp::cuda::DeviceMemory>(gpu_, bytes);
        if (bytes > 0) memory->clear(stream_);
        return {memory->get(), [memory](std::byte*) {}};
    }

    /// 16 bytes: what the device moves at once.
    std::size_t stride_for(std::size_t columns) const override {
        const std::size_t elements = 16 / ddp::size_of(dtype());
        return (columns + elements - 1) / elements * elements;
    }
    std::size_t mask_bytes(std::size_t rows, std::size_t columns) const override {
        return relu_mask_bytes(rows, columns);
    }

    void upload(const void* from, const ddp::Buffer& to) override {
        ddp::cuda::copy(*gpu_, to.data, from, to.bytes(), stream_);
        ddp::cuda::synchronize(*gpu_, stream_);
    }
    void round(const ddp::Buffer& from, const ddp::Buffer& to) override {
        kernels_.stage(static_cast<const float*>(from.data), nullptr, {to.data, 1, to.count, to.count});
    }

    void stage(const BatchSource& from, const Matrix& to, std::int32_t* labels) override {
        kernels_.stage(from.values, from.order, to);
        kernels_.stage_labels(from, labels);
    }

    void linear(const Linear& layer) override {
        if (layer.output.rows == 0) return;
        const bool relu = layer.activation == Activation::Relu;
        const Product product = product_of(layer.output, layer.input, kAsIs, layer.weight, kTransposed);
        const Tuner::Run run = [&](std::size_t way) { return linear_by(way, layer, product); };
        const auto* const times = ways_.times(
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
        const Tuner::Run run = [&](std::size_t way) { return linear_gradients_by(way, layer, product); };
        const auto* const times =
            ways_.times({Task::What::LinearGradients, product.kind}, kGradientWays, run);
        go(times != nullptr ? fastest(*times) : kGradientFused, kGradientWays, run, product);
    }

    void input_gradient(const InputGradient& layer) override {
        if (layer.delta.rows == 0) return;
        const Product product = product_of(layer.below_delta, layer.delta, kAsIs, layer.weight, kAsIs);
        const bool by_mask = masks_.is_written(layer.below_mask);
        const Tuner::Run run = [&](std::size_t way) { return input_gradient_by(way, layer, product); };
        const auto* const times =
            ways_.times({by_mask ? Task::What::InputGradientByMask : Task::What::InputGradient, product.kind},
                        kGradientWays, run);
        if (times != nullptr && by_mask)
            masks_.note_backward({layer.below_mask, layer.delta.rows},
                                 {(*times)[kGradientFused], (*times)[kGradientPlain]});
        go(times != nullptr ? fastest(*times) : kGradientFused, kGradientWays, run, product);
    }

    void cross_entropy(const CrossEntropy& loss) override {
        kernels_.cross_entropy(loss, losses_.as<double>(), hits_.as<U64>());
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
        auto* const hits = reinterpret_cast<U64*>(losses + LayerKernels::kSlots);
        ddp::cuda::copy(*gpu_, losses, losses_.get(), losses_.bytes(), stream_);
        ddp::cuda::copy(*gpu_, hits, hits_.get(), hits_.bytes(), stream_);
        losses_.clear(stream_);
        hits_.clear(stream_);
        ddp::cuda::synchronize(*gpu_, stream_);
        return {std::accumulate(losses, losses + LayerKernels::kSlots, 0.0),
                std::accumulate(hits, hits + LayerKernels::kSlots, U64{0})};
    }

  private:
    std::unique_ptr<Tuner> make_tuner() const {
        if (!options_.tune || options_.deterministic) return nullptr;
        return std::make_unique<Tuner>(gpu_, stream_);
    }

    void go(std::size_t preferred, std::size_t ways, const Tuner::Run& run, const Product& product) const {
        if (Ways::go(preferred, ways, run)) return;
        // On a device that has failed the library refuses everything: then this tells, and throws.
        if (!ddp::cuda::is_capturing(gpu_->api(), stream_)) ddp::cuda::synchronize(*gpu_, stream_);
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
                kernels_.add_bias(layer.output, layer.bias, layer.activation);
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
        kernels_.bias_gradient(layer.delta, layer.bias_gradient);
        return true;
    }

    bool input_gradient_by(std::size_t way, const InputGradient& layer, const Product& product) {
        if (way == kGradientFused) {
            return masks_.is_written(layer.below_mask) &&
                   multiply_fused(with_mask(product, lt::Epilogue::DRelu, layer.below_mask));
        }
        if (!products_.multiply(product)) return false;
        kernels_.relu_gradient(layer.below_delta, layer.below_output.data);
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

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    CudaOptions options_;
    LayerKernels kernels_;
    std::unique_ptr<Tuner> tuner_;  ///< null: nothing is timed
    Products products_;
    Ways ways_;
    ddp::cuda::DeviceMemory losses_, hits_;
    ddp::cuda::PinnedMemory read_back_;
    ReluMasks masks_;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(std::shared_ptr<const ddp::cuda::Gpu> gpu,
                                           std::shared_ptr<const lt::Api> cublaslt, ddp::cuda::Stream stream,
                                           CudaOptions options) {
    return std::make_unique<CudaCompute>(std::move(gpu), std::move(cublaslt), stream, options);
}

}  // namespace train
