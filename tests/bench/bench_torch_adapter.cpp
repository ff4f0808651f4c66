// The cost of the LibTorch adapter in a world of one: steps of a convolutional network in
// DistributedDataParallel and of the same network alone, in turn, on one thread. Prints the medians of both
// times and of their ratio; a busy machine slows both.
#include <ddp/testing.h>
#include <ddp/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

torch::nn::Sequential network() {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Conv2d(1, 32, 3), torch::nn::ReLU(), torch::nn::Conv2d(32, 64, 3),
                                 torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(),
                                 torch::nn::Linear(9216, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
}

/// `forward` is that of the network, or of what wraps it.
template <class Forward>
double step_seconds(const Forward& forward, torch::optim::Optimizer& optimizer, const torch::Tensor& images,
                    const torch::Tensor& labels) {
    const auto begin = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(forward(images), labels).backward();
    optimizer.step();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                     values.end());
    return values[values.size() / 2];
}

void compare(ddp::ProcessGroup& group, std::int64_t batch) {
    const torch::Tensor images = torch::rand({batch, 1, 28, 28}), labels = torch::randint(10, {batch});
    torch::nn::Sequential alone = network(), wrapped = network();
    ddp::pytorch::DistributedDataParallel model(group, wrapped);
    torch::optim::SGD of_alone(alone->parameters(), 0.01), of_wrapped(wrapped->parameters(), 0.01);
    std::vector<double> plain, adapter, ratios;
    for (int step = 0; step < 100; ++step) {
        const double one =
            step_seconds([&](const auto& x) { return alone->forward(x); }, of_alone, images, labels);
        const double other =
            step_seconds([&](const auto& x) { return model(x); }, of_wrapped, images, labels);
        if (step < 10) continue;
        plain.push_back(one), adapter.push_back(other), ratios.push_back(other / one);
    }
    std::printf("batch %2d: LibTorch %.3f ms, with the adapter %.3f ms; median of the ratios %+.2f %%\n",
                static_cast<int>(batch), 1e3 * median(plain), 1e3 * median(adapter),
                100 * (median(ratios) - 1));
}

}  // namespace

int main() {
    at::set_num_threads(1);
    ddp::testing::run_ranks(1, [](ddp::ProcessGroup& group) {
        for (const std::int64_t batch : {8, 32, 64}) compare(group, batch);
    });
}
