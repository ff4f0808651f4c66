// One pass of the train program's perceptron on a CUDA device, written to a file for train_check.py: the
// inputs, the weights of the products, the loss and the gradients.
//
//   train_gradients FILE fp32|tf32|bf16|fp16 [SAMPLES,WIDTH,...,WIDTH]
//
// Exit code 77, with one line, without a device.
#include <fmt/core.h>

#include <array>
#include <cstdio>
#include <string_view>

#include "ddp/checkpoint.h"
#include "ddp/cuda/host_copies.h"
#include "env/text.h"
#include "train/batch_feed.h"
#include "train/compute_device.h"
#include "train/mlp.h"
#include "train/samples/data.h"

namespace {

constexpr int kSkipped = 77;
/// One batch, and the widths of the perceptron's layers.
struct Size {
    // Some widths are multiples of 16 bytes, some are odd.
    std::size_t samples = 515;
    std::vector<std::size_t> widths = {784, 1000, 513, 10};
};

std::vector<std::size_t> all_rows(const Size& size) {
    std::vector<std::size_t> rows;
    for (std::size_t row = 0; row < size.samples; ++row) rows.push_back(row);
    return rows;
}

/// "515,784,1000,513,10". Error: InvalidArgument.
ddprun::Result<Size> parse_size(std::string_view text) {
    std::vector<std::size_t> numbers;
    for (const std::string_view piece : ddprun::split(text, ',')) {
        const ddprun::Result<std::int64_t> number = ddprun::parse_int_between(piece, 1, 1 << 16);
        if (!number) return number.error();
        numbers.push_back(static_cast<std::size_t>(*number));
    }
    if (numbers.size() < 3)
        return ddprun::Error{ddprun::Errc::InvalidArgument, "a size is SAMPLES,WIDTH,...,WIDTH"};
    return Size{numbers.front(), {numbers.begin() + 1, numbers.end()}};
}

/// Gradients of the parameters' type, in memory of their own.
class Gradients {
  public:
    Gradients(train::Compute& compute, const std::vector<ddp::Tensor>& parameters) {
        for (ddp::Tensor tensor : parameters) {
            memory_.push_back(compute.allocate(tensor.memory.bytes()));
            tensor.name = "gradient." + tensor.name;
            tensor.memory.data = memory_.back().get();
            tensors_.push_back(std::move(tensor));
        }
    }
    [[nodiscard]] const std::vector<ddp::Tensor>& tensors() const { return tensors_; }
    [[nodiscard]] void* memory(std::size_t i) const { return memory_[i].get(); }

  private:
    std::vector<train::Memory> memory_;
    std::vector<ddp::Tensor> tensors_;
};

void write(const std::string& path, const train::ComputeDevice& device, const Size& size) {
    train::Samples samples = train::make_samples({size.samples, size.widths.front(), size.widths.back()}, 1);
    train::Compute& compute = *device.compute;
    train::Mlp mlp(size.widths, 2, compute);
    const Gradients gradients(compute, mlp.parameters());
    const train::Subset subset(samples, all_rows(size));
    const auto feed = train::make_feed(device, samples, {});
    feed->begin(subset, all_rows(size), {.batch_size = size.samples, .prefetch = 0});
    mlp.stage(feed->next());
    mlp.forward();
    mlp.backward({[&](std::size_t i) { return gradients.memory(i); }, [](std::size_t) {}});
    std::array<double, 1> loss = {compute.take_score().loss_sum / static_cast<double>(size.samples)};

    using ddp::cuda::HostCopies;
    const HostCopies weights(mlp.parameters(), HostCopies::Begin::WithContents);
    const HostCopies results(gradients.tensors(), HostCopies::Begin::WithContents);
    std::vector<ddp::Tensor> all(weights.tensors().begin(), weights.tensors().end());
    all.insert(all.end(), results.tensors().begin(), results.tensors().end());
    const auto rows = static_cast<std::int64_t>(size.samples);
    all.push_back(ddp::tensor_of("values", std::span(samples.values),
                                 {rows, static_cast<std::int64_t>(size.widths.front())}));
    all.push_back(ddp::tensor_of("labels", std::span(samples.labels), {rows}));
    all.push_back(ddp::tensor_of("loss", std::span<double>(loss), {1}));
    ddp::write_safetensors(path, all);
}

int run(const std::string& path, std::string_view precision, const Size& size) {
    const std::string asked = fmt::format("--precision={}", precision);
    const std::vector<const char*> words = {"--device=cuda", asked.c_str()};
    const ddprun::Result<train::Options> options = train::parse_options(words);
    if (!options) {
        fmt::print(stderr, "train_gradients: {}\n", options.error().what);
        return 64;
    }
    ddprun::Result<train::ComputeDevice> device = train::open_compute_device(*options, 0);
    if (!device) {
        fmt::print("skipped: {}\n", device.error().what);
        return kSkipped;
    }
    write(path, *device, size);
    fmt::print("{}: {}\n", path, device->compute->describe());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const ddprun::Result<Size> size = argc == 4 ? parse_size(argv[3]) : ddprun::Result<Size>(Size());
    if (argc < 3 || argc > 4 || !size) {
        fmt::print(stderr, "usage: train_gradients FILE fp32|tf32|bf16|fp16 [SAMPLES,WIDTH,...,WIDTH]\n");
        return 64;
    }
    try {
        return run(argv[1], argv[2], *size);
    } catch (const ddp::Error& error) {
        fmt::print(stderr, "train_gradients: {}\n", error.what());
        return 1;
    }
}
