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

#include "digits.h"

namespace {

constexpr std::uint64_t kEpochs = 6;

struct Trainer {
    explicit Trainer(const char* directory) : digits(directory, IdxImages::Part::Training) {}

    void fit(ddp::ProcessGroup& group, const ddp::Start& start) {
        model.attach(group, start.is_new());
        auto loader =
            torch::data::make_data_loader(digits.map(torch::data::transforms::Stack<>()), sampler, 32);
        for (; sampler.epoch() < kEpochs; sampler.next_epoch()) {
            for (auto& batch : *loader) {
                torch::manual_seed(ddp::step_seed(1, context.rank(), recovery.commits()));
                optimizer.zero_grad();
                torch::nn::functional::cross_entropy(model(batch.data), batch.target).backward();
                recovery.commit([&] { kept.step(), sampler.position().advance(32); });
            }
        }
    }

    IdxImages digits;
    Net net;
    ddp::Context context = ddp::Context::from_env();
    ddp::Recovery recovery{context};
    ddp::pytorch::DistributedDataParallel<NetImpl> model{net};
    torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
    ddp::pytorch::Optimizer kept{model, optimizer};
    ddp::pytorch::DistributedSampler sampler{*digits.size(), context.world_size(), context.rank()};
};

}  // namespace

int main(int argc, char** argv) try {
    const char* const directory = argc > 1 ? argv[1] : ".";
    torch::manual_seed(1);
    Trainer trainer(directory);
    trainer.recovery.keep({trainer.model, trainer.kept, trainer.sampler.position()});
    trainer.recovery.run([&](auto& group, const auto& start) { trainer.fit(group, start); });
    const double right = right_part(trainer.net, IdxImages(directory, IdxImages::Part::HeldOut));
    if (trainer.context.rank() == 0) std::printf("%.1f %% of the digits held out are right\n", 100 * right);
    return right >= 0.9 ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
