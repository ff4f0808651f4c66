#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "ddp/optimizer.h"

namespace {

using ddp::Buffer;
using ddp::buffer_of;
using ddp::Optimizer;
using ddp::Tensor;

struct Model {
    std::array<float, 4> values = {1.0F, -2.0F, 0.5F, 3.0F};
    std::array<float, 4> gradient = {};
    std::vector<Tensor> parameters() { return {ddp::tensor_of("w", std::span<float>(values), {4})}; }
    void step(Optimizer& optimizer, int t) {
        const auto time = static_cast<float>(t);
        gradient = {0.1F * (time + 1), -0.2F, 0.3F * (time - 2), values[3]};
        const std::array<Buffer, 1> gradients = {buffer_of(std::span<float>(gradient))};
        optimizer.step(gradients);
    }
};

void expect_after_five_steps(Model& model, Optimizer& optimizer, const std::array<double, 4>& expected) {
    for (int t = 0; t < 5; ++t) model.step(optimizer, t);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(model.values[i], expected[i], 2e-6) << i;
}

// The expected values are torch 2.15's torch.optim.SGD and torch.optim.AdamW on the same gradients.

TEST(Sgd, StepsAsPyTorch) {
    Model model;
    const auto sgd = ddp::make_sgd(model.parameters(), {.learning_rate = 0.1});
    expect_after_five_steps(model, *sgd, {0.8499999642372131, -1.9000000953674316, 0.5, 1.7714699506759644});
}

TEST(Sgd, StepsAsPyTorchWithMomentumAndWeightDecay) {
    Model model;
    const auto sgd =
        ddp::make_sgd(model.parameters(), {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01});
    expect_after_five_steps(
        model, *sgd, {0.6703619360923767, -1.7115113735198975, 0.7240492701530457, -0.11044488102197647});
}

TEST(Sgd, StepsAsPyTorchWithNesterov) {
    Model model;
    const auto sgd = ddp::make_sgd(
        model.parameters(), {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
    expect_after_five_steps(
        model, *sgd, {0.549112856388092, -1.6312516927719116, 0.6977571845054626, -0.33237168192863464});
}

TEST(AdamW, StepsAsPyTorch) {
    Model model;
    const auto adamw = ddp::make_adamw(model.parameters(), {.learning_rate = 0.05, .weight_decay = 0.1});
    expect_after_five_steps(model, *adamw,
                            {0.735137939453125, -1.702985405921936, 0.6257837414741516, 2.6787667274475098});
}

TEST(AdamW, StepsAsPyTorchWithOtherBetasAndEpsilon) {
    Model model;
    const auto adamw = ddp::make_adamw(
        model.parameters(),
        {.learning_rate = 0.05, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-4, .weight_decay = 0.1});
    expect_after_five_steps(
        model, *adamw, {0.7300028800964355, -1.7031086683273315, 0.6092275381088257, 2.6790738105773926});
}

TEST(Optimizer, LeavesAParameterWithoutGradientAlone) {
    std::array<float, 2> a = {1, 2}, b = {3, 4}, g = {1, 1};
    const auto sgd = ddp::make_sgd(
        {ddp::tensor_of("a", std::span<float>(a), {2}), ddp::tensor_of("b", std::span<float>(b), {2})},
        {.learning_rate = 1, .momentum = 0.5, .weight_decay = 0.5});
    const std::array<Buffer, 2> gradients = {Buffer{}, buffer_of(std::span<float>(g))};
    sgd->step(gradients);
    EXPECT_EQ(a, (std::array<float, 2>{1, 2}));
    EXPECT_NE(b, (std::array<float, 2>{3, 4}));
}

TEST(Optimizer, ContinuesBitwiseEqualFromItsSavedState) {
    for (const bool adam : {false, true}) {
        const auto make = [adam](Model& model) {
            return adam ? ddp::make_adamw(model.parameters(), {.learning_rate = 0.05})
                        : ddp::make_sgd(model.parameters(), {.learning_rate = 0.05, .momentum = 0.9});
        };
        Model whole, resumed;
        const auto first = make(whole);
        for (int t = 0; t < 3; ++t) whole.step(*first, t);

        resumed.values = whole.values;
        const auto second = make(resumed);
        const std::vector<Tensor> from = first->state(), to = second->state();
        ASSERT_EQ(from.size(), adam ? 2U : 1U);
        for (std::size_t i = 0; i < from.size(); ++i) {
            EXPECT_EQ(from[i].name, to[i].name);
            std::copy_n(static_cast<const std::byte*>(from[i].memory.data), from[i].memory.bytes(),
                        static_cast<std::byte*>(to[i].memory.data));
        }
        second->set_steps(first->steps());

        for (int t = 3; t < 6; ++t) {
            whole.step(*first, t);
            resumed.step(*second, t);
        }
        EXPECT_EQ(whole.values, resumed.values);
    }
}

TEST(Optimizer, NamesItsStateAfterTheParameters) {
    Model model;
    const auto adamw = ddp::make_adamw(model.parameters(), {});
    EXPECT_EQ(adamw->name(), "adamw");
    EXPECT_EQ(adamw->state().at(0).name, "exp_avg.w");
    EXPECT_EQ(adamw->state().at(1).name, "exp_avg_sq.w");
    EXPECT_TRUE(ddp::make_sgd(model.parameters(), {})->state().empty());
}

TEST(Optimizer, RefusesGradientsThatDoNotFit) {
    Model model;
    const auto sgd = ddp::make_sgd(model.parameters(), {});
    std::array<float, 3> three = {};
    const std::array<Buffer, 1> wrong = {buffer_of(std::span<float>(three))};
    EXPECT_THROW(sgd->step(wrong), ddp::InvalidInput);
    EXPECT_THROW(sgd->step({}), ddp::InvalidInput);
    EXPECT_EQ(sgd->steps(), 0U);
}

TEST(Optimizer, RefusesOptionsThatMakeNoSense) {
    Model model;
    EXPECT_THROW(ddp::make_sgd(model.parameters(), {.learning_rate = -1}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd(model.parameters(), {.learning_rate = std::nan("")}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd(model.parameters(), {.nesterov = true}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_adamw(model.parameters(), {.beta1 = 1}), ddp::InvalidInput);
}

TEST(Optimizer, RefusesParametersItCannotUpdate) {
    std::array<double, 2> values = {};
    EXPECT_THROW(ddp::make_sgd({ddp::tensor_of("w", std::span<double>(values), {2})}, {}), ddp::InvalidInput);
}

}  // namespace
