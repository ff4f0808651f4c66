#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ddp/process_group.h"

namespace train {

/// Memory on a compute's device; whoever holds it owns it.
using Memory = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

/// A row-major matrix in a compute's memory and element type. Borrowed.
struct Matrix {
    void* data = nullptr;
    std::size_t rows = 0, columns = 0;
    std::size_t stride = 0;  ///< elements from one row to the next, at least `columns`
};

/// How numbers are kept and multiplied. Sums are float32 in all of them, and so are the weights that the
/// optimizer keeps.
enum class Precision : std::uint8_t {
    Fp32,
    Tf32,  ///< kept as float32, multiplied with ten bits of fraction
    Bf16,
    Fp16  ///< with a loss scale
};
/// "fp32", "tf32", "bf16", "fp16".
const char* name_of(Precision precision);

/// Samples in the compute's memory: float32 rows without gaps, a label for each. Borrowed.
struct BatchSource {
    const float* values = nullptr;
    const std::int32_t* labels = nullptr;
    const std::uint32_t* order = nullptr;  ///< which rows and labels; null: the first `count`
    std::size_t count = 0;
};

enum class Activation : std::uint8_t { None, Relu };
/// What becomes of what was there before.
enum class Into : std::uint8_t { Replace, Add };

/// What a model has reached since it was last asked.
struct Score {
    double loss_sum = 0;  ///< over the samples, not their mean
    std::size_t correct = 0;
};

/// The arithmetic that a model is made of, on one kind of device. Calls are in order; on a GPU they only
/// queue work on one stream, and nothing but take_score and upload waits for it. Not thread-safe. Throws
/// ddp::Error when the device fails.
class Compute {
  public:
    virtual ~Compute() = default;

    [[nodiscard]] virtual ddp::Device device() const = 0;
    /// Element type of weights, gradients and activations.
    [[nodiscard]] virtual ddp::DType dtype() const = 0;
    /// "OpenBLAS", "cuBLAS 13.1.0, bf16": for the one line that says what is used.
    [[nodiscard]] virtual std::string describe() const = 0;

    /// Zeroed, 64-byte aligned or better.
    virtual Memory allocate(std::size_t bytes) = 0;
    /// The stride at which rows of so many elements are read fastest.
    [[nodiscard]] virtual std::size_t stride_for(std::size_t columns) const = 0;

    /// Bytes from host memory, as they are. Waits.
    virtual void upload(const void* from, const ddp::Buffer& to) = 0;
    /// float32 rounded to dtype(); both in the device's memory.
    virtual void round(const ddp::Buffer& from, const ddp::Buffer& to) = 0;
    /// A batch from where the feed has it: rounded to dtype() if need be, its labels beside it.
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

    /// below_delta = delta weight, where the layer below (a Relu layer) let something through.
    struct InputGradient {
        Matrix delta;
        Matrix weight;
        Matrix below_output;
        Matrix below_delta;
    };
    virtual void input_gradient(const InputGradient& layer) = 0;

    /// Adds to the score, and writes the gradient of the mean loss with respect to the logits, of so many
    /// batches alike, times the loss scale where there is one. The largest logit wins, the first of equals.
    struct CrossEntropy {
        Matrix logits;
        const std::int32_t* labels;
        Matrix delta;
        std::size_t batches;
        const float* loss_scale;  ///< one number in the device's memory; null: 1
    };
    virtual void cross_entropy(const CrossEntropy& loss) = 0;

    /// Work that is done again and again with the same memory.
    class Recorded {
      public:
        virtual ~Recorded() = default;
        virtual void run() = 0;
    };
    /// Of `work`, which must queue and nothing else: no allocation, no waiting. On a GPU it is
    /// called once, now, and every run is one launch; on a CPU a run calls it.
    virtual std::unique_ptr<Recorded> record(std::function<void()> work) = 0;

    /// What cross_entropy has added up since the last call. Waits.
    virtual Score take_score() = 0;
};

/// Host memory, float32: CBLAS where the build has it, plain loops otherwise.
std::unique_ptr<Compute> make_cpu_compute();

}  // namespace train
