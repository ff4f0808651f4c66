#include "cuda_compute.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/graph.h"
#include "ddp/cuda/memory.h"
#include "ddp/worker/slices.h"
#include "products.h"
#include "train_kernels.h"

namespace train {
namespace {

using ddp::cuda::check;
using U64 = unsigned long long;  // as the kernels take them

/// Number of partial sums of the score: row r of a batch adds to slot r % kSlots, always in the same order.
constexpr std::size_t kSlots = 8192;

kernels::Rows rows_of(const Matrix& matrix) {
    return {matrix.data, matrix.rows, matrix.columns, matrix.stride};
}

ddp::DType dtype_of(Precision precision) {
    switch (precision) {
        case Precision::Fp32:
        case Precision::Tf32: return ddp::DType::F32;
        case Precision::Bf16: return ddp::DType::BF16;
        case Precision::Fp16: return ddp::DType::F16;
    }
    return ddp::DType::F32;
}

/// The bits of the value 1.
std::uint32_t bits_of_one(ddp::DType type) {
    switch (type) {
        case ddp::DType::BF16: return 0x3F80;
        case ddp::DType::F16: return 0x3C00;
        default: return 0x3F800000;
    }
}

class CudaCompute final : public Compute {
  public:
    CudaCompute(std::shared_ptr<const ddp::cuda::Gpu> gpu, std::shared_ptr<const cublas::Api> cublas,
                ddp::cuda::Stream stream, Precision precision)
        : gpu_(std::move(gpu)),
          stream_(stream),
          precision_(precision),
          type_(ddp::cuda::element_type(dtype_of(precision)).value()),
          products_(gpu_, std::move(cublas), stream, precision),
          losses_(gpu_, kSlots * sizeof(double)),
          hits_(gpu_, kSlots * sizeof(U64)),
          read_back_(gpu_, kSlots * (sizeof(double) + sizeof(U64))) {
        losses_.clear(stream_);
        hits_.clear(stream_);
    }

    ddp::Device device() const override { return {ddp::Device::Kind::Cuda, gpu_->index()}; }
    ddp::DType dtype() const override { return dtype_of(precision_); }
    std::string describe() const override {
        return fmt::format("cuBLAS {}, {}", products_.version(), name_of(precision_));
    }

    Memory allocate(std::size_t bytes) override {
        auto memory = std::make_shared<ddp::cuda::DeviceMemory>(gpu_, bytes);
        if (bytes > 0) memory->clear(stream_);
        return {memory, memory->get()};
    }

    /// Rows are multiples of 16 bytes, which the device moves at once.
    std::size_t stride_for(std::size_t columns) const override {
        return ddp::round_up(columns, 16 / ddp::size_of(dtype()));
    }

    void upload(const void* from, const ddp::Buffer& to) override {
        ddp::cuda::copy(to.data, from, to.bytes(), stream_);
        ddp::cuda::synchronize(stream_);
    }
    void round(const ddp::Buffer& from, const ddp::Buffer& to) override {
        put_rows(static_cast<const float*>(from.data), nullptr, {to.data, 1, to.count, to.count});
    }

    void stage(const BatchSource& from, const Matrix& to, std::int32_t* labels) override {
        put_rows(from.values, from.order, to);
        check(kernels::stage_labels(config_for(from.count), from.labels, from.order, labels, from.count),
              "staging labels");
    }

    void linear(const Linear& layer) override {
        if (layer.output.rows == 0) return;
        products_.multiply(layer.output, layer.input, Operation::AsIs, layer.weight, Operation::Transposed);
        check(kernels::add_bias(config_for(layer.output), rows_of(layer.output), layer.bias,
                                layer.activation == Activation::Relu),
              "adding a bias");
    }

    void linear_gradients(const LinearGradients& layer) override {
        const Matrix bias{layer.bias_gradient, 1, layer.delta.columns, layer.delta.columns};
        if (layer.delta.rows == 0 && layer.into == Into::Add) return;
        if (layer.delta.rows == 0) {
            clear(layer.weight_gradient);
            clear(bias);
            return;
        }
        products_.multiply(layer.weight_gradient, layer.delta, Operation::Transposed, layer.input,
                           Operation::AsIs, layer.into);
        products_.multiply(bias, ones(layer.delta.rows), Operation::AsIs, layer.delta, Operation::AsIs,
                           layer.into);
    }

    void input_gradient(const InputGradient& layer) override {
        if (layer.delta.rows == 0) return;
        products_.multiply(layer.below_delta, layer.delta, Operation::AsIs, layer.weight, Operation::AsIs);
        check(kernels::relu_gradient(config_for(layer.below_delta), rows_of(layer.below_delta),
                                     layer.below_output.data),
              "launching the gradient of ReLU");
    }

    void cross_entropy(const CrossEntropy& loss) override {
        if (loss.logits.rows == 0) return;
        const kernels::LaunchConfig config{type_, gpu_->grid_for_rows(std::min(loss.logits.rows, kSlots)),
                                           stream_};
        check(kernels::cross_entropy(config,
                                     {rows_of(loss.logits), rows_of(loss.delta), loss.labels, loss.batches,
                                      loss.loss_scale, losses_.as<double>(), hits_.as<U64>(), kSlots}),
              "launching the cross-entropy");
    }

    std::function<void()> record(std::function<void()> work) override {
        ddp::cuda::Capture capture(stream_);
        work();
        return [graph = std::shared_ptr(capture.end()), stream = stream_] { graph->launch(stream); };
    }

    Score take_score() override {
        auto* const losses = read_back_.as<double>();
        auto* const hits = reinterpret_cast<U64*>(losses + kSlots);
        ddp::cuda::copy(losses, losses_.get(), losses_.bytes(), stream_);
        ddp::cuda::copy(hits, hits_.get(), hits_.bytes(), stream_);
        losses_.clear(stream_);
        hits_.clear(stream_);
        ddp::cuda::synchronize(stream_);
        return {std::accumulate(losses, losses + kSlots, 0.0), std::accumulate(hits, hits + kSlots, U64{0})};
    }

  private:
    [[nodiscard]] kernels::LaunchConfig config_for(std::size_t elements) const {
        return {type_, gpu_->grid_for(elements), stream_};
    }
    [[nodiscard]] kernels::LaunchConfig config_for(const Matrix& matrix) const {
        return config_for(matrix.rows * matrix.columns);
    }
    /// Rounds contiguous float32 rows, in the order of `order` (null: unchanged).
    void put_rows(const float* from, const std::uint32_t* order, const Matrix& to) const {
        if (to.rows * to.columns > 0)
            check(kernels::stage(config_for(to), from, order, rows_of(to)), "staging a batch");
    }

    /// A row of ones: its product with a matrix gives the sums of the columns. Allocates, and so waits, when
    /// `count` is larger than ever before.
    Matrix ones(std::size_t count) {
        const std::size_t element = ddp::size_of(dtype());
        if (!ones_ || ones_->bytes() < count * element) {
            const std::uint32_t one = bits_of_one(dtype());
            std::vector<std::byte> row(count * element);
            for (std::size_t at = 0; at < row.size(); at += element) std::memcpy(&row[at], &one, element);
            ones_.emplace(gpu_, row.size());
            upload(row.data(), {ones_->get(), count, dtype(), device()});
        }
        return {ones_->get(), 1, count, count};
    }

    /// Requires contiguous rows.
    void clear(const Matrix& matrix) const {
        check(cudaMemsetAsync(matrix.data, 0, matrix.rows * matrix.columns * ddp::size_of(dtype()), stream_),
              "clearing gradients on a CUDA device");
    }

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    Precision precision_;
    ddp::device::ElementType type_;
    Products products_;
    ddp::cuda::DeviceMemory losses_, hits_;
    ddp::cuda::PinnedMemory read_back_;
    std::optional<ddp::cuda::DeviceMemory> ones_;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(std::shared_ptr<const ddp::cuda::Gpu> gpu,
                                           std::shared_ptr<const cublas::Api> cublas,
                                           ddp::cuda::Stream stream, Precision precision) {
    return std::make_unique<CudaCompute>(std::move(gpu), std::move(cublas), stream, precision);
}

}  // namespace train
