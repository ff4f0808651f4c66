// The C++ side of bench_torch.py: a convolutional network trained by LibTorch on random images, the number of
// steps in the first argument. Rank 0 prints the median seconds of a step, without the first tenth.

#include <ddp/context.h>
#include <ddp/process_group.h>
#include <ddp/torch.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <vector>

#include "examples/torch/digits.h"

namespace {

using torch::Tensor;

constexpr std::int64_t kBatch = 32;

void train(ddp::ProcessGroup& group, int steps) {
    Net net;
    ddp::pytorch::DistributedDataParallel model(group, net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const Tensor images = torch::rand({kBatch, 1, 28, 28}),
                 labels = torch::randint(10, {kBatch}, torch::kLong);
    std::vector<double> seconds;
    for (int step = 0; step < steps; ++step) {
        const auto begin = std::chrono::steady_clock::now();
        optimizer.zero_grad();
        torch::nn::functional::cross_entropy(model(images), labels).backward();
        optimizer.step();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (step >= steps / 10) seconds.push_back(took.count());
    }
    const auto middle = seconds.begin() + std::ssize(seconds) / 2;
    std::nth_element(seconds.begin(), middle, seconds.end());
    if (group.rank() == 0) std::printf("%.9f\n", *middle);
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 2 || std::atoi(argv[1]) < 1) throw ddp::InvalidInput("bench_torch: give the number of steps");
    // As examples/torch/gpt.cpp: each step would fault its activations in again. Python's imports raise these
    // limits.
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, -1);
    const auto group = ddp::ProcessGroup::create(ddp::Context::from_env());
    torch::manual_seed(1);
    train(*group, std::atoi(argv[1]));
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "bench_torch: %s\n", error.what());
    return 1;
}
