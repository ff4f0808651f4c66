// Modules of LibTorch over libddp. Ranks are threads.
#include <ddp/torch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ddp/epochs.h"
#include "ddp/schedule.h"
#include "ddp/testing.h"
#include "tests/support/temporary_directory.h"

namespace ddp::pytorch {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_ranks;

struct NetImpl : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 4));
    torch::nn::Linear second = register_module("second", torch::nn::Linear(4, 2));
    bool skips_first = false;

    /// Every rank begins with other weights.
    explicit NetImpl(int rank = 0) {
        const torch::NoGradGuard plain;
        double next = rank;
        for (auto& one : parameters())
            for (std::int64_t i = 0; i < one.numel(); ++i) one.view(-1)[i] = std::sin(next += 1);
    }
    torch::Tensor forward(const torch::Tensor& x) { return second(skips_first ? x : torch::relu(first(x))); }
};
TORCH_MODULE(Net);

torch::Tensor input_of(int rank, int step = 0) {
    return (torch::arange(12, torch::kFloat) * (rank + 1) + step).sin().view({3, 4});
}
torch::Tensor loss_of(const torch::Tensor& output) { return output.square().mean(); }

std::vector<torch::Tensor> gradients_of(const torch::nn::Module& module) {
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& one : module.parameters()) all.push_back(one.grad().clone());
    return all;
}
std::vector<torch::Tensor> weights_of(const torch::nn::Module& module) {
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& one : module.parameters()) all.push_back(one.detach().clone());
    return all;
}
/// The mean over the ranks of the gradients that a plain module with rank 0's weights has.
std::vector<torch::Tensor> mean_gradients(int ranks, int step = 0) {
    Net net(0);
    torch::Tensor loss = torch::zeros({});
    for (int rank = 0; rank < ranks; ++rank) loss = loss + loss_of(net(input_of(rank, step)));
    (loss / ranks).backward();
    return gradients_of(*net);
}
void expect_close(const std::vector<torch::Tensor>& some, const std::vector<torch::Tensor>& others) {
    ASSERT_EQ(some.size(), others.size());
    for (std::size_t i = 0; i < some.size(); ++i)
        EXPECT_TRUE(torch::allclose(some[i], others[i], 1e-5, 1e-7)) << i << "\n" << some[i] << others[i];
}
void expect_equal(const std::vector<torch::Tensor>& some, const std::vector<torch::Tensor>& others) {
    ASSERT_EQ(some.size(), others.size());
    for (std::size_t i = 0; i < some.size(); ++i) EXPECT_TRUE(torch::equal(some[i], others[i])) << i;
}
/// The message of the E that `act` throws.
template <class E>
std::string message_of(const std::function<void()>& act) {
    try {
        act();
    } catch (const E& error) {
        return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
}

TEST(TorchModule, BackwardReturnsAveragesInTheBuckets) {
    run_ranks(2, [](ProcessGroup& group) {
        Net net(group.rank());
        DistributedDataParallel model(group, net);
        loss_of(model(input_of(group.rank()))).backward();
        expect_close(gradients_of(*net), mean_gradients(2));
        for (std::size_t i = 0; i < 4; ++i)
            EXPECT_EQ(net->parameters()[i].grad().data_ptr(), model.gradient(i).data);
    });
}

TEST(TorchModule, GradientsThatWereReleasedOrZeroedGiveTheSameSteps) {
    std::vector<torch::Tensor> results[3];
    for (const int way : {0, 1, 2}) {
        run_ranks(2, [&](ProcessGroup& group) {
            Net net(group.rank());
            DistributedDataParallel model(group, net);
            torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
            for (int step = 0; step < 3; ++step) {
                if (way == 0) model.zero_grad();
                if (way == 1) optimizer.zero_grad();
                if (way == 2) model.zero_gradients();
                loss_of(model(input_of(group.rank(), step))).backward();
                optimizer.step();
            }
            model.verify_equal_parameters();
            if (group.rank() == 0) results[way] = weights_of(*net);
        });
    }
    expect_equal(results[0], results[1]);
    expect_equal(results[0], results[2]);
}

TEST(TorchModule, PassesInNoSyncAreReducedWithTheNext) {
    run_ranks(2, [](ProcessGroup& group) {
        Net net(group.rank());
        DistributedDataParallel model(group, net);
        for (const int step : {0, 1, 2}) {
            const auto accumulating = model.no_sync(step < 2);
            loss_of(model(input_of(group.rank(), step))).backward();
        }
        EXPECT_EQ(model.statistics().steps, 1U);
        std::vector<torch::Tensor> sums = mean_gradients(2);
        for (const int step : {1, 2}) {
            const std::vector<torch::Tensor> more = mean_gradients(2, step);
            for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
        }
        expect_close(gradients_of(*net), sums);
    });
}

TEST(TorchModule, AMissingGradientIsAnErrorOfBackwardThatNamesIt) {
    run_ranks(2, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net);
        net->skips_first = true;
        const std::string message = message_of<Error>([&] { loss_of(model(input_of(0))).backward(); });
        EXPECT_THAT(message, AllOf(HasSubstr("no gradient for 2 of 4 parameters"), HasSubstr("first.weight"),
                                   HasSubstr("find_unused_parameters")));
    });
}

TEST(TorchModule, AParameterThatOneRankUsesHasTheMeanOnAllAndOneThatNoneUsesHasNone) {
    run_ranks(2, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net, {.find_unused_parameters = true});
        net->skips_first = true;
        loss_of(model(input_of(0))).backward();
        EXPECT_FALSE(net->first->weight.grad().defined());
        net->skips_first = group.rank() == 0;
        model.zero_grad();
        loss_of(model(input_of(1))).backward();
        Net alone(0);
        loss_of(alone(input_of(1))).backward();
        EXPECT_TRUE(torch::allclose(net->first->weight.grad(), alone->first->weight.grad() / 2));
    });
}

TEST(TorchModule, AStaticGraphThatChangesIsAnError) {
    run_ranks(1, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net, {.static_graph = true});
        net->skips_first = true;
        for (int step = 0; step < 2; ++step) loss_of(model(input_of(0))).backward();
        net->skips_first = false;
        EXPECT_THAT(message_of<Error>([&] { loss_of(model(input_of(0))).backward(); }),
                    HasSubstr("has a gradient in this step, and had none in the first"));
    });
}

TEST(TorchModule, ALostPeerIsAPeerLostErrorOfBackward) {
    const auto failures = [] {
        std::string message;
        try {
            run_ranks(2, [&](ProcessGroup& group) {
                Net net(0);
                DistributedDataParallel model(group, net);
                if (group.rank() == 1) throw std::runtime_error("rank 1 ends");
                message = message_of<PeerLostError>([&] { loss_of(model(input_of(0))).backward(); });
            });
        } catch (const std::runtime_error&) {
        }
        return message;
    }();
    EXPECT_THAT(failures, Not(::testing::IsEmpty()));
}

/// Forgets what is inside `net`, and computes it again in the backward pass.
struct Recomputed : torch::autograd::Function<Recomputed> {
    static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                                 torch::nn::Linear layer) {
        const torch::NoGradGuard plain;
        context->save_for_backward({x});
        context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer.get());
        return layer(x);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& gradients) {
        const torch::AutoGradMode recording(true);
        const torch::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
        auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
        layer->forward(x).backward(gradients[0]);
        return {x.grad(), torch::Tensor()};
    }
};
struct RecomputingImpl : NetImpl {
    using NetImpl::NetImpl;
    torch::Tensor forward(const torch::Tensor& x) {
        const torch::Tensor hidden = Recomputed::apply(x.detach().requires_grad_(), first);
        return Recomputed::apply(torch::relu(hidden), second);
    }
};
TORCH_MODULE(Recomputing);

TEST(TorchModule, LayersThatAreRecomputedInBackwardEndTheStepOnce) {
    run_ranks(2, [](ProcessGroup& group) {
        Recomputing net(group.rank());
        DistributedDataParallel model(group, net);
        for (std::uint64_t step = 1; step < 3; ++step) {
            model.zero_grad();
            loss_of(model(input_of(group.rank()))).backward();
            expect_close(gradients_of(*net), mean_gradients(2));
            EXPECT_EQ(model.statistics().steps, step);
        }
    });
}

TEST(TorchModule, HasMemoryOfItsOwnAfterTheModelsEnd) {
    run_ranks(2, [](ProcessGroup& group) {
        for (const Shard shard : {Shard::None, Shard::Optimizer}) {
            Net net(group.rank());
            const torch::Tensor output = [&] {
                DistributedDataParallel model(group, net, {.shard = shard});
                return model(input_of(0));
            }();
            expect_equal(weights_of(*net), weights_of(*Net(0)));
            loss_of(output).backward();  // a graph that outlives the model
            loss_of(net(input_of(0))).backward();
        }
    });
}

struct WithBuffersImpl : torch::nn::Module {
    torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
    torch::Tensor frozen, flags;
    explicit WithBuffersImpl(int rank) {
        frozen = register_parameter("frozen", torch::full({2}, rank + 5.0), false);
        flags = register_buffer("flags", torch::full({3}, rank == 0, torch::kBool));
    }
    torch::Tensor forward(const torch::Tensor& x) { return norm(x) * frozen.sum(); }
};
TORCH_MODULE(WithBuffers);

TEST(TorchModule, BuffersAndFrozenParametersAreThoseOfRankZero) {
    run_ranks(2, [](ProcessGroup& group) {
        WithBuffers net(group.rank());
        DistributedDataParallel model(group, net);
        EXPECT_EQ(net->frozen[0].item<double>(), 5);
        EXPECT_TRUE(net->flags.all().item<bool>());
        for (int step = 0; step < 2; ++step) loss_of(model(input_of(group.rank()))).backward();
        const torch::Tensor own = net->norm->running_mean.clone();
        model.begin_forward();
        EXPECT_EQ(torch::equal(own, net->norm->running_mean), group.rank() == 0);
        EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 2);
        std::vector<std::string> names;
        for (const Tensor& one : model.state()) names.push_back(one.name);
        EXPECT_THAT(names, ElementsAre("norm.weight", "norm.bias", "flags", "norm.running_mean",
                                       "norm.running_var", "norm.num_batches_tracked", "frozen"));
    });
}

TEST(TorchModule, HasTheWeightsAndBuffersOfAFileOnAllRanks) {
    const ddprun::test::TemporaryDirectory place;
    const auto scaled = [](const WithBuffers& net) {
        const torch::NoGradGuard plain;
        for (auto& one : net->parameters()) one.add_(3);
        net->norm->running_mean.add_(4);
        return net;
    };
    const WithBuffers expected = scaled(WithBuffers(0));
    write_safetensors(place.file("weights"), DistributedDataParallel(expected).state());
    const ModelOptions ways[] = {
        {}, {.shard = Shard::Optimizer}, {.shard = Shard::Optimizer, .share_weights = true}};
    for (const ModelOptions& way : ways) {
        run_ranks(2, [&](ProcessGroup& group) {
            WithBuffers net(group.rank());
            DistributedDataParallel model(group, net, way);
            const auto unmatched = load_weights(group, place.file("weights"), model);
            EXPECT_TRUE(unmatched.missing.empty() && unmatched.unused.empty());
            expect_equal(weights_of(*net), weights_of(*expected));
            expect_equal(net->buffers(), expected->buffers());
        });
    }
}

TEST(TorchModule, ShardedOptimizerGivesTheBitsOfAWholeOne) {
    std::vector<torch::Tensor> results[3];
    const ModelOptions ways[] = {
        {}, {.shard = Shard::Optimizer}, {.shard = Shard::Optimizer, .share_weights = true}};
    for (std::size_t way = 0; way < 3; ++way) {
        run_ranks(2, [&](ProcessGroup& group) {
            Net net(group.rank());
            DistributedDataParallel model(group, net, ways[way]);
            const auto optimizer = make_adamw(model, {.learning_rate = 0.1});
            for (int step = 0; step < 3; ++step) {
                model.zero_grad();
                loss_of(model(input_of(group.rank(), step))).backward();
                EXPECT_EQ(net->first->weight.grad().defined(), way == 0) << "no rank has whole averages";
                optimizer->step();
            }
            group.barrier().wait();
            if (group.rank() == 1) results[way] = weights_of(*net);
        });
    }
    expect_equal(results[0], results[1]);
    expect_equal(results[0], results[2]);
}

TEST(TorchModule, RanksWithoutBatchesFollowInAJoin) {
    run_ranks(2, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net);
        const auto optimizer = make_sgd(model, {.learning_rate = 0.1});
        Join join(model);
        for (int step = 0; step <= group.rank(); ++step) {
            model.zero_grad();
            loss_of(model(input_of(step))).backward();
            optimizer->step();
        }
        join.finish([&] { optimizer->step(); });
        model.verify_equal_parameters();
        EXPECT_EQ(optimizer->steps(), 2U);
    });
}

TEST(TorchModule, ParametersOf16BitsAreAveraged) {
    run_ranks(2, [](ProcessGroup& group) {
        Net net(0);
        net->to(torch::kBFloat16);
        DistributedDataParallel model(group, net);
        loss_of(model(input_of(group.rank()).to(torch::kBFloat16))).backward();
        const torch::Tensor mean = mean_gradients(2)[0];
        EXPECT_TRUE(torch::allclose(net->first->weight.grad().to(torch::kFloat), mean, 0.05, 0.01));
    });
}

TEST(TorchModule, RefusesTensorsThatItCannotUseAndNamesThem) {
    run_ranks(1, [](ProcessGroup& group) {
        const auto refusal = [&](const std::function<void(Net&)>& change, const ModelOptions& options = {}) {
            Net net(0);
            change(net);
            return message_of<InvalidInput>([&] { DistributedDataParallel(group, net, options); });
        };
        EXPECT_THAT(refusal([](Net& net) {
                        net->first->weight.set_data(torch::zeros({4, 4}).t());
                    }),
                    HasSubstr("'first.weight' is not contiguous: call first.weight.set_data("));
        EXPECT_THAT(refusal([](Net& net) { net->register_buffer("far", torch::zeros({2}, torch::kMeta)); }),
                    HasSubstr("'far' is on meta: the LibTorch adapter is for CPUs"));
        EXPECT_THAT(refusal([](Net& net) { net->first->bias.set_data(net->first->weight.data()[0]); }),
                    HasSubstr("share memory"));
        EXPECT_THAT(
            refusal([](Net& net) { net->register_buffer("phase", torch::zeros({2}, torch::kComplexFloat)); }),
            HasSubstr("'phase' is a tensor of ComplexFloat"));
        EXPECT_THAT(refusal([](Net& net) { net->register_buffer("few", torch::eye(3).to_sparse()); }),
                    HasSubstr("'few' is sparse"));
        EXPECT_THAT(refusal([](Net& net) { net = nullptr; }), HasSubstr("the holder is empty"));
        EXPECT_THAT(refusal([](Net&) {}, {.shard = Shard::Gradients}), HasSubstr("use Shard::Optimizer"));
    });
}

TEST(TorchModule, ASparseGradientIsRefusedInBackward) {
    run_ranks(1, [](ProcessGroup& group) {
        torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 3).sparse(true));
        DistributedDataParallel model(group, table);
        EXPECT_THAT(message_of<InvalidInput>([&] { loss_of(model(torch::arange(3))).backward(); }),
                    HasSubstr("the gradient of 'weight' is sparse"));
    });
}

TEST(TorchModule, AConversionAfterItWasWrappedIsAnErrorOfTheNextForward) {
    run_ranks(1, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net);
        net->to(torch::kDouble);
        EXPECT_THAT(
            message_of<Error>([&] { model(input_of(0)); }),
            HasSubstr("'first.weight' has other memory or another type than when the module was wrapped"));
    });
}

// The ranks would drift apart: nobody averages its gradient.
TEST(TorchModule, AParameterThatIsUnfrozenAfterItWasWrappedIsAnErrorOfTheNextForward) {
    run_ranks(1, [](ProcessGroup& group) {
        Net net(0);
        net->second->bias.set_requires_grad(false);
        DistributedDataParallel model(group, net);
        loss_of(model(input_of(0))).backward();
        net->second->bias.set_requires_grad(true);
        EXPECT_THAT(
            message_of<Error>([&] { model(input_of(0)); }),
            HasSubstr("'second.bias' requires a gradient now, and did not when the module was wrapped"));
        DistributedDataParallel again(group, net);
        loss_of(again(input_of(0))).backward();
        EXPECT_EQ(again.parameters().size(), 4U);
    });
}

TEST(TorchModule, AForkedChildThatTrainsGetsAnError) {
    run_ranks(1, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net);
        const pid_t child = ::fork();
        if (child == 0) {
            try {
                loss_of(model(input_of(0))).backward();
            } catch (const Error&) {
                ::_exit(42);
            }
            ::_exit(1);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_EQ(WEXITSTATUS(status), 42);
    });
}

// backward() has averaged the gradients; Step::finish() must not do so again, and steps torch's optimizer.
TEST(TorchModule, TrainsInEpochsWithOneReductionAStep) {
    for (const bool is_torch : {false, true}) {
        Net expected(0);
        torch::optim::SGD plain(expected->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 4; ++step) {
            expected->zero_grad();
            ((loss_of(expected(input_of(0, step))) + loss_of(expected(input_of(1, step)))) / 2).backward();
            plain.step();
        }
        const int generations = testing::run_recovering(2, [&](const Context& context) {
            World world(context, {.timeout = std::chrono::seconds(20)});
            Net net(0);
            DistributedDataParallel model(net);
            torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
            Optimizer of_torch(model, sgd);
            const auto own = make_sgd(model, {.learning_rate = 0.1, .momentum = 0.9});
            ddp::Optimizer& optimizer = is_torch ? static_cast<ddp::Optimizer&>(of_torch) : *own;
            Epochs epochs(world, model, optimizer, 8, {.batch_size = 1, .report = [](const EpochReport&) {}});
            epochs.run([&](Epochs::Step& step) {
                if (world.rank() == 1 && step.steps_done() == 2 && world.context().generation() == 1)
                    throw Error("lost");
                const auto done = static_cast<int>(step.steps_done());
                loss_of(model(input_of(world.rank(), done))).backward();
                const std::uint64_t reduced = model.statistics().steps;
                step.finish();
                if (model.statistics().steps != reduced) throw std::runtime_error("reduced twice");
            });
            EXPECT_EQ(epochs.steps_done(), 4U);
            expect_close(weights_of(*net), weights_of(*expected));
        });
        EXPECT_EQ(generations, 2);
    }
}

TEST(TorchModule, TrainsOnWithTheNextGroup) {
    Net net(0);
    DistributedDataParallel model(net);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    EXPECT_THAT(message_of<Error>([&] { loss_of(net(input_of(0))).backward(); }),
                HasSubstr("call attach() first"));
    for (int generation = 0; generation < 2; ++generation) {
        run_ranks(1, [&](ProcessGroup& group) {
            model.attach(group, generation == 0);
            sgd.zero_grad();
            loss_of(model(input_of(0))).backward();
            sgd.step();
        });
    }
    Net alone(0);
    torch::optim::SGD same(alone->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
        same.zero_grad();
        loss_of(alone(input_of(0))).backward();
        same.step();
    }
    expect_close(weights_of(*net), weights_of(*alone));
}

TEST(TorchOptimizer, FollowsAScheduleAndCountsItsSteps) {
    run_ranks(1, [](ProcessGroup& group) {
        Net net(0);
        DistributedDataParallel model(group, net);
        torch::optim::Adam adam(net->parameters(), 0.1);
        Optimizer optimizer(model, adam);
        ScheduledRate rate(optimizer, {.shape = Schedule::Shape::Step, .step_every = 1, .factor = 0.5});
        loss_of(model(input_of(0))).backward();
        optimizer.step();
        rate.step();
        EXPECT_EQ(adam.param_groups()[0].options().get_lr(), 0.05);
        EXPECT_EQ(optimizer.steps(), 1U);
        std::vector<std::string> names;
        for (const Tensor& one : optimizer.state()) names.push_back(one.name);
        EXPECT_THAT(names, ::testing::IsSupersetOf({"exp_avg.first.weight", "exp_avg_sq.second.bias",
                                                    "step.first.weight", "steps"}));
    });
}

TEST(TorchOptimizer, StateThatIsMadeEarlyChangesNoStep) {
    using torch::optim::AdamW;
    using torch::optim::SGD;
    const std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)> makers[] = {
        [](Net& net) {
            return std::make_unique<SGD>(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        },
        [](Net& net) {
            return std::make_unique<AdamW>(net->parameters(), torch::optim::AdamWOptions(0.1).amsgrad(true));
        }};
    for (const auto& make : makers) {
        run_ranks(1, [&](ProcessGroup& group) {
            Net kept(0), alone(0);
            DistributedDataParallel model(group, kept);
            const auto adam = make(kept), same = make(alone);
            Optimizer optimizer(model, *adam);
            for (int step = 0; step < 3; ++step) {
                adam->zero_grad(), same->zero_grad();
                loss_of(model(input_of(0, step))).backward();
                loss_of(alone(input_of(0, step))).backward();
                optimizer.step(), same->step();
            }
            expect_equal(weights_of(*kept), weights_of(*alone));
        });
    }
}

TEST(TorchOptimizer, RefusesWhatItCannotKeep) {
    run_ranks(1, [](ProcessGroup& group) {
        Net net(0), other(0);
        DistributedDataParallel model(group, net);
        const auto refusal = [&](torch::optim::Optimizer&& optimizer) {
            return message_of<InvalidInput>([&] { Optimizer(model, optimizer); });
        };
        EXPECT_THAT(refusal(torch::optim::RMSprop(net->parameters())), HasSubstr("use SGD, Adam or AdamW"));
        EXPECT_THAT(refusal(torch::optim::Adam(other->parameters())), HasSubstr("not one of the model's"));
        EXPECT_THAT(refusal(torch::optim::SGD(net->parameters(),
                                              torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5))),
                    HasSubstr("dampening"));
        std::vector<torch::Tensor> twice = net->parameters();
        twice.push_back(twice[0]);
        EXPECT_THAT(refusal(torch::optim::Adam(twice)),
                    HasSubstr("lists 'first.weight', which layers share, twice"));
    });
}

/// The samples of one iteration of a loader over 0, 1, 2, ...
struct Numbers : torch::data::datasets::Dataset<Numbers, std::int64_t> {
    std::int64_t get(std::size_t index) override { return static_cast<std::int64_t>(index); }
    [[nodiscard]] torch::optional<std::size_t> size() const override { return 11; }
};
template <class Loader>
std::vector<std::size_t> samples_of(Loader& loader) {
    std::vector<std::size_t> all;
    for (const auto& batch : *loader)
        for (const std::int64_t one : batch) all.push_back(static_cast<std::size_t>(one));
    return all;
}

TEST(TorchSampler, ALoaderHasThePermutationOfEachEpoch) {
    for (int rank = 0; rank < 2; ++rank) {
        DistributedSampler sampler(11, 2, rank, {.seed = 3});
        ddp::DistributedSampler expected(11, 2, rank, {.seed = 3});
        const auto loader = torch::data::make_data_loader(Numbers(), sampler, 4);
        for (std::uint64_t epoch = 0; epoch < 3; ++epoch, expected.next_epoch()) {
            EXPECT_EQ(samples_of(loader), expected.indices()) << epoch;
            EXPECT_EQ(sampler.epoch(), epoch);
        }
        sampler.set_epoch(7);
        expected.set_epoch(7);
        EXPECT_EQ(samples_of(loader), expected.indices());
    }
}

TEST(TorchSampler, ALoopThatCountsEpochsItselfHasEachOnce) {
    DistributedSampler sampler(11, 1, 0);
    const auto loader = torch::data::make_data_loader(Numbers(), sampler, 4);
    ddp::DistributedSampler expected(11, 1, 0);
    for (; sampler.epoch() < 3; sampler.next_epoch(), expected.next_epoch())
        EXPECT_EQ(samples_of(loader), expected.indices());
    EXPECT_EQ(expected.epoch(), 3U);
}

TEST(TorchSampler, ANewLoaderGoesOnFromThePosition) {
    DistributedSampler sampler(11, 1, 0);
    const std::vector<std::size_t> all = sampler.position().indices();
    sampler.position().advance(4);
    for (int repeat = 0; repeat < 2; ++repeat) {
        const auto loader = torch::data::make_data_loader(Numbers(), sampler, 4);
        EXPECT_EQ(samples_of(loader), std::vector(all.begin() + 4, all.end()));
    }
    std::stringstream file;
    torch::serialize::OutputArchive written;
    sampler.save(written);
    written.save_to(file);
    torch::serialize::InputArchive read;
    read.load_from(file);
    DistributedSampler other(11, 1, 0);
    other.load(read);
    EXPECT_EQ(other.position().indices(), std::vector(all.begin() + 4, all.end()));
    EXPECT_THROW(other.reset(5), InvalidInput);
}

}  // namespace
}  // namespace ddp::pytorch

int main(int argc, char** argv) {
    at::set_num_threads(1);  // ranks are threads
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
