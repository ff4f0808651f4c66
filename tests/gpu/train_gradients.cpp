// One pass of the train program's perceptron on a CUDA device, written to a file for train_check.py: the
// inputs, the weights that were multiplied, and the loss and gradients that came out.
//
//   train_gradients FILE fp32|tf32|bf16|fp16 [fused|tuned|plain|deterministic]
//
// tuned: by the fastest ways, as train does it by itself.
// plain: by our own kernels where cuBLASLt's epilogues would do it.
// Exit code 77, with one line, where there is no device.
#include <fmt/core.h>

#include <array>
#include <cstdio>
#include <string_view>

#include "ddp/cuda/host_copies.h"
#include "ddp/safetensors.h"
#include "env/text.h"
#include "train/cuda_compute.h"
#include "train/data.h"
#include "train/feed.h"
#include "train/mlp.h"
#include "train/station.h"

namespace {

constexpr int kSkipped = 77;
/// Widths that 16 bytes divide, and ones that nothing divides.
const std::vector<std::size_t> kWidths = {784, 1000, 513, 10};
constexpr std::size_t kSamples = 515;

std::vector<std::size_t> all_rows() {
    std::vector<std::size_t> rows;
    for (std::size_t row = 0; row < kSamples; ++row) rows.push_back(row);
    return rows;
}

/// Gradients in the parameters' type and places of their own.
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

void write(const std::string& path, const train::Station& station) {
    train::Samples samples = train::make_samples({kSamples, kWidths.front(), kWidths.back()}, 1);
    train::Compute& compute = *station.compute;
    train::Mlp mlp(kWidths, 2, compute);
    const Gradients gradients(compute, mlp.parameters());
    const train::Subset subset(samples, all_rows());
    const auto feed = train::make_feed(station, samples, {});
    feed->begin(subset, all_rows(), {.batch_size = kSamples, .prefetch = 0});
    mlp.stage(feed->next());
    const auto pass = [&] {
        mlp.forward();
        mlp.backward({[&](std::size_t i) { return gradients.memory(i); }, [](std::size_t) {}});
    };
    if (compute.rehearse(pass)) compute.take_score();
    pass();
    std::array<double, 1> loss = {compute.take_score().loss_sum / kSamples};

    using ddp::cuda::HostCopies;
    const HostCopies weights(mlp.parameters(), HostCopies::Begin::WithContents);
    const HostCopies results(gradients.tensors(), HostCopies::Begin::WithContents);
    std::vector<ddp::Tensor> all(weights.tensors().begin(), weights.tensors().end());
    all.insert(all.end(), results.tensors().begin(), results.tensors().end());
    constexpr auto kRows = static_cast<std::int64_t>(kSamples);
    all.push_back(ddp::tensor_of("values", std::span(samples.values),
                                 {kRows, static_cast<std::int64_t>(kWidths.front())}));
    all.push_back(ddp::tensor_of("labels", std::span(samples.labels), {kRows}));
    all.push_back(ddp::tensor_of("loss", std::span<double>(loss), {1}));
    ddp::write_safetensors(path, all);
}

/// The station that train would have, with other arithmetic.
void set_compute(train::Station& station, const train::CudaOptions& options) {
    const ddprun::Result<train::lt::Api> cublaslt = train::lt::load_api();
    if (!cublaslt) throw ddp::Error(cublaslt.error().what);
    station.compute.reset();
    station.compute = train::make_cuda_compute(station.gpu, std::make_shared<const train::lt::Api>(*cublaslt),
                                               station.stream_handle(), options);
}

int run(const std::string& path, std::string_view precision, std::string_view mode) {
    const std::string asked = fmt::format("--precision={}", precision);
    const std::vector<const char*> words = {"--device=cuda", asked.c_str()};
    const ddprun::Result<train::Options> options = train::parse_options(words);
    if (!options) {
        fmt::print(stderr, "train_gradients: {}\n", options.error().what);
        return 64;
    }
    ddprun::Result<train::Station> station = train::open_station(*options, 0);
    if (!station) {
        fmt::print("skipped: {}\n", station.error().what);
        return kSkipped;
    }
    set_compute(*station, {.precision = options->precision,
                           .deterministic = mode == "deterministic",
                           .epilogues = mode != "plain",
                           .tune = mode == "tuned"});
    write(path, *station);
    fmt::print("{}: {}\n", path, station->compute->describe());
    if (mode == "tuned") fmt::print("{}\n", station->compute->describe_tuning());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string_view mode = argc == 4 ? argv[3] : "fused";
    if (argc < 3 || argc > 4 ||
        (mode != "fused" && mode != "tuned" && mode != "plain" && mode != "deterministic")) {
        fmt::print(stderr,
                   "usage: train_gradients FILE fp32|tf32|bf16|fp16 [fused|tuned|plain|deterministic]\n");
        return 64;
    }
    try {
        return run(argv[1], argv[2], mode);
    } catch (const ddp::Error& error) {
        fmt::print(stderr, "train_gradients: {}\n", error.what());
        return 1;
    }
}
