// Tests of train's arithmetic on a CUDA device. CUDA and cuBLAS are fakes over host memory (tests/support);
// the kernels are the real ones, compiled for the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>

#include "ddp/cuda/memory.h"
#include "ddp/testing.h"
#include "env/worker_env.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/train_on_cuda.h"
#include "train/batch_feed.h"
#include "train/compute.h"
#include "train/cublas_api.h"
#include "train/cuda_compute.h"
#include "train/learner.h"
#include "train/mlp.h"

namespace {

using namespace train::testing;
using train::Compute;
using train::Mlp;
using train::Precision;

TEST(CudaCompute, GivesTheCpusLossAndGradientsInEveryPrecision) {
    const Pass expected = pass_on_cpu();
    expect_close(pass_on_cuda(Precision::Fp32), expected, 1e-5);
    expect_close(pass_on_cuda(Precision::Tf32), expected, 4e-3);
    expect_close(pass_on_cuda(Precision::Fp16), expected, 4e-3);
    expect_close(pass_on_cuda(Precision::Bf16), expected, 5e-2);
}

TEST(CudaCompute, CountsTheSameHitsAsTheCpu) {
    EXPECT_EQ(pass_on_cuda().score.correct, pass_on_cpu().score.correct);
}

TEST(CudaCompute, ThrowsWhenTheLibraryCannotMultiplyAtAll) {
    const Variable variable("FAKE_CUBLAS", "refuse");
    try {
        pass_on_cuda(Precision::Fp16);
        FAIL() << "no exception was thrown";
    } catch (const ddp::Error& error) {
        EXPECT_NE(
            std::string(error.what())
                .find(
                    "did not start a fp16 product of 37 x 11 x 13 on CUDA device 0: CUBLAS_STATUS_NOT_SUPPORTED"),
            std::string::npos)
            << error.what();
    }
}

TEST(CudaCompute, NamesTheDevicesErrorWhenItMakesTheLibraryRefuse) {
    const Variable variable("FAKE_CUBLAS", "refuse");
    const OnCuda compute;
    const auto memory = compute.put(std::vector<float>(16));
    const auto lose = reinterpret_cast<int (*)(int)>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_lose_device"));
    constexpr int kIllegalAddress = 700;
    lose(kIllegalAddress);
    std::string said;
    try {
        const train::Matrix square{memory.get(), 4, 4, 4};
        compute->linear({square, square, memory.get(), train::Activation::None, square});
    } catch (const ddp::Error& error) {
        said = error.what();
    }
    lose(0);
    EXPECT_NE(said.find("an illegal memory access was encountered"), std::string::npos) << said;
}

TEST(CudaCompute, GivesTheSameBitsInEveryRun) {
    for (const Precision precision : {Precision::Fp32, Precision::Bf16}) {
        const Pass first = pass_on_cuda(precision);
        const Pass second = pass_on_cuda(precision);
        EXPECT_EQ(first.gradients, second.gradients);
        EXPECT_EQ(first.score.loss_sum, second.score.loss_sum);
        expect_close(first, pass_on_cpu(), precision == Precision::Fp32 ? 1e-5 : 5e-2);
    }
}

/// Compares a layer with plain loops: `rows` samples to `outputs`.
void expect_layer(const OnCuda& compute, Precision precision, std::size_t rows, std::size_t outputs) {
    constexpr std::size_t kInputs = 3;
    const std::size_t stride = compute->stride_for(outputs), in_stride = compute->stride_for(kInputs);
    const auto on_device = [&](const std::vector<float>& values) {
        train::Memory memory = compute->allocate(values.size() * ddp::size_of(compute->dtype()));
        const auto wide = compute.put(values);
        compute->round({wide.get(), values.size(), ddp::DType::F32, compute->device()},
                       {memory.get(), values.size(), compute->dtype(), compute->device()});
        compute.read<std::byte>(memory.get(), 1);
        return memory;
    };
    const auto on_host = [&](const train::Memory& memory, std::size_t count) {
        if (precision == Precision::Fp32) return compute.read<float>(memory.get(), count);
        std::vector<float> wide;
        for (const std::uint16_t bits : compute.read<std::uint16_t>(memory.get(), count))
            wide.push_back(widened(bits, precision));
        return wide;
    };
    const auto input = on_device(random_values(rows * in_stride, 1)),
               weight = on_device(random_values(outputs * kInputs, 2)),
               bias = on_device(random_values(outputs, 3)),
               output = on_device(std::vector<float>(rows * stride, 0)),
               delta = on_device(random_values(rows * stride, 4)),
               weight_gradient = on_device(std::vector<float>(outputs * kInputs)),
               bias_gradient = on_device(std::vector<float>(outputs));
    const train::Matrix in{input.get(), rows, kInputs, in_stride}, out{output.get(), rows, outputs, stride},
        down{delta.get(), rows, outputs, stride};
    compute->linear({.input = in,
                     .weight = {weight.get(), outputs, kInputs, kInputs},
                     .bias = bias.get(),
                     .activation = train::Activation::Relu,
                     .output = out});
    compute->linear_gradients({.delta = down,
                               .input = in,
                               .weight_gradient = {weight_gradient.get(), outputs, kInputs, kInputs},
                               .bias_gradient = bias_gradient.get(),
                               .into = train::Into::Replace});
    const auto x = on_host(input, rows * in_stride), w = on_host(weight, outputs * kInputs),
               b = on_host(bias, outputs), y = on_host(output, rows * stride),
               d = on_host(delta, rows * stride), gradient = on_host(bias_gradient, outputs);
    const double unit = precision == Precision::Fp32 ? 1e-5 : 2e-2;
    for (std::size_t o = 0; o < outputs; ++o) {
        double column = 0, size = 0;
        for (std::size_t r = 0; r < rows; ++r) {
            double sum = static_cast<double>(b[o]);
            for (std::size_t i = 0; i < kInputs; ++i)
                sum += static_cast<double>(x[r * in_stride + i]) * static_cast<double>(w[o * kInputs + i]);
            ASSERT_NEAR(y[r * stride + o], std::max(sum, 0.0), unit) << "row " << r << ", column " << o;
            column += static_cast<double>(d[r * stride + o]);
            size += std::abs(static_cast<double>(d[r * stride + o]));
        }
        ASSERT_NEAR(gradient[o], column, unit * std::max(1.0, size / 10)) << "column " << o;
    }
}

TEST(CudaCompute, AddsBiasesAndSumsColumnsOfAnyShape) {
    // The shapes have whole packs or none, and more packs than threads.
    for (const Precision precision : {Precision::Fp32, Precision::Bf16, Precision::Fp16}) {
        const OnCuda compute(precision);
        for (const std::size_t rows : {1, 15, 100, 1000})
            for (const std::size_t outputs : {1, 8, 10, 37, 64}) {
                SCOPED_TRACE(testing::Message()
                             << train::name_of(precision) << " " << rows << " x " << outputs);
                expect_layer(compute, precision, rows, outputs);
            }
    }
}

TEST(CudaCompute, AddsToTheGradientsOfTheLastBatch) {
    const OnCuda compute;
    const auto delta = compute.put(std::vector<float>{1, 2, 0, 0}),
               input = compute.put(std::vector<float>{3, 0, 0, 0}),
               weight_gradient = compute.put(std::vector<float>(2, 9.0F)),
               bias_gradient = compute.put(std::vector<float>(2, 9.0F));
    for (const train::Into into : {train::Into::Replace, train::Into::Add})
        compute->linear_gradients({.delta = {delta.get(), 1, 2, 4},
                                   .input = {input.get(), 1, 1, 4},
                                   .weight_gradient = {weight_gradient.get(), 2, 1, 1},
                                   .bias_gradient = bias_gradient.get(),
                                   .into = into});
    EXPECT_EQ(compute.read<float>(weight_gradient.get(), 2), (std::vector<float>{6, 12}));
    EXPECT_EQ(compute.read<float>(bias_gradient.get(), 2), (std::vector<float>{2, 4}));
}

TEST(CudaCompute, HasNoGradientForAnEmptyBatch) {
    const OnCuda compute;
    const auto weight_gradient = compute.put(std::vector<float>(6, 7.0F)),
               bias_gradient = compute.put(std::vector<float>(3, 7.0F)),
               delta = compute.put(std::vector<float>(4)), input = compute.put(std::vector<float>(4));
    compute->linear_gradients({.delta = {delta.get(), 0, 3, 4},
                               .input = {input.get(), 0, 2, 4},
                               .weight_gradient = {weight_gradient.get(), 3, 2, 2},
                               .bias_gradient = bias_gradient.get(),
                               .into = train::Into::Replace});
    EXPECT_EQ(compute.read<float>(weight_gradient.get(), 6), std::vector<float>(6, 0.0F));
    EXPECT_EQ(compute.read<float>(bias_gradient.get(), 3), std::vector<float>(3, 0.0F));
}

TEST(CudaCompute, MultipliesGradientsByTheLossScaleButNotTheLoss) {
    Pass expected = pass_on_cpu();
    for (std::vector<float>& gradient : expected.gradients)
        for (float& g : gradient) g *= 1024;
    expect_close(pass_on_cuda(Precision::Fp32, 1024), expected, 1e-5);
    expect_close(pass_on_cuda(Precision::Fp16, 1024), expected, 4e-3);
}

TEST(CudaCompute, SumsTheScoreUntilItIsTaken) {
    const OnCuda compute;
    Mlp mlp({2, 3}, 0, *compute);
    // There are more rows than the score has slots.
    constexpr std::size_t kMany = 20'000;
    const auto values = compute.put(std::vector<float>(2 * kMany, 0.0F));
    const auto labels = compute.put(std::vector<std::int32_t>(kMany, 0));
    for (int batch = 0; batch < 2; ++batch) {
        mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kMany});
        mlp.forward();
    }
    const train::Score score = compute->take_score();
    // All logits are equal: the prediction is the first class.
    EXPECT_EQ(score.correct, 2 * kMany);
    EXPECT_NEAR(score.loss_sum, 2 * kMany * std::log(3.0), 1);
    EXPECT_EQ(compute->take_score().correct, 0U);
    EXPECT_EQ(compute->take_score().loss_sum, 0);
}

TEST(CudaCompute, AcceptsHugeLogitsAndShowsInvalidOnes) {
    const OnCuda compute;
    Mlp mlp({1, 2}, 0, *compute);
    const auto loss_of = [&](float value) {
        const auto values = compute.put(std::vector<float>{value});
        const auto labels = compute.put(std::vector<std::int32_t>{0});
        mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, 1});
        mlp.forward();
        return compute->take_score().loss_sum;
    };
    EXPECT_TRUE(std::isfinite(loss_of(1e30F)));
    EXPECT_FALSE(std::isfinite(loss_of(NAN)));
}

TEST(CudaCompute, TakesRowsInAnyOrder) {
    const OnCuda compute;
    // The first width has packs of 8, the second none.
    for (const std::size_t width : {16UL, 5UL}) {
        Mlp mlp({width, 3}, 0, *compute);
        const std::vector<float> host = random_values(4 * width, 8);
        const auto values = compute.put(host);
        const auto labels = compute.put(std::vector<std::int32_t>{0, 1, 2, 0});
        const auto order = compute.put(std::vector<std::uint32_t>{2, 0, 3, 1});
        std::vector<float> sorted;
        for (const std::size_t row : {2, 0, 3, 1})
            sorted.insert(sorted.end(), host.begin() + static_cast<std::ptrdiff_t>(row * width),
                          host.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
        const auto sorted_values = compute.put(sorted);
        const auto sorted_labels = compute.put(std::vector<std::int32_t>{2, 0, 0, 1});
        mlp.stage(
            {values.as<const float>(), labels.as<const std::int32_t>(), order.as<const std::uint32_t>(), 4});
        mlp.forward();
        const double picked = compute->take_score().loss_sum;
        mlp.stage({sorted_values.as<const float>(), sorted_labels.as<const std::int32_t>(), nullptr, 4});
        mlp.forward();
        EXPECT_EQ(picked, compute->take_score().loss_sum);
        EXPECT_GT(picked, 0);
    }
}

TEST(CudaCompute, StartsWithTheCpusWeights) {
    const std::unique_ptr<Compute> cpu = train::make_cpu_compute();
    Mlp on_cpu(kWidths, 9, *cpu);
    const OnCuda compute;
    Mlp on_cuda(kWidths, 9, *compute);
    const ddp::Tensor mine = on_cuda.parameters()[0], theirs = on_cpu.parameters()[0];
    EXPECT_EQ(mine.memory.device, (ddp::Device{ddp::Device::Kind::Cuda, 0}));
    const auto* const first = static_cast<const float*>(theirs.memory.data);
    EXPECT_EQ(compute.read<float>(mine.memory.data, mine.memory.count),
              std::vector<float>(first, first + theirs.memory.count));
}

/// One worker over NCCL on device 0, set up like main() does.
class Worker {
  public:
    explicit Worker(std::vector<const char*> words)
        : options_(*train::parse_options(words)),
          device_(*train::open_compute_device(options_, 0)),
          group_(ddp::ProcessGroup::create(
              ddp::Context(ddp::testing::environment_of(0, 1)),
              {.device = device_.choice.device, .stream = device_.stream_handle()})),
          feed_(train::make_feed(device_, samples_, options_)),
          learner_(*group_, device_, options_, {samples_.features, 24, samples_.classes}, 100) {
        feed_->begin(subset_, all_rows(), {.batch_size = kBatch, .drop_last = true, .prefetch = 0});
    }
    void step() {
        do learner_.forward(feed_->next());
        while (!learner_.backward());
        learner_.step();
    }
    [[nodiscard]] double loss() { return learner_.take_score().loss_sum; }

  private:
    static constexpr std::size_t kBatch = 16, kRows = 1000;
    static std::vector<std::size_t> all_rows() {
        std::vector<std::size_t> rows(kRows);
        std::iota(rows.begin(), rows.end(), 0U);
        return rows;
    }
    train::Options options_;
    train::Samples samples_ = train::make_samples({kRows, 12, 4}, 1);
    train::Subset subset_{samples_, all_rows()};
    train::ComputeDevice device_;
    std::unique_ptr<ddp::ProcessGroup> group_;
    std::unique_ptr<train::BatchFeed> feed_;
    train::Learner learner_;
};

TEST(CudaLearner, DoesNotWaitForTheDeviceInAStep) {
    const auto blocking_calls = reinterpret_cast<long (*)()>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_blocking_calls"));
    for (const char* precision : {"--precision=fp32", "--precision=bf16", "--precision=fp16"}) {
        for (const char* more : {"--device=cuda", "--cuda-graph", "--deterministic"}) {
            Worker worker({precision, more, "--clip=0.5"});
            // Allocations and the capture happen once.
            for (int step = 0; step < 5; ++step) worker.step();
            const long before = blocking_calls();
            for (int step = 0; step < 10; ++step) worker.step();
            EXPECT_EQ(blocking_calls(), before) << precision << " " << more;
            EXPECT_TRUE(std::isfinite(worker.loss()));
            EXPECT_GT(blocking_calls(), before) << "reading the loss must wait";
        }
    }
}

TEST(CudaLearner, AccumulatesInGraphsToTheBitsOfStepsWithoutWaiting) {
    const auto blocking_calls = reinterpret_cast<long (*)()>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_blocking_calls"));
    for (const char* parts : {"--accumulate=2", "--accumulate=4"}) {
        Worker plain({"--device=cuda", parts}), graph({"--cuda-graph", parts});
        for (int step = 0; step < 4; ++step) plain.step(), graph.step();
        EXPECT_EQ(graph.loss(), plain.loss()) << parts;
        const long before = blocking_calls();
        for (int step = 0; step < 8; ++step) plain.step(), graph.step();
        EXPECT_EQ(blocking_calls(), before) << parts;
        EXPECT_EQ(graph.loss(), plain.loss()) << parts;
    }
}

TEST(CudaLearner, LearnsTheSameFromSamplesInHostMemory) {
    Worker kept({"--keep-data=device"}), streamed({"--device=cuda", "--keep-data=host"});
    for (int step = 0; step < 25; ++step) {
        kept.step();
        streamed.step();
    }
    EXPECT_EQ(streamed.loss(), kept.loss());
}

TEST(Cublas, NamesMissingEntryPoints) {
    const ddprun::Result<train::cublas::Api> api =
        train::cublas::api_from({"libold.so", [](const char* name) -> void* {
                                     static int something;
                                     return std::string(name) == "cublasGemmEx" ? nullptr : &something;
                                 }});
    ASSERT_FALSE(api);
    EXPECT_EQ(api.error().what, "libold.so lacks cublasGemmEx: cuBLAS 12 or newer is needed");
}

TEST(Cublas, NamesAMissingLibraryWithTheVariableToSet) {
    const char* const before = std::getenv("DDP_CUBLAS_LIBRARY");
    const std::string saved = before != nullptr ? before : "";
    {
        const ddprun::test::TemporaryDirectory empty;
        const std::string missing = empty.file("libcublas.so");
        const Variable variable("DDP_CUBLAS_LIBRARY", missing);
        const ddprun::Result<train::cublas::Api> api = train::cublas::load_api();
        ASSERT_FALSE(api);
        EXPECT_NE(api.error().what.find(missing), std::string::npos) << api.error().what;
        EXPECT_NE(api.error().what.find("DDP_CUBLAS_LIBRARY"), std::string::npos) << api.error().what;
    }
    if (before != nullptr) ::setenv("DDP_CUBLAS_LIBRARY", saved.c_str(), 1);
}

}  // namespace
