#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ddp/process_group.h"

namespace train {

/// Memory on a compute's device, with its owner.
using Memory = std::shared_ptr<std::byte>;

/// A row-major matrix in a compute's memory and element type. Borrowed.
struct Matrix {
    void* data = nullptr;
    std::size_t rows = 0, columns = 0;
    std::size_t stride = 0;  ///< elements from one row to the next, at least `columns`
};

/// Storage and multiplication of numbers. All of them sum in float32, and keep float32 weights in the
/// optimizer.
enum class Precision : std::uint8_t {
    Fp32,
    Tf32,  ///< stored as float32, multiplied with ten bits of fraction
    Bf16,
    Fp16  ///< with a loss scale
};
/// "fp32", "tf32", "bf16", "fp16".
const char* name_of(Precision precision);

/// Samples in the compute's memory: contiguous float32 rows, one label each. Borrowed.
struct BatchSource {
    const float* values = nullptr;
    const std::int32_t* labels = nullptr;
    const std::uint32_t* order = nullptr;  ///< indices of rows and labels; null: the first `count`
    std::size_t count = 0;
};

enum class Activation : std::uint8_t { None, Relu };
/// Whether a result replaces the old content or is added to it.
enum class Into : std::uint8_t { Replace, Add };

/// Sums over the samples since the last take_score().
struct Score {
    double loss_sum = 0;  ///< summed over the samples, not their mean
    std::size_t correct = 0;
    std::uint64_t samples = 0;  ///< counted by Trainer

    Score& operator+=(const Score& other) {
        loss_sum += other.loss_sum;
        correct += other.correct;
        samples += other.samples;
        return *this;
    }
};

/// The arithmetic of a model on one kind of device. Calls run in order; on a GPU they only queue work on one
/// stream, and only take_score and upload wait for it. Not thread-safe. Throws ddp::Error when the device
/// fails.
class Compute {
  public:
    virtual ~Compute() = default;

    [[nodiscard]] virtual ddp::Device device() const = 0;
    /// Element type of weights, gradients and activations.
    [[nodiscard]] virtual ddp::DType dtype() const = 0;
    /// "OpenBLAS", "cuBLAS 13.1.0, bf16": for the start-up line.
    [[nodiscard]] virtual std::string describe() const = 0;

    /// Allocates zeroed memory, 64-byte aligned or better.
    virtual Memory allocate(std::size_t bytes) = 0;
    /// The stride with which rows of `columns` elements are read fastest.
    [[nodiscard]] virtual std::size_t stride_for(std::size_t columns) const = 0;

    /// Copies bytes from host memory. Waits.
    virtual void upload(const void* from, const ddp::Buffer& to) = 0;
    /// Rounds float32 to dtype(); both in the device's memory.
    virtual void round(const ddp::Buffer& from, const ddp::Buffer& to) = 0;
    /// Copies a batch from the feed, rounded to dtype() where needed, and its labels.
    virtual void stage(const BatchSource& from, const Matrix& to, std::int32_t* labels) = 0;

    /// A linear layer: output = activation(input weight^T + bias).
    struct Linear {
        Matrix input;   ///< [samples, inputs]
        Matrix weight;  ///< [outputs, inputs]
        const void* bias;
        Activation activation;
        Matrix output;  ///< [samples, outputs]
    };
    virtual void linear(const Linear& layer) = 0;

    /// `delta` is the loss's gradient with respect to the layer's output before its activation.
    struct LinearGradients {
        Matrix delta;  ///< [samples, outputs]
        Matrix input;
        Matrix weight_gradient;
        void* bias_gradient;
        Into into;
    };
    virtual void linear_gradients(const LinearGradients& layer) = 0;

    /// below_delta = delta weight, where the output of the layer below (a Relu layer) is positive, else 0.
    struct InputGradient {
        Matrix delta;
        Matrix weight;
        Matrix below_output;
        Matrix below_delta;
    };
    virtual void input_gradient(const InputGradient& layer) = 0;

    /// Adds to the score, and writes the gradient with respect to the logits of the mean loss over `batches`
    /// equal batches, times the loss scale. The prediction is the largest logit, the first of equals.
    struct CrossEntropy {
        Matrix logits;
        const std::int32_t* labels;
        Matrix delta;
        std::size_t batches;
        const float* loss_scale;  ///< device address of one number; null: 1
    };
    virtual void cross_entropy(const CrossEntropy& loss) = 0;

    /// Records `work`, which may only queue: no allocation, no waiting. Calling the result repeats it with
    /// the same memory. On a GPU `work` is called once, now, and every repetition is one launch.
    virtual std::function<void()> record(std::function<void()> work) = 0;

    /// The sums of cross_entropy since the last call. Waits.
    virtual Score take_score() = 0;
};

/// Host memory, float32: CBLAS where the build has it, plain loops otherwise.
std::unique_ptr<Compute> make_cpu_compute();

}  // namespace train
