// How train chooses between ways to multiply. What cuBLASLt offers is said to the fake (tests/support); the
// time that it pretends to take is far above any delay of this machine.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ddp/shared_library.h"
#include "tests/workers/train_on_cuda.h"
#include "train/relu_masks.h"
#include "train/tuning.h"

namespace {

using namespace train::testing;
using train::Compute;
using train::Mlp;
using train::Precision;

constexpr const char* kOffers = "FAKE_CUBLASLT_ALGORITHMS";

/// How often the fake library was asked to run the n-th of its algorithms.
long calls_of(int number) {
    static const auto calls = reinterpret_cast<long (*)(int)>(
        ddp::open_library({std::getenv("DDP_CUBLASLT_LIBRARY")})->resolve("fake_cublaslt_calls"));
    return calls(number);
}
/// The same since this object was made.
class CallsSince {
  public:
    long operator[](int number) const { return calls_of(number) - before_[static_cast<std::size_t>(number)]; }

  private:
    std::array<long, 5> before_ = {calls_of(0), calls_of(1), calls_of(2), calls_of(3), calls_of(4)};
};
constexpr long kLayers = 3;
/// Products of a pass: the input's gradient is not asked for below the first layer.
constexpr long kProducts = 3 * kLayers - 1;

TEST(Tuning, TakesTheFirstOfThoseThatAreAsGoodAsTheFastest) {
    EXPECT_EQ(train::fastest(std::vector<double>{3, 1, 2}), 1U);
    EXPECT_EQ(train::fastest(std::vector<double>{1.01, 1}), 0U);
    EXPECT_EQ(train::fastest(std::vector<double>{1.05, 1}), 1U);
    EXPECT_EQ(train::fastest(std::vector<double>{train::kNever, 7}), 1U);
    EXPECT_EQ(train::fastest(std::vector<double>{train::kNever, train::kNever}), 0U);
    EXPECT_EQ(train::finalists(std::vector<double>{2, 1, train::kNever, 1.2}),
              (std::vector<std::size_t>{1, 3}));
    EXPECT_TRUE(train::finalists(std::vector<double>{train::kNever}).empty());
    EXPECT_EQ(train::finalists(std::vector<double>{1.07, 1.06, 1.05, 1, 1.02, 1.03, 1.01}),
              (std::vector<std::size_t>{2, 3, 4, 5, 6}));
}

TEST(Tuning, RunsWhatIsQuickMoreOften) {
    EXPECT_EQ(train::runs_for(5, 0.8), 7);
    EXPECT_EQ(train::runs_for(5, 100), 1);
    EXPECT_EQ(train::runs_for(5, 0.001), 10);
    EXPECT_EQ(train::runs_for(5, 0), 10);
}

TEST(Tuning, AMaskPaysByBothPassesTogether) {
    EXPECT_TRUE(train::mask_pays({.with_mask = 5, .without_mask = 4}, {.by_mask = 3, .by_output = 5}));
    EXPECT_FALSE(train::mask_pays({.with_mask = 7, .without_mask = 4}, {.by_mask = 3, .by_output = 5}));
    // What is not used on the way back does not pay at any price.
    EXPECT_FALSE(
        train::mask_pays({.with_mask = 5, .without_mask = 4}, {.by_mask = train::kNever, .by_output = 5}));
    EXPECT_FALSE(
        train::mask_pays({.with_mask = train::kNever, .without_mask = 4}, {.by_mask = 3, .by_output = 5}));
    EXPECT_TRUE(
        train::mask_pays({.with_mask = 5, .without_mask = train::kNever}, {.by_mask = 3, .by_output = 5}));
}

TEST(Tuning, AMaskIsWrittenUntilBothPassesAreKnown) {
    train::ReluMasks masks;
    const int here = 0, there = 0;
    const train::ReluMasks::Layer layer{&here, 8}, other{&there, 8}, tail{&here, 3};
    EXPECT_TRUE(masks.is_wanted(layer));
    masks.note_backward(layer, {.by_mask = 9, .by_output = 1});
    EXPECT_TRUE(masks.is_wanted(layer)) << "the forward pass is not known";
    masks.note_forward(layer, {.with_mask = 2, .without_mask = 1});
    EXPECT_TRUE(masks.is_wanted(layer));
    masks.note_backward(layer, {.by_mask = 9, .by_output = 1});
    EXPECT_FALSE(masks.is_wanted(layer));
    masks.note_backward(layer, {.by_mask = 0.1, .by_output = 9});
    EXPECT_FALSE(masks.is_wanted(layer)) << "it was decided";
    EXPECT_TRUE(masks.is_wanted(other));
    EXPECT_TRUE(masks.is_wanted(tail));
}

TEST(TunedCompute, TakesTheFastestAlgorithmThatRuns) {
    const Variable offers(kOffers, "plain*5,refuse*1,big*1,reverse*2,plain*3");
    const OnCuda compute({.tune = true});
    const Pass expected = pass_on_cpu();
    expect_close(pass_on(compute, Precision::Fp32), expected, 1e-5);
    const CallsSince calls;
    expect_close(pass_on(compute, Precision::Fp32), expected, 1e-5);
    // The rehearsal, which had nothing left to find out, and the pass.
    EXPECT_EQ(calls[3], 2 * kProducts);
    EXPECT_EQ(calls[0] + calls[1] + calls[2] + calls[4], 0);
    EXPECT_NE(compute->describe_tuning().find("take another algorithm than cuBLASLt's first"),
              std::string::npos)
        << compute->describe_tuning();
}

TEST(TunedCompute, TimesNothingUnlessToldTo) {
    const Variable offers(kOffers, "refuse,void,plain*5,plain*1");
    for (const bool deterministic : {true, false}) {
        const OnCuda compute({.deterministic = deterministic, .tune = deterministic});
        const CallsSince calls;
        expect_close(pass_on(compute, Precision::Fp32), pass_on_cpu(), 1e-5);
        // The first that runs, once; one that was refused is not asked again for the same kind.
        EXPECT_EQ(calls[0], kProducts);
        EXPECT_EQ(calls[1], 0);
        EXPECT_EQ(calls[2], kProducts);
        EXPECT_EQ(calls[3], 0);
        pass_on(compute, Precision::Fp32);
        EXPECT_EQ(calls[0], kProducts);
        EXPECT_EQ(calls[2], 2 * kProducts);
        EXPECT_EQ(compute->describe_tuning(), "");
    }
}

TEST(TunedCompute, TimesNothingWhileAStepIsCaptured) {
    const Variable offers(kOffers, "plain*5,plain*1");
    const OnCuda compute({.tune = true});
    Mlp mlp(kWidths, 3, *compute);
    const auto values = compute.put(kValues);
    const auto labels = compute.put(kLabels);
    mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    const CallsSince calls;
    std::unique_ptr<Compute::Recorded> recorded;
    compute->rehearse([&] { recorded = compute->record([&] { mlp.forward(); }); });
    EXPECT_EQ(calls[0], kLayers);
    recorded->run();
    const double loss = compute->take_score().loss_sum;
    mlp.forward();
    EXPECT_EQ(calls[0], 2 * kLayers);
    EXPECT_EQ(calls[1], 0) << "outside of a rehearsal nothing is timed";
    compute->take_score();
    compute->rehearse([&] { mlp.forward(); });
    EXPECT_GT(calls[1], kLayers) << "what was only captured is timed in the next rehearsal";
    EXPECT_NEAR(compute->take_score().loss_sum, loss, 1e-4 * loss);
}

TEST(TunedCompute, SaysHowToDoWithoutWhenAnAlgorithmFailsOnTheDevice) {
    const OnCuda compute({.tune = true});
    const auto fail = reinterpret_cast<int (*)(void*, int)>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_fail"));
    constexpr int kIllegalAddress = 700;
    Mlp mlp(kWidths, 0, *compute);
    const auto values = compute.put(kValues);
    const auto labels = compute.put(kLabels);
    mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    fail(compute.stream(), kIllegalAddress);
    try {
        compute->rehearse([&] { mlp.forward(); });
        FAIL() << "nothing was said";
    } catch (const ddp::Error& error) {
        EXPECT_NE(std::string(error.what()).find("an illegal memory access was encountered"),
                  std::string::npos)
            << error.what();
        EXPECT_NE(std::string(error.what()).find("--tune-products off does without"), std::string::npos)
            << error.what();
    }
    fail(compute.stream(), 0);
}

TEST(TunedCompute, TakesAProductAndAKernelWhereTheEpilogueIsSlower) {
    const Pass expected = pass_on_cpu();
    // A kernel counts as 10. All epilogues; ReLU with the mask alone; the way back by the mask alone; the
    // gradient of biases alone.
    for (const char* offered : {"plain@1,plain*100@4,plain*100@6,plain*100@134,plain*100@136,plain*100@512",
                                "plain@1,plain@4,plain@6,plain*100@134,plain@136,plain@512",
                                "plain@1,plain@4,plain@6,plain@134,plain*100@136,plain@512",
                                "plain@1,plain@4,plain@6,plain@134,plain@136,plain*100@512"}) {
        const Variable offers(kOffers, offered);
        SCOPED_TRACE(offered);
        for (const Precision precision : {Precision::Fp32, Precision::Bf16}) {
            const OnCuda compute({.precision = precision, .tune = true});
            const double tolerance = precision == Precision::Fp32 ? 1e-5 : 5e-2;
            for (int pass = 0; pass < 3; ++pass)
                expect_close(pass_on(compute, precision), expected, tolerance);
        }
    }
}

TEST(TunedCompute, AMaskThatIsNotWrittenIsNotRead) {
    // The mask costs 15 in the forward pass and saves a kernel of 10 on the way back.
    const Variable offers(kOffers, "plain@1,plain@4,plain@6,plain*16@134,plain@136,plain@512");
    const OnCuda compute({.tune = true});
    Mlp mlp(kWidths, 3, *compute);
    std::vector<train::Memory> gradients;
    for (const ddp::Tensor& parameter : mlp.parameters())
        gradients.push_back(compute->allocate(parameter.memory.bytes()));
    const auto labels = compute.put(kLabels);
    const auto pass_with = [&](unsigned seed) {
        const auto values = compute.put(random_values(kValues.size(), seed));
        mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
        const auto forward_and_back = [&] {
            mlp.forward();
            mlp.backward({[&](std::size_t i) { return gradients[i].get(); }, [](std::size_t) {}});
        };
        if (seed == 1) compute->rehearse(forward_and_back);
        else forward_and_back();
        return compute.read<float>(gradients[0].get(), 13 * 37);
    };
    // Other samples, which other neurons let through: a stale mask would show.
    pass_with(1);
    const std::vector<float> stale = pass_with(2);
    const std::vector<float> third = pass_with(3);
    const OnCuda fresh({});
    Mlp again(kWidths, 3, *fresh);
    std::vector<train::Memory> expected;
    for (const ddp::Tensor& parameter : again.parameters())
        expected.push_back(fresh->allocate(parameter.memory.bytes()));
    const auto values = fresh.put(random_values(kValues.size(), 3));
    const auto fresh_labels = fresh.put(kLabels);
    again.stage({values.as<const float>(), fresh_labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    again.forward();
    again.backward({[&](std::size_t i) { return expected[i].get(); }, [](std::size_t) {}});
    const std::vector<float> right = fresh.read<float>(expected[0].get(), 13 * 37);
    for (std::size_t i = 0; i < right.size(); ++i) ASSERT_NEAR(third[i], right[i], 1e-5) << i;
    EXPECT_NE(stale, third);
}

}  // namespace
