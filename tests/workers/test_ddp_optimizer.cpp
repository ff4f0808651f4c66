#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "ddp/checkpoint.h"
#include "ddp/cuda/numbers.h"
#include "ddp/optimizer.h"
#include "ddp/schedule.h"
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

void copy_state(const Optimizer& from, const Optimizer& into) {
    const std::vector<Tensor> source = from.state(), target = into.state();
    ASSERT_EQ(source.size(), target.size());
    for (std::size_t i = 0; i < source.size(); ++i) {
        EXPECT_EQ(source[i].name, target[i].name);
        std::copy_n(static_cast<const std::byte*>(source[i].memory.data), source[i].memory.bytes(),
                    static_cast<std::byte*>(target[i].memory.data));
    }
}

std::int64_t step_count(const Optimizer& optimizer, std::string_view name) {
    for (const Tensor& tensor : optimizer.state()) {
        if (tensor.name == name) return *static_cast<const std::int64_t*>(tensor.memory.data);
    }
    return -1;
}

// The expected values come from torch 2.15's torch.optim.SGD and torch.optim.AdamW on the same gradients.

TEST(Sgd, StepsLikePyTorch) {
    Model model;
    const auto sgd = ddp::make_sgd(model.parameters(), {.learning_rate = 0.1});
    expect_after_five_steps(model, *sgd, {0.8499999642372131, -1.9000000953674316, 0.5, 1.7714699506759644});
}

TEST(Sgd, StepsLikePyTorchWithNesterov) {
    Model model;
    const auto sgd = ddp::make_sgd(
        model.parameters(), {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
    expect_after_five_steps(
        model, *sgd, {0.549112856388092, -1.6312516927719116, 0.6977571845054626, -0.33237168192863464});
}

TEST(AdamW, StepsLikePyTorchWithOtherBetasAndEpsilon) {
    Model model;
    const auto adamw = ddp::make_adamw(
        model.parameters(),
        {.learning_rate = 0.05, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-4, .weight_decay = 0.1});
    expect_after_five_steps(
        model, *adamw, {0.7300028800964355, -1.7031086683273315, 0.6092275381088257, 2.6790738105773926});
}

/// Two parameters; the second has a gradient only in steps 3, 4 and 7 of eight.
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

TEST(AdamW, CorrectsTheBiasOfEachParameterByItsOwnStepsLikePyTorch) {
    ModelWithUnused model;
    const auto adamw = ddp::make_adamw(model.parameters(), {.learning_rate = 0.05, .weight_decay = 0.1});
    model.expect_after_eight_steps(*adamw, {0.5768048167228699, -1.5283170938491821},
                                   {0.5939537882804871, 2.8060896396636963});
}

TEST(Sgd, BeginsTheMomentumOfEachParameterWithItsFirstGradientLikePyTorch) {
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

TEST(AdamW, MovesAParameterByTheLearningRateInItsFirstLateStep) {
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

TEST(Optimizer, KeepsAParameterWithoutGradient) {
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
        copy_state(*first, *second);
        EXPECT_EQ(first->state().size(), adam ? 4U : 2U);
        for (int t = 3; t < 6; ++t) {
            whole.step(*first, t);
            resumed.step(*second, t);
        }
        EXPECT_EQ(whole.values, resumed.values);
        EXPECT_EQ(second->steps(), 6U);
    }
}

TEST(AdamW, ContinuesEachParameterFromItsOwnStepCount) {
    ModelWithUnused whole, resumed;
    const auto first = ddp::make_adamw(whole.parameters(), {.learning_rate = 0.05});
    for (int t = 0; t < 5; ++t) whole.step(*first, t);
    resumed.always = whole.always;
    resumed.seldom = whole.seldom;
    const auto second = ddp::make_adamw(resumed.parameters(), {.learning_rate = 0.05});
    copy_state(*first, *second);
    for (int t = 5; t < 8; ++t) {
        whole.step(*first, t);
        resumed.step(*second, t);
    }
    EXPECT_EQ(whole.always, resumed.always);
    EXPECT_EQ(whole.seldom, resumed.seldom);
    EXPECT_EQ(step_count(*second, "step.always"), 8);
    EXPECT_EQ(step_count(*second, "step.seldom"), 3);
}

/// A checkpoint of a model trained for three steps, as written when AdamW counted only common steps.
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

TEST(AdamW, ResumesFromACheckpointWithACommonStepCount) {
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

TEST(AdamW, RefusesACheckpointThatLacksOnlyOneParametersSteps) {
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
    EXPECT_EQ(ddp::make_sgd(model.parameters(), {})->state().size(), 1U) << "only the step count";
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

TEST(Optimizer, RefusesInvalidOptions) {
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

TEST(Optimizer, RefusesAnInvalidLearningRateDuringTraining) {
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
    std::array<std::int64_t, 2> values = {};
    EXPECT_THROW(ddp::make_sgd({ddp::tensor_of("w", std::span<std::int64_t>(values), {2})}, {}),
                 ddp::InvalidInput);
}

/// Two parameters of type T; the second is in a group with its own rate and weight decay.
template <class T>
struct ModelInGroups {
    std::array<T, 4> a = {1, -2, 0.5, 3}, b = a, of_a = {}, of_b = {};
    const std::vector<ddp::ParameterGroup> groups = {
        {.parameters = {"b"}, .learning_rate = 0.02, .weight_decay = 0.3}};
    std::vector<Tensor> parameters() {
        return {ddp::tensor_of("a", std::span<T>(a), {4}), ddp::tensor_of("b", std::span<T>(b), {4})};
    }
    void step(Optimizer& optimizer, int t) {
        const auto time = static_cast<T>(t);
        of_a = of_b = {T(0.1) * (time + 1), T(-0.2), T(0.3) * (time - 2), a[3]};
        of_b[3] = b[3];
        optimizer.step(std::array{buffer_of(std::span<T>(of_a)), buffer_of(std::span<T>(of_b))});
    }
    void expect_after_five_steps(Optimizer& optimizer, const std::array<double, 4>& expected_a,
                                 const std::array<double, 4>& expected_b) {
        for (int t = 0; t < 5; ++t) step(optimizer, t);
        const double tolerance = sizeof(T) == sizeof(double) ? 1e-14 : 2e-6;
        for (std::size_t i = 0; i < 4; ++i) {
            EXPECT_NEAR(a[i], expected_a[i], tolerance) << i;
            EXPECT_NEAR(b[i], expected_b[i], tolerance) << i;
        }
    }
};

TEST(Sgd, StepsParameterGroupsLikePyTorch) {
    ModelInGroups<float> model;
    const auto sgd =
        ddp::make_sgd(model.parameters(),
                      {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .groups = model.groups});
    model.expect_after_five_steps(
        *sgd, {0.6703619360923767, -1.7115113735198975, 0.7240492701530457, -0.11044488102197647},
        {0.8594450950622559, -1.7926563024520874, 0.5059818625450134, 2.036298990249634});
}

TEST(Sgd, StepsFloat64LikePyTorch) {
    ModelInGroups<double> model;
    const auto sgd =
        ddp::make_sgd(model.parameters(),
                      {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .groups = model.groups});
    model.expect_after_five_steps(
        *sgd, {0.670361906844589, -1.7115113676691778, 0.7240492882883595, -0.11044502493570293},
        {0.8594451188024319, -1.7926562255408638, 0.505981891229264, 2.036299121856672});
    EXPECT_EQ(sgd->state().at(0).memory.dtype, ddp::DType::F64);
}

TEST(AdamW, StepsParameterGroupsLikePyTorch) {
    ModelInGroups<float> model;
    const auto adamw = ddp::make_adamw(model.parameters(),
                                       {.learning_rate = 0.05, .weight_decay = 0.1, .groups = model.groups});
    model.expect_after_five_steps(
        *adamw, {0.735137939453125, -1.702985405921936, 0.6257837414741516, 2.6787667274475098},
        {0.8745068907737732, -1.8419089317321777, 0.5402740836143494, 2.8123838901519775});
}

TEST(AdamW, StepsFloat64LikePyTorch) {
    ModelInGroups<double> model;
    const auto adamw = ddp::make_adamw(model.parameters(),
                                       {.learning_rate = 0.05, .weight_decay = 0.1, .groups = model.groups});
    model.expect_after_five_steps(
        *adamw, {0.7351379225799409, -1.7029850498381236, 0.6257837468056247, 2.6787663985994823},
        {0.874506794660198, -1.8419085194588871, 0.5402739787093813, 2.812383887221816});
}

TEST(Optimizer, KeepsTheRateOfEachGroup) {
    ModelInGroups<float> model;
    const auto sgd = ddp::make_sgd(model.parameters(), {.learning_rate = 0.5, .groups = model.groups});
    ASSERT_EQ(sgd->groups(), 2U);
    EXPECT_EQ(sgd->learning_rate(1), 0.02);
    sgd->set_learning_rate(0.25, 1);
    EXPECT_EQ(sgd->learning_rate(0), 0.5);
    EXPECT_EQ(sgd->learning_rate(1), 0.25);
    EXPECT_EQ(sgd->initial_learning_rate(1), 0.02);
    model.step(*sgd, 0);
    EXPECT_EQ(model.a[1], -2 + 0.5F * 0.2F);
    EXPECT_EQ(model.b[1], -2 + 0.25F * (0.2F + 0.3F * 2));
    EXPECT_THROW(sgd->set_learning_rate(1, 2), ddp::InvalidInput);
    EXPECT_THROW(static_cast<void>(sgd->learning_rate(2)), ddp::InvalidInput);
}

TEST(Optimizer, ResumesFromTheStateOfItsGroups) {
    ModelInGroups<float> whole, resumed;
    const auto make = [](auto& model) {
        return ddp::make_adamw(model.parameters(), {.groups = model.groups});
    };
    const auto first = make(whole), second = make(resumed);
    for (int t = 0; t < 3; ++t) whole.step(*first, t);
    resumed.a = whole.a;
    resumed.b = whole.b;
    copy_state(*first, *second);
    std::set<std::string> names;
    for (const Tensor& tensor : first->state()) EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
    for (int t = 3; t < 6; ++t) {
        whole.step(*first, t);
        resumed.step(*second, t);
    }
    EXPECT_EQ(whole.a, resumed.a);
    EXPECT_EQ(whole.b, resumed.b);
    EXPECT_EQ(first->steps(), 6U);
}

template <class Options>
std::string refused_groups(Options options,
                           std::unique_ptr<Optimizer> (*make)(std::vector<Tensor>, Options)) {
    ModelInGroups<float> model;
    try {
        make(model.parameters(), std::move(options));
    } catch (const ddp::InvalidInput& error) {
        return error.what();
    }
    return "nothing";
}

TEST(Optimizer, NamesTheFaultOfAGroup) {
    EXPECT_EQ(refused_groups(ddp::SgdOptions{.groups = {{.parameters = {"c"}}}}, ddp::make_sgd),
              "sgd: parameter group 1 names 'c', which is not a parameter");
    EXPECT_EQ(refused_groups(ddp::AdamWOptions{.groups = {{.parameters = {"a"}}, {.parameters = {"b", "a"}}}},
                             ddp::make_adamw),
              "adamw: parameter 'a' is in group 1 and in group 2");
    EXPECT_EQ(refused_groups(ddp::SgdOptions{.groups = {{.parameters = {}}}}, ddp::make_sgd),
              "sgd: parameter group 1 names no parameter");
    EXPECT_EQ(refused_groups(ddp::SgdOptions{.groups = {{.parameters = {"a"}, .learning_rate = -1}}},
                             ddp::make_sgd),
              "sgd: the learning rate is negative");
}

/// 16-bit and equal float32 parameters, both stepped by gradients that both types represent exactly.
template <class Half>
void expect_masters_as_float32(ddp::DType dtype, bool gradients_are_halves) {
    constexpr std::size_t kCount = 5000;  // more than a block
    std::vector<float> values(kCount), gradient(kCount);
    std::vector<Half> halves(kCount), half_gradient(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
        ddp::device::round_to(static_cast<float>(i % 97) / 64 - 0.75F, halves[i]);
        values[i] = ddp::device::to_float(halves[i]);
        gradient[i] = static_cast<float>(i % 13) / 8 - 0.5F;
        ddp::device::round_to(gradient[i], half_gradient[i]);
    }
    const Buffer memory{halves.data(), kCount, dtype, {}};
    const auto adamw = ddp::make_adamw({{"w", {kCount}, memory}}, {.learning_rate = 1e-3});
    const auto reference =
        ddp::make_adamw({ddp::tensor_of("w", std::span(values), {kCount})}, {.learning_rate = 1e-3});
    for (int t = 0; t < 4; ++t) {
        adamw->step(std::array{gradients_are_halves ? Buffer{half_gradient.data(), kCount, dtype, {}}
                                                    : buffer_of(std::span(gradient))});
        reference->step(std::array{buffer_of(std::span(gradient))});
    }
    const std::vector<Tensor> state = adamw->state();
    const auto found =
        std::find_if(state.begin(), state.end(), [](const Tensor& t) { return t.name == "master.w"; });
    ASSERT_NE(found, state.end());
    EXPECT_EQ(std::memcmp(found->memory.data, values.data(), kCount * sizeof(float)), 0)
        << "the master is the float32 parameter";
    for (std::size_t i = 0; i < kCount; ++i) {
        Half expected;
        ddp::device::round_to(values[i], expected);
        ASSERT_EQ(halves[i].bits, expected.bits) << i;
    }
}

TEST(Optimizer, KeepsFloat32MastersOf16BitParameters) {
    for (const bool gradients_are_halves : {false, true}) {
        expect_masters_as_float32<ddp::device::Bf16>(ddp::DType::BF16, gradients_are_halves);
        expect_masters_as_float32<ddp::device::F16>(ddp::DType::F16, gradients_are_halves);
    }
}

TEST(Optimizer, RefusesAFloat32GradientForAFloat64Parameter) {
    std::array<double, 1> w = {1};
    std::array<float, 1> g = {1};
    const auto sgd = ddp::make_sgd({ddp::tensor_of("w", std::span<double>(w), {1})}, {});
    EXPECT_THROW(sgd->step(std::array{buffer_of(std::span<float>(g))}), ddp::InvalidInput);
}

// Expected values come from torch.nn.utils.clip_grad_norm_.

TEST(ClipGradNorm, ScalesAllGradientsByTheirJointNormLikePyTorch) {
    std::array<float, 3> a = {3, -4, 1};
    std::array<float, 2> b = {0.5, -2};
    const std::array gradients = {buffer_of(std::span<float>(a)), Buffer{}, buffer_of(std::span<float>(b))};
    EXPECT_EQ(ddp::clip_grad_norm(gradients, 100), 5.5);
    EXPECT_EQ(a, (std::array<float, 3>{3, -4, 1})) << "the norm is small enough";
    EXPECT_EQ(ddp::clip_grad_norm(gradients, 1), 5.5);
    // PyTorch rounds the norm to float32 in between.
    const std::array expected_a = {0.5454545021057129, -0.727272629737854, 0.1818181574344635};
    const std::array expected_b = {0.09090907871723175, -0.363636314868927};
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], expected_a[i], 1e-7) << i;
    for (std::size_t i = 0; i < b.size(); ++i) EXPECT_NEAR(b[i], expected_b[i], 1e-7) << i;
}

TEST(ClipGradNorm, TakesEveryFloatingType) {
    std::array<double, 20> a;
    a.fill(0.5);
    std::array<ddp::device::Bf16, 2> b;
    ddp::device::round_to(2, b[0]);
    ddp::device::round_to(-1, b[1]);
    EXPECT_EQ(ddp::clip_grad_norm(
                  std::array{buffer_of(std::span<double>(a)), Buffer{b.data(), 2, ddp::DType::BF16, {}}}, 1),
              std::sqrt(10));
    EXPECT_NEAR(a[19], 0.5 / std::sqrt(10), 1e-6);
    EXPECT_NEAR(ddp::device::to_float(b[0]), 2 / std::sqrt(10), 1e-2);
    std::array<std::int32_t, 1> whole = {1};
    EXPECT_THROW(ddp::clip_grad_norm(std::array{buffer_of(std::span<std::int32_t>(whole))}, 1),
                 ddp::InvalidInput);
    for (const double bad : {0.0, -1.0, std::nan("")})
        EXPECT_THROW(ddp::clip_grad_norm({}, bad), ddp::InvalidInput);
}

TEST(ClipGradNorm, NamesAGradientThatIsNotFiniteOrLeavesAllUnchanged) {
    for (const float bad : {std::nanf(""), INFINITY}) {
        std::array<float, 2> a = {3, 4}, b = {1, bad};
        const std::array gradients = {buffer_of(std::span<float>(a)), buffer_of(std::span<float>(b))};
        try {
            ddp::clip_grad_norm(gradients, 1);
            ADD_FAILURE() << "not finite";
        } catch (const ddp::Error& error) {
            EXPECT_NE(std::string(error.what()).find("gradient 1 is the first that is not finite;"),
                      std::string::npos)
                << error.what();
        }
        EXPECT_FALSE(std::isfinite(ddp::clip_grad_norm(gradients, 1, ddp::NonFiniteNorm::Leave)));
        EXPECT_EQ(a, (std::array<float, 2>{3, 4}));
    }
}

// Expected values come from torch 2.15: LinearLR, then StepLR, CosineAnnealingLR, LinearLR or nothing in a
// SequentialLR.

void expect_rates(const ddp::Schedule& schedule, const std::vector<double>& expected) {
    for (std::size_t step = 0; step < expected.size(); ++step)
        EXPECT_NEAR(ddp::rate_at(schedule, 0.4, step), expected[step], 1e-15) << step;
}

TEST(Schedule, GivesTheRatesOfPyTorch) {
    using Shape = ddp::Schedule::Shape;
    const ddp::Schedule warmup = {.warmup_steps = 3, .warmup_from = 0.25, .total_steps = 8};
    ddp::Schedule schedule = warmup;
    expect_rates(schedule, {0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4});
    schedule.shape = Shape::Step;
    schedule.step_every = 2;
    schedule.factor = 0.5;
    expect_rates(schedule, {0.1, 0.2, 0.3, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1});
    schedule = warmup;
    schedule.shape = Shape::Cosine;
    schedule.final_rate = 0.01;
    expect_rates(schedule, {0.1, 0.2, 0.3, 0.4, 0.36275831390311475, 0.2652583139031147, 0.14474168609688523,
                            0.047241686096885255, 0.01, 0.01});
    schedule = warmup;
    schedule.shape = Shape::Linear;
    schedule.final_part = 0.1;
    expect_rates(schedule, {0.1, 0.2, 0.3, 0.4, 0.328, 0.256, 0.184, 0.112, 0.04, 0.04});
}

TEST(Schedule, NamesTheFaultOfAnInvalidOne) {
    using Shape = ddp::Schedule::Shape;
    const auto refused = [](const ddp::Schedule& schedule) -> std::string {
        try {
            ddp::rate_at(schedule, 0.1, 0);
        } catch (const ddp::InvalidInput& error) {
            return error.what();
        }
        return "nothing";
    };
    EXPECT_EQ(refused({}), "nothing");
    EXPECT_EQ(refused({.shape = Shape::Cosine, .warmup_steps = 5, .total_steps = 5}),
              "schedule: total_steps is 5, not more than the 5 steps of the warm-up");
    EXPECT_EQ(refused({.shape = Shape::Step}), "schedule: step_every is 0");
    EXPECT_EQ(refused({.warmup_from = 0}), "schedule: warmup_from is 0, not in (0, 1]");
    EXPECT_EQ(refused({.final_part = 2}), "schedule: final_part is 2, not in [0, 1]");
    EXPECT_EQ(refused({.factor = -1}), "schedule: factor is -1");
    EXPECT_EQ(refused({.final_rate = -1}), "schedule: final_rate is -1");
}

TEST(ScheduledRate, MovesEachGroupFromItsOwnRateAndResumesFromItsState) {
    ModelInGroups<float> model;
    const auto sgd = ddp::make_sgd(model.parameters(), {.learning_rate = 0.4, .groups = model.groups});
    const ddp::Schedule schedule = {.warmup_steps = 4, .warmup_from = 0.2};
    ddp::ScheduledRate rate(*sgd, schedule);
    EXPECT_NEAR(sgd->learning_rate(0), 0.08, 1e-15);
    EXPECT_NEAR(sgd->learning_rate(1), 0.004, 1e-15);
    rate.step();
    rate.step();
    EXPECT_NEAR(sgd->learning_rate(0), 0.24, 1e-15);

    const auto resumed = ddp::make_sgd(model.parameters(), {.learning_rate = 0.4, .groups = model.groups});
    ddp::ScheduledRate second(*resumed, schedule);
    *static_cast<std::uint64_t*>(second.state().at(0).memory.data) =
        *static_cast<std::uint64_t*>(rate.state().at(0).memory.data);
    second.state_loaded();
    EXPECT_EQ(resumed->learning_rate(0), sgd->learning_rate(0));
    EXPECT_EQ(resumed->learning_rate(1), sgd->learning_rate(1));
}

TEST(ScheduledRate, GoesOnAfterAReplacementAsAnotherOneWithThisScheduleAndRate) {
    ModelInGroups<float> model;
    const ddp::Schedule before = {.shape = ddp::Schedule::Shape::Linear, .total_steps = 8},
                        after = {.shape = ddp::Schedule::Shape::Linear, .total_steps = 16};
    const auto sgd = ddp::make_sgd(model.parameters(), {.learning_rate = 0.4});
    const auto other = ddp::make_sgd(model.parameters(), {.learning_rate = 0.2});
    ddp::ScheduledRate rate(*sgd, before), expected(*other, after);
    rate.step();
    rate.replace(after, 0.2);
    expected.step();
    EXPECT_EQ(sgd->learning_rate(0), other->learning_rate(0));
}

TEST(LearningRate, IsScaledByTheSamplesOfAStep) { EXPECT_EQ(ddp::scaled_learning_rate(0.1, 256, 1024), 0.4); }

}  // namespace
