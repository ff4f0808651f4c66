// Trains a convolutional network to read digits: single.cpp in one process, mnist.cpp in several, and
// mnist_recover.cpp with recovery in place. docs/libtorch.md has the changes from one to the next.
//
//     ddprun --nproc-per-node=2 ./mnist DIRECTORY    (of MNIST's files, or of workers/train/data)
//
// Exits 0 when at least nine of ten digits that were held out of the training are read right.

#include <torch/torch.h>

#include <cstdio>
#include <exception>

#include "digits.h"

namespace {

constexpr std::uint64_t kEpochs = 6;

struct Trainer {
    explicit Trainer(const char* directory) : digits(directory, IdxImages::Part::Training) {}

    void fit() {
        auto loader =
            torch::data::make_data_loader(digits.map(torch::data::transforms::Stack<>()), sampler, 32);
        for (std::uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
            for (auto& batch : *loader) {
                optimizer.zero_grad();
                torch::nn::functional::cross_entropy(net(batch.data), batch.target).backward();
                optimizer.step();
            }
        }
    }

    IdxImages digits;
    Net net;
    torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
    torch::data::samplers::RandomSampler sampler{*digits.size()};
};

}  // namespace

int main(int argc, char** argv) try {
    const char* const directory = argc > 1 ? argv[1] : ".";
    torch::manual_seed(1);
    Trainer trainer(directory);
    trainer.fit();
    const double right = right_part(trainer.net, IdxImages(directory, IdxImages::Part::HeldOut));
    std::printf("%.1f %% of the digits held out are right\n", 100 * right);
    return right >= 0.9 ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
