#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "compute.h"
#include "ddp/worker/private_memory.h"
#include "matrix.h"

namespace train {
namespace {

float* row_of(const Matrix& matrix, std::size_t row) {
    return static_cast<float*>(matrix.data) + row * matrix.stride;
}

const float* values_of(const Matrix& matrix) { return static_cast<const float*>(matrix.data); }

/// Rows are contiguous, as stride_for says.
class CpuCompute final : public Compute {
  public:
    ddp::Device device() const override { return {}; }
    ddp::DType dtype() const override { return ddp::DType::F32; }
    std::string describe() const override { return matrix_library(); }
    std::size_t stride_for(std::size_t columns) const override { return columns; }

    Memory allocate(std::size_t bytes) override { return ddp::private_memory(bytes); }

    void upload(const void* from, const ddp::Buffer& to) override { std::memcpy(to.data, from, to.bytes()); }
    void round(const ddp::Buffer& from, const ddp::Buffer& to) override { upload(from.data, to); }
    void stage(const BatchSource& from, const Matrix& to, std::int32_t* labels) override {
        for (std::size_t r = 0; r < from.count; ++r) {
            const std::size_t row = from.order != nullptr ? from.order[r] : r;
            std::copy_n(from.values + row * to.columns, to.columns, row_of(to, r));
            labels[r] = from.labels[row];
        }
    }

    void linear(const Linear& layer) override {
        multiply(Transposed::B, layer.output.rows, layer.output.columns, layer.input.columns,
                 values_of(layer.input), values_of(layer.weight), row_of(layer.output, 0));
        const auto* const bias = static_cast<const float*>(layer.bias);
        const float floor = layer.activation == Activation::Relu ? 0.0F : -INFINITY;
        for (std::size_t s = 0; s < layer.output.rows; ++s) {
            float* row = row_of(layer.output, s);
            for (std::size_t o = 0; o < layer.output.columns; ++o) row[o] = std::max(row[o] + bias[o], floor);
        }
    }

    void linear_gradients(const LinearGradients& layer) override {
        auto* const bias = static_cast<float*>(layer.bias_gradient);
        if (layer.into == Into::Replace) std::fill_n(bias, layer.delta.columns, 0.0F);
        for (std::size_t s = 0; s < layer.delta.rows; ++s) {
            const float* delta = row_of(layer.delta, s);
            for (std::size_t o = 0; o < layer.delta.columns; ++o) bias[o] += delta[o];
        }
        multiply(Transposed::A, layer.delta.columns, layer.input.columns, layer.delta.rows,
                 values_of(layer.delta), values_of(layer.input), row_of(layer.weight_gradient, 0),
                 layer.into);
    }

    void input_gradient(const InputGradient& layer) override {
        float* const below = row_of(layer.below_delta, 0);
        multiply(Transposed::None, layer.delta.rows, layer.weight.columns, layer.weight.rows,
                 values_of(layer.delta), values_of(layer.weight), below);
        const float* const output = values_of(layer.below_output);
        for (std::size_t i = 0; i < layer.below_delta.rows * layer.below_delta.columns; ++i)
            below[i] = output[i] > 0 ? below[i] : 0.0F;
    }

    void cross_entropy(const CrossEntropy& loss) override {
        const std::size_t samples = loss.logits.rows, classes = loss.logits.columns;
        const float share = 1.0F / static_cast<float>(std::max<std::size_t>(samples, 1) * loss.batches);
        const float scale = loss.loss_scale != nullptr ? share * *loss.loss_scale : share;
        double loss_sum = 0;
        for (std::size_t s = 0; s < samples; ++s) {
            const float* logits = row_of(loss.logits, s);
            float* delta = row_of(loss.delta, s);
            const auto label = static_cast<std::size_t>(loss.labels[s]);
            const float* best = std::max_element(logits, logits + classes);
            float total = 0;
            // Subtract the largest logit first, so that exp cannot overflow.
            for (std::size_t o = 0; o < classes; ++o) total += delta[o] = std::exp(logits[o] - *best);
            for (std::size_t o = 0; o < classes; ++o) delta[o] *= scale / total;
            delta[label] -= scale;
            loss_sum += static_cast<double>(std::log(total) + *best - logits[label]);
            score_.correct += static_cast<std::size_t>(best - logits) == label ? 1 : 0;
        }
        score_.loss_sum += loss_sum;
    }

    std::function<void()> record(std::function<void()> work) override { return work; }

    Score take_score() override { return std::exchange(score_, {}); }

  private:
    Score score_;
};

}  // namespace

std::unique_ptr<Compute> make_cpu_compute() { return std::make_unique<CpuCompute>(); }

}  // namespace train
