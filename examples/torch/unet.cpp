// Trains a small U-Net to find discs in noisy synthetic images. Lines that end with "// ddp" are those that a
// program for one process does not have, or has without the words of ddp.
//
//     ddprun --nproc-per-node=2 ./unet [STEPS]
//
// Exits 0 when nine of ten pixels of discs and of the rest are told apart (after 60 steps; fewer are not
// judged).

#include <ddp/torch.h>  // ddp
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace {

constexpr int kSteps = 60, kBatch = 8, kSize = 32;

/// Two convolutions, each normalised.
struct BlockImpl : torch::nn::Module {
    BlockImpl(int from, int to)
        : layers(torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 3).padding(1).bias(false)),
                 torch::nn::BatchNorm2d(to), torch::nn::ReLU(),
                 torch::nn::Conv2d(torch::nn::Conv2dOptions(to, to, 3).padding(1).bias(false)),
                 torch::nn::BatchNorm2d(to), torch::nn::ReLU()) {
        register_module("layers", layers);
    }
    torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
    torch::nn::Sequential layers;
};
TORCH_MODULE(Block);

struct UNetImpl : torch::nn::Module {
    Block fine = register_module("fine", Block(1, 8));
    Block middle = register_module("middle", Block(8, 16));
    Block coarse = register_module("coarse", Block(16, 32));
    Block up_middle = register_module("up_middle", Block(32 + 16, 16));
    Block up_fine = register_module("up_fine", Block(16 + 8, 8));
    torch::nn::Conv2d output = register_module("output", torch::nn::Conv2d(8, 1, 1));

    torch::Tensor forward(const torch::Tensor& images) {
        const auto twice_as_large = [](const torch::Tensor& x) {
            return torch::upsample_nearest2d(x, {2 * x.size(2), 2 * x.size(3)});
        };
        const torch::Tensor a = fine(images), b = middle(torch::max_pool2d(a, 2));
        const torch::Tensor c = coarse(torch::max_pool2d(b, 2));
        const torch::Tensor d = up_middle(torch::cat({twice_as_large(c), b}, 1));
        return output(up_fine(torch::cat({twice_as_large(d), a}, 1)));
    }
};
TORCH_MODULE(UNet);

struct Sample {
    torch::Tensor images, masks;
};

/// One disc in each image, at a random place.
Sample random_sample(std::uint64_t seed) {
    torch::manual_seed(seed);
    const torch::Tensor rows = torch::arange(kSize).view({1, 1, kSize, 1}), columns = rows.transpose(2, 3);
    const torch::Tensor y = torch::randint(8, kSize - 8, {kBatch, 1, 1, 1});
    const torch::Tensor x = torch::randint(8, kSize - 8, {kBatch, 1, 1, 1});
    const torch::Tensor radius = torch::randint(3, 8, {kBatch, 1, 1, 1});
    const torch::Tensor masks =
        ((rows - y).square() + (columns - x).square() < radius.square()).to(torch::kFloat);
    return {masks + 0.5 * torch::randn({kBatch, 1, kSize, kSize}), masks};
}

/// The smaller one of the parts of discs and of background that are found.
double right_part(UNet& net) {
    const torch::NoGradGuard plain;
    net->eval();
    const auto [images, masks] = random_sample(1'000'000);
    const torch::Tensor found = net(images) > 0, discs = masks > 0;
    const auto part = [&](const torch::Tensor& of) {
        return (found == discs).masked_select(of).to(torch::kDouble).mean().item<double>();
    };
    return std::min(part(discs), part(~discs));
}

int train(int steps) {
    torch::manual_seed(1);
    UNet net;
    const auto group = ddp::ProcessGroup::create(ddp::Context::from_env());  // ddp
    ddp::pytorch::DistributedDataParallel model(*group, net);                // ddp
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < steps; ++step) {
        const auto [images, masks] =
            random_sample(static_cast<std::uint64_t>(100 * step + group->rank()));  // ddp
        optimizer.zero_grad();
        torch::binary_cross_entropy_with_logits(model(images), masks).backward();  // ddp
        optimizer.step();
    }
    const double right = right_part(net);
    if (group->rank() == 0) std::printf("%.1f %% of the pixels are right\n", 100 * right);  // ddp
    return steps < kSteps || right >= 0.9 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
    return train(argc > 1 ? std::atoi(argv[1]) : kSteps);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
