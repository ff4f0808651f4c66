#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ddp/checkpoint.h"
#include "ddp/optimizer.h"
#include "tests/support/temporary_directory.h"

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

std::int64_t step_count(const Optimizer& optimizer, std::string_view name) {
    for (const Tensor& tensor : optimizer.state()) {
        if (tensor.name == name) return *static_cast<const std::int64_t*>(tensor.memory.data);
    }
    return -1;
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

/// Two parameters; the second has a gradient in the steps 3, 4 and 7 of eight only.
struct ModelWithUnused {
    std::array<float, 2> always = {1.0F, -2.0F}, seldom = {0.5F, 3.0F};
    std::array<float, 2> of_always = {}, of_seldom = {};
    std::vector<Tensor> parameters() {
        return {ddp::tensor_of("always", std::span<float>(always), {2}),
                ddp::tensor_of("seldom", std::span<float>(seldom), {2})};
    }
    void step(Optimizer& optimizer, int t) {
        const auto time = static_cast<float>(t);
        of_always = {0.1F * (time + 1), -0.2F};
        of_seldom = {0.3F * (time - 5), seldom[1]};
        const bool is_used = t == 3 || t == 4 || t == 7;
        const std::array<Buffer, 2> gradients = {buffer_of(std::span<float>(of_always)),
                                                 is_used ? buffer_of(std::span<float>(of_seldom)) : Buffer{}};
        optimizer.step(gradients);
    }
    void expect_after_eight_steps(Optimizer& optimizer, const std::array<double, 2>& expected_always,
                                  const std::array<double, 2>& expected_seldom) {
        for (int t = 0; t < 8; ++t) step(optimizer, t);
        for (std::size_t i = 0; i < 2; ++i) {
            EXPECT_NEAR(always[i], expected_always[i], 2e-6) << i;
            EXPECT_NEAR(seldom[i], expected_seldom[i], 2e-6) << i;
        }
    }
};

TEST(AdamW, CorrectsTheBiasOfEachParameterByItsOwnStepsAsPyTorch) {
    ModelWithUnused model;
    const auto adamw = ddp::make_adamw(model.parameters(), {.learning_rate = 0.05, .weight_decay = 0.1});
    model.expect_after_eight_steps(*adamw, {0.5768048167228699, -1.5283170938491821},
                                   {0.5939537882804871, 2.8060896396636963});
}

TEST(Sgd, BeginsTheMomentumOfEachParameterWithItsFirstGradientAsPyTorch) {
    for (const bool nesterov : {false, true}) {
        ModelWithUnused model;
        const auto sgd = ddp::make_sgd(
            model.parameters(),
            {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = nesterov});
        if (nesterov)
            model.expect_after_eight_steps(*sgd, {-0.2982214093208313, -1.2613202333450317},
                                           {0.6688966751098633, 0.9655789732933044});
        else
            model.expect_after_eight_steps(*sgd, {-0.03801034390926361, -1.3713064193725586},
                                           {0.6565394401550293, 1.4439736604690552});
    }
}

TEST(AdamW, MovesAParameterThatIsUsedLateForTheFirstTimeByTheLearningRateOnly) {
    std::array<float, 1> always = {1}, late = {1}, gradient = {0.5F};
    const auto adamw = ddp::make_adamw({ddp::tensor_of("always", std::span<float>(always), {1}),
                                        ddp::tensor_of("late", std::span<float>(late), {1})},
                                       {.learning_rate = 0.01, .weight_decay = 0});
    std::array<Buffer, 2> gradients = {buffer_of(std::span<float>(gradient)), Buffer{}};
    for (int t = 0; t < 1000; ++t) adamw->step(gradients);
    gradients[1] = gradients[0];
    adamw->step(gradients);
    EXPECT_NEAR(late[0], 0.99, 1e-6);
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
        ASSERT_EQ(from.size(), adam ? 4U : 2U);
        for (std::size_t i = 0; i < from.size(); ++i) {
            EXPECT_EQ(from[i].name, to[i].name);
            std::copy_n(static_cast<const std::byte*>(from[i].memory.data), from[i].memory.bytes(),
                        static_cast<std::byte*>(to[i].memory.data));
        }

        for (int t = 3; t < 6; ++t) {
            whole.step(*first, t);
            resumed.step(*second, t);
        }
        EXPECT_EQ(whole.values, resumed.values);
        EXPECT_EQ(second->steps(), 6U);
    }
}

TEST(AdamW, ContinuesEachParameterFromItsOwnStepsWhateverTheCountOfAll) {
    ModelWithUnused whole, resumed;
    const auto first = ddp::make_adamw(whole.parameters(), {.learning_rate = 0.05});
    for (int t = 0; t < 5; ++t) whole.step(*first, t);
    resumed.always = whole.always;
    resumed.seldom = whole.seldom;
    const auto second = ddp::make_adamw(resumed.parameters(), {.learning_rate = 0.05});
    const std::vector<Tensor> from = first->state(), to = second->state();
    for (std::size_t i = 0; i < from.size(); ++i)
        std::copy_n(static_cast<const std::byte*>(from[i].memory.data), from[i].memory.bytes(),
                    static_cast<std::byte*>(to[i].memory.data));
    for (int t = 5; t < 8; ++t) {
        whole.step(*first, t);
        resumed.step(*second, t);
    }
    EXPECT_EQ(whole.always, resumed.always);
    EXPECT_EQ(whole.seldom, resumed.seldom);
    EXPECT_EQ(step_count(*second, "step.always"), 8);
    EXPECT_EQ(step_count(*second, "step.seldom"), 3);
}

/// A checkpoint of a model that was trained for three steps, as it was written when AdamW counted the steps
/// of all parameters together.
struct OldCheckpoint {
    ddprun::test::TemporaryDirectory directory;
    Model model;
    std::unique_ptr<Optimizer> adamw = ddp::make_adamw(model.parameters(), {.learning_rate = 0.05});
    std::string path;

    OldCheckpoint() {
        for (int t = 0; t < 3; ++t) model.step(*adamw, t);
        std::vector<Tensor> state = adamw->state();
        std::erase_if(state, [](const Tensor& t) { return t.name.starts_with("step"); });
        EXPECT_EQ(state.size(), 2U);
        path = ddp::CheckpointDirectory(directory.path()).save(model.parameters(), state, {0, 3, {}, {}});
    }
};

TEST(AdamW, GoesOnFromACheckpointThatCountsTheStepsOfAllParametersTogether) {
    OldCheckpoint old;
    Model resumed;
    const auto adamw = ddp::make_adamw(resumed.parameters(), {.learning_rate = 0.05});
    ddp::load_checkpoint(old.path, resumed.parameters(), adamw->state());
    EXPECT_EQ(step_count(*adamw, "step.w"), 3);
    EXPECT_EQ(adamw->steps(), 3U);
    old.model.step(*old.adamw, 3);
    resumed.step(*adamw, 3);
    EXPECT_EQ(resumed.values, old.model.values);
}

TEST(AdamW, RefusesACheckpointThatLacksTheStepsOfOneParameterAlone) {
    const ddprun::test::TemporaryDirectory directory;
    ModelWithUnused model;
    const auto adamw = ddp::make_adamw(model.parameters(), {});
    std::vector<Tensor> state = adamw->state();
    std::erase_if(state, [](const Tensor& t) { return t.name == "step.seldom"; });
    const std::string path = ddp::CheckpointDirectory(directory.path()).save(model.parameters(), state, {});
    try {
        ddp::load_checkpoint(path, model.parameters(), adamw->state());
        FAIL();
    } catch (const ddp::InvalidInput& error) {
        EXPECT_EQ(error.what(), path +
                                    "/optimizer.safetensors: tensor 'step.seldom' is missing there, "
                                    "int64[] in this program");
    }
}

TEST(Optimizer, NamesItsStateAfterTheParameters) {
    Model model;
    const auto adamw = ddp::make_adamw(model.parameters(), {});
    EXPECT_EQ(adamw->name(), "adamw");
    EXPECT_EQ(adamw->state().at(0).name, "exp_avg.w");
    EXPECT_EQ(adamw->state().at(1).name, "exp_avg_sq.w");
    EXPECT_EQ(adamw->state().at(3).name, "step.w");
    EXPECT_EQ(adamw->state().at(2).name, "steps");
    EXPECT_EQ(ddp::make_sgd(model.parameters(), {})->state().size(), 1U) << "its steps alone";
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
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    EXPECT_THROW(ddp::make_sgd(model.parameters(), {.learning_rate = kInfinity}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd(model.parameters(), {.momentum = kInfinity}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd(model.parameters(), {.weight_decay = kInfinity}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_adamw(model.parameters(), {.learning_rate = kInfinity}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_adamw(model.parameters(), {.beta2 = std::nan("")}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_adamw(model.parameters(), {.epsilon = kInfinity}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_adamw(model.parameters(), {.weight_decay = kInfinity}), ddp::InvalidInput);
}

TEST(Optimizer, RefusesALearningRateThatMakesNoSenseInTheMiddleOfTrainingToo) {
    Model model;
    const auto sgd = ddp::make_sgd(model.parameters(), {.learning_rate = 0.5});
    for (const double rate : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()})
        EXPECT_THROW(sgd->set_learning_rate(rate), ddp::InvalidInput) << rate;
    EXPECT_EQ(sgd->learning_rate(), 0.5);
    try {
        sgd->set_learning_rate(-1);
    } catch (const ddp::InvalidInput& error) {
        EXPECT_STREQ(error.what(), "sgd: the learning rate is negative");
    }
    sgd->set_learning_rate(0);
    EXPECT_EQ(sgd->learning_rate(), 0);
}

TEST(Optimizer, RefusesParametersItCannotUpdate) {
    std::array<double, 2> values = {};
    EXPECT_THROW(ddp::make_sgd({ddp::tensor_of("w", std::span<double>(values), {2})}, {}), ddp::InvalidInput);
}

}  // namespace
