// Trains a convolutional network to read digits: single.cpp in one process, mnist.cpp in several, and
// mnist_recover.cpp with recovery in place. docs/libtorch.md has the changes from one to the next.
//
//     ddprun --nproc-per-node=2 ./mnist DIRECTORY    (of MNIST's files, or of workers/train/data)
//
// Exits 0 when at least nine of ten digits that were held out of the training are read right.

#include <ddp/torch.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

#include "idx.h"

namespace {

constexpr std::uint64_t kEpochs = 6;

struct NetImpl : torch::nn::Module {
    torch::nn::Conv2d first = register_module("first", torch::nn::Conv2d(1, 16, 3));
    torch::nn::Conv2d second = register_module("second", torch::nn::Conv2d(16, 32, 3));
    torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(32 * 4 * 4, 64));
    torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.25));
    torch::nn::Linear output = register_module("output", torch::nn::Linear(64, 10));

    torch::Tensor forward(torch::Tensor x) {
        x = torch::relu(second(torch::relu(first(x))));
        x = torch::adaptive_avg_pool2d(x, {4, 4}).flatten(1);
        return output(dropout(torch::relu(hidden(x))));
    }
};
TORCH_MODULE(Net);

struct Trainer {
    explicit Trainer(const char* directory) : digits(directory, IdxImages::Part::Training) {}

    void fit() {
        auto loader =
            torch::data::make_data_loader(digits.map(torch::data::transforms::Stack<>()), sampler, 32);
        for (std::uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
            for (auto& batch : *loader) {
                optimizer.zero_grad();
                torch::nn::functional::cross_entropy(model(batch.data), batch.target).backward();
                optimizer.step();
            }
        }
    }

    IdxImages digits;
    Net net;
    ddp::Context context = ddp::Context::from_env();
    std::unique_ptr<ddp::ProcessGroup> group = ddp::ProcessGroup::create(context);
    ddp::pytorch::DistributedDataParallel<NetImpl> model{*group, net};
    torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
    ddp::pytorch::DistributedSampler sampler{*digits.size(), *group};
};

double right_part(Net& net, const IdxImages& digits) {
    const torch::NoGradGuard plain;
    net->eval();
    const torch::Tensor right = net(digits.images()).argmax(1) == digits.labels();
    return right.to(torch::kDouble).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
    const char* const directory = argc > 1 ? argv[1] : ".";
    torch::manual_seed(1);
    Trainer trainer(directory);
    trainer.fit();
    const double right = right_part(trainer.net, IdxImages(directory, IdxImages::Part::HeldOut));
    if (trainer.context.rank() == 0) std::printf("%.1f %% of the digits held out are right\n", 100 * right);
    return right >= 0.9 ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
